"""Orders of prompts, exactly, and that none of them starves anybody."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.order import LATE_STRETCH, ORDERS, PATIENCE_SECONDS, Rank, Waiting, shares


def ranked(order: str, now_seconds: float, **waiting: Waiting) -> list[str]:
    return sorted(waiting, key=lambda name: ORDERS[order].rank(waiting[name], now_seconds))


def test_first_come_first_served() -> None:
    assert ranked("fcfs", 9.0, b=Waiting(2.0), a=Waiting(1.0, cached_tokens=99)) == ["a", "b"]


def test_the_longest_cached_prefix_goes_first_and_waiting_counts() -> None:
    cold, warm = Waiting(0.0), Waiting(1.0, cached_tokens=2001)
    assert ranked("cached_first", 1.0, cold=cold, warm=warm) == ["warm", "cold"]
    warm.cached_tokens = 1999
    assert ranked("cached_first", 1.0, cold=cold, warm=warm) == ["cold", "warm"]


def test_the_shortest_goes_first_and_waiting_counts() -> None:
    long, short = Waiting(0.0, remaining_seconds=1.0), Waiting(9.0, remaining_seconds=0.05)
    assert ranked("shortest", 9.0, long=long, short=short) == ["short", "long"]
    short.arrival_seconds = 9.6
    assert ranked("shortest", 9.6, long=long, short=short) == ["long", "short"]


def test_the_earliest_deadline_goes_first() -> None:
    long = Waiting(0.0, deadline_seconds=12.0, remaining_seconds=10.0)
    short = Waiting(0.0, deadline_seconds=2.1, remaining_seconds=0.1)
    assert ranked("deadline", 0.0, long=long, short=short) == ["short", "long"]


def test_the_least_slack_goes_first() -> None:
    long = Waiting(0.0, deadline_seconds=12.0, remaining_seconds=10.5)
    short = Waiting(0.0, deadline_seconds=2.1, remaining_seconds=0.1)
    assert ranked("slack", 0.0, long=long, short=short) == ["long", "short"]


@pytest.mark.parametrize("order", ["deadline", "slack"])
def test_who_is_late_goes_behind_who_is_not_until_it_has_waited_long(order: str) -> None:
    late = Waiting(0.0, deadline_seconds=2.0, remaining_seconds=1.0)
    assert ORDERS[order].rank(late, 1.0) <= (1.0, 2.0)  # it just makes it
    assert ORDERS[order].rank(late, 1.1) == (1.0, 2.0 * LATE_STRETCH)
    patient = Waiting(0.0, deadline_seconds=20.0, remaining_seconds=20.0)
    assert ORDERS[order].rank(patient, 0.1) == (1.0, PATIENCE_SECONDS)
    for arrival, expected in ((2.0, ["fresh", "late"]), (2.0 * LATE_STRETCH, ["late", "fresh"])):
        fresh = Waiting(arrival, deadline_seconds=arrival + 2.0, remaining_seconds=1.0)
        assert ranked(order, arrival, late=late, fresh=fresh) == expected


@pytest.mark.parametrize("order", ["deadline", "slack"])
def test_without_a_deadline_it_waits_as_long_as_anybody_may(order: str) -> None:
    assert ORDERS[order].rank(Waiting(3.0), 5.0) == (1.0, 3.0 + PATIENCE_SECONDS)


@pytest.mark.parametrize("order", ORDERS)
def test_who_was_preempted_goes_before_all_others(order: str) -> None:
    old = Waiting(0.0, deadline_seconds=1.0, cached_tokens=10**6)
    assert ranked(order, 50.0, old=old, back=Waiting(50.0, preempted=True)) == ["back", "old"]


def test_who_has_waited_long_gets_half_of_a_step_and_what_is_left() -> None:
    now = PATIENCE_SECONDS + 10
    old, older = Waiting(9.0, new_tokens=40), Waiting(3.0, new_tokens=30)
    back = Waiting(0.0, new_tokens=7, preempted=True)
    fresh = Waiting(now, new_tokens=50)
    assert shares([fresh, back], now, 100) == [(0, 100), (1, 100)]
    assert shares([older, old], now, 100) == [(0, 30), (1, 40)]
    assert shares([back, older, old, fresh], now, 40) == [(1, 20), (0, 40), (3, 40), (2, 40)]
    assert shares([older, old, fresh], now, 100) == [(0, 30), (1, 20), (2, 100)]
    assert shares([older, old, fresh], now, 110) == [(0, 30), (1, 30), (2, 110)]
    assert shares([older, fresh], now, 1) == [(0, 1), (1, 1)]
    assert shares([], now, 100) == []


SECONDS = st.floats(0, 1e6)
WAITING = st.builds(
    Waiting,
    arrival_seconds=SECONDS,
    deadline_seconds=SECONDS | st.just(math.inf),
    remaining_seconds=SECONDS,
    cached_tokens=st.integers(0, 10**7),
    new_tokens=st.integers(0, 10**7),
)


@given(order=st.sampled_from(list(ORDERS)), one=WAITING, other=WAITING, now=SECONDS)
def test_nobody_is_passed_by_who_comes_later_than_the_patience(
    order: str, one: Waiting, other: Waiting, now: float
) -> None:
    def rank(waiting: Waiting) -> Rank:
        return ORDERS[order].rank(waiting, now)

    if other.arrival_seconds > one.arrival_seconds + PATIENCE_SECONDS:
        assert rank(one) < rank(other)
    assert one.arrival_seconds <= rank(one)[1] <= one.arrival_seconds + PATIENCE_SECONDS
