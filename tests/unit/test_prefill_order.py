"""Tests the exact ranks of prefill orders, and that no order starves a request."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.prefill_order import (
    LATE_BUDGET_MULTIPLE,
    NORMAL_STARVATION_LIMIT_SECONDS,
    PREFILL_ORDERS,
    Rank,
    WaitingPrompt,
    allocate_step_tokens,
)


def ranked(order: str, now_seconds: float, **waiting: WaitingPrompt) -> list[str]:
    return sorted(waiting, key=lambda name: PREFILL_ORDERS[order].rank(waiting[name], now_seconds))


def test_first_come_first_served() -> None:
    assert ranked("fcfs", 9.0, b=WaitingPrompt(2.0), a=WaitingPrompt(1.0, cached_tokens=99)) == [
        "a",
        "b",
    ]


def test_longest_cached_prefix_goes_first_and_waiting_counts() -> None:
    cold, warm = WaitingPrompt(0.0), WaitingPrompt(1.0, cached_tokens=2001)
    assert ranked("cached_first", 1.0, cold=cold, warm=warm) == ["warm", "cold"]
    warm.cached_tokens = 1999
    assert ranked("cached_first", 1.0, cold=cold, warm=warm) == ["cold", "warm"]


def test_shortest_prompt_goes_first_and_waiting_counts() -> None:
    long, short = (
        WaitingPrompt(0.0, remaining_seconds=1.0),
        WaitingPrompt(9.0, remaining_seconds=0.05),
    )
    assert ranked("shortest", 9.0, long=long, short=short) == ["short", "long"]
    short.arrival_seconds = 9.6
    assert ranked("shortest", 9.6, long=long, short=short) == ["long", "short"]


def test_earliest_deadline_goes_first() -> None:
    long = WaitingPrompt(0.0, deadline_seconds=12.0, remaining_seconds=10.0)
    short = WaitingPrompt(0.0, deadline_seconds=2.1, remaining_seconds=0.1)
    assert ranked("deadline", 0.0, long=long, short=short) == ["short", "long"]


def test_least_slack_goes_first() -> None:
    long = WaitingPrompt(0.0, deadline_seconds=12.0, remaining_seconds=10.5)
    short = WaitingPrompt(0.0, deadline_seconds=2.1, remaining_seconds=0.1)
    assert ranked("slack", 0.0, long=long, short=short) == ["long", "short"]


@pytest.mark.parametrize("order", ["deadline", "slack"])
def test_late_prompt_goes_behind_others_until_it_has_waited_long(order: str) -> None:
    late = WaitingPrompt(0.0, deadline_seconds=2.0, remaining_seconds=1.0)
    assert PREFILL_ORDERS[order].rank(late, 1.0) <= (1.0, 2.0)  # it is just in time
    assert PREFILL_ORDERS[order].rank(late, 1.1) == (1.0, 2.0 * LATE_BUDGET_MULTIPLE)
    patient = WaitingPrompt(0.0, deadline_seconds=20.0, remaining_seconds=20.0)
    assert PREFILL_ORDERS[order].rank(patient, 0.1) == (1.0, NORMAL_STARVATION_LIMIT_SECONDS)
    for arrival, expected in (
        (2.0, ["fresh", "late"]),
        (2.0 * LATE_BUDGET_MULTIPLE, ["late", "fresh"]),
    ):
        fresh = WaitingPrompt(arrival, deadline_seconds=arrival + 2.0, remaining_seconds=1.0)
        assert ranked(order, arrival, late=late, fresh=fresh) == expected


@pytest.mark.parametrize("order", ["deadline", "slack"])
def test_prompt_without_a_deadline_waits_up_to_the_starvation_limit(order: str) -> None:
    assert PREFILL_ORDERS[order].rank(WaitingPrompt(3.0), 5.0) == (
        1.0,
        3.0 + NORMAL_STARVATION_LIMIT_SECONDS,
    )


@pytest.mark.parametrize("order", PREFILL_ORDERS)
def test_preempted_prompt_goes_before_all_others(order: str) -> None:
    old = WaitingPrompt(0.0, deadline_seconds=1.0, cached_tokens=10**6)
    assert ranked(order, 50.0, old=old, back=WaitingPrompt(50.0, was_preempted=True)) == [
        "back",
        "old",
    ]


def test_starving_prompts_get_half_of_a_step_and_what_is_left() -> None:
    now = NORMAL_STARVATION_LIMIT_SECONDS + 10
    old, older = WaitingPrompt(9.0, new_tokens=40), WaitingPrompt(3.0, new_tokens=30)
    back = WaitingPrompt(0.0, new_tokens=7, was_preempted=True)
    fresh = WaitingPrompt(now, new_tokens=50)
    assert allocate_step_tokens([fresh, back], now, 100, {b""}) == ([], [0, 1])
    assert allocate_step_tokens([older, old], now, 100, {b""}) == ([(0, 30), (1, 40)], [])
    assert allocate_step_tokens([back, older, old, fresh], now, 40, {b""}) == ([(1, 20)], [0, 3, 2])
    assert allocate_step_tokens([older, old, fresh], now, 100, {b""}) == ([(0, 30), (1, 20)], [2])
    assert allocate_step_tokens([older, old, fresh], now, 110, {b""}) == ([(0, 30), (1, 30)], [2])
    assert allocate_step_tokens([older, fresh], now, 1, {b""}) == ([(0, 1)], [1])
    assert allocate_step_tokens([], now, 100, {b""}) == ([], [])


SECONDS = st.floats(0, 1e6)
WAITING = st.builds(
    WaitingPrompt,
    arrival_seconds=SECONDS,
    deadline_seconds=SECONDS | st.just(math.inf),
    remaining_seconds=SECONDS,
    cached_tokens=st.integers(0, 10**7),
    new_tokens=st.integers(0, 10**7),
)


@given(order=st.sampled_from(list(PREFILL_ORDERS)), one=WAITING, other=WAITING, now=SECONDS)
def test_prompt_is_not_overtaken_by_one_that_arrives_after_the_starvation_limit(
    order: str, one: WaitingPrompt, other: WaitingPrompt, now: float
) -> None:
    def rank(waiting: WaitingPrompt) -> Rank:
        return PREFILL_ORDERS[order].rank(waiting, now)

    if other.arrival_seconds > one.arrival_seconds + NORMAL_STARVATION_LIMIT_SECONDS:
        assert rank(one) < rank(other)
    assert (
        one.arrival_seconds <= rank(one)[1] <= one.arrival_seconds + NORMAL_STARVATION_LIMIT_SECONDS
    )
