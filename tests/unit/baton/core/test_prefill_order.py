"""Tests the exact ranks of prefill orders, and how late requests and others share a step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.prefill_order import (
    LATE_SHARE,
    PREFILL_ORDERS,
    WaitingPrompt,
    allocate_step_tokens,
    seconds_beside_late,
)
from baton.core.priority import STARVATION_LIMIT_SECONDS, Priority

PREEMPTIVE = [name for name, order in PREFILL_ORDERS.items() if order.is_preemptive]


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


@pytest.mark.parametrize("order", PREEMPTIVE)
def test_late_prompts_rank_behind_others_by_arrival(order: str) -> None:
    late = WaitingPrompt(0.0, deadline_seconds=2.0, remaining_seconds=1.0)
    assert not PREFILL_ORDERS[order].rank(late, 1.0)[1]  # it is just in time
    assert PREFILL_ORDERS[order].rank(late, 1.1) == (True, True, 0.0)
    later = WaitingPrompt(0.5, deadline_seconds=1.0)
    fresh = WaitingPrompt(1.1, deadline_seconds=90.0, remaining_seconds=1.0)
    assert ranked(order, 1.1, later=later, late=late, fresh=fresh) == ["fresh", "late", "later"]


@pytest.mark.parametrize("order", ["fcfs", "cached_first"])
def test_orders_that_finish_prompts_know_no_late_ones(order: str) -> None:
    assert PREFILL_ORDERS[order].rank(WaitingPrompt(3.0, deadline_seconds=4.0), 9.0)[1:] == (
        False,
        3.0,
    )


def test_until_the_deadline_is_known_the_objective_takes_its_place() -> None:
    """So the order is the same before and after the worker has measured its speed: the latest
    start of a prompt of which nothing is computed is its arrival plus the objective."""
    before = WaitingPrompt(3.0, objective_seconds=2.0)
    after = WaitingPrompt(3.0, deadline_seconds=5.7, objective_seconds=2.0, remaining_seconds=0.7)
    assert before.latest_start_seconds == after.latest_start_seconds == 5.0
    assert (before.is_late(5.0), before.is_late(5.1)) == (False, True)


@pytest.mark.parametrize("priority", Priority)
def test_without_an_objective_a_prompt_is_due_at_its_starvation_limit(priority: Priority) -> None:
    waiting = WaitingPrompt(3.0, priority=priority)
    assert waiting.due_seconds == 3.0 + STARVATION_LIMIT_SECONDS[priority]


@pytest.mark.parametrize("order", PREFILL_ORDERS)
def test_preempted_prompt_goes_before_all_others(order: str) -> None:
    old = WaitingPrompt(0.0, deadline_seconds=1.0, cached_tokens=10**6)
    assert ranked(order, 50.0, old=old, back=WaitingPrompt(50.0, was_preempted=True)) == [
        "back",
        "old",
    ]


def test_late_prompts_are_overdue_after_twice_the_wait_that_they_may_have() -> None:
    late = WaitingPrompt(1.0, deadline_seconds=3.0, remaining_seconds=0.5)
    assert [late.is_late(now) for now in (2.5, 2.6)] == [False, True]
    assert [late.is_overdue(now) for now in (2.6, 5.0, 5.1)] == [False, False, True]
    long = WaitingPrompt(1.0, deadline_seconds=900.0, remaining_seconds=898.0)
    assert [long.is_overdue(now) for now in (61.0, 61.1)] == [False, True]
    long.remaining_seconds = 5.0  # it was computed, and can be in time
    assert not long.is_overdue(61.1)


def test_overdue_prompts_get_half_of_a_step_and_what_is_left() -> None:
    now = 10.0
    older, old = (
        WaitingPrompt(3.0, deadline_seconds=6.0, new_tokens=30),
        WaitingPrompt(9.0, deadline_seconds=9.4, new_tokens=40),
    )
    back = WaitingPrompt(0.0, new_tokens=7, was_preempted=True)
    fresh = WaitingPrompt(now, new_tokens=50)
    late = WaitingPrompt(5.0, deadline_seconds=8.0, new_tokens=50)

    def shares(*ranked: WaitingPrompt, budget: int) -> list[tuple[int, int]]:
        return allocate_step_tokens(ranked, now, budget, {b""})

    assert shares(back, fresh, budget=100) == [(0, 7), (1, 50)]
    assert shares(older, old, budget=100) == [(0, 30), (1, 40)]
    assert shares(fresh, older, old, budget=40) == [(1, 20), (0, 20), (2, 40)]
    assert shares(fresh, older, old, budget=100) == [(1, 30), (2, 20), (0, 50)]
    assert shares(fresh, older, old, budget=110) == [(1, 30), (2, 30), (0, 50)]
    assert shares(back, fresh, older, budget=47) == [(0, 7), (2, 20), (1, 20)]
    assert shares(fresh, older, budget=1) == [(1, 1), (0, 1)]
    assert shares(fresh, late, older, budget=100) == [(2, 30), (0, 50), (1, 20)]
    assert shares(budget=100) == []


def test_late_share_is_within_a_priority_and_those_that_starve_share_the_step() -> None:
    now = STARVATION_LIMIT_SECONDS[Priority.LOW] + 1
    starving = WaitingPrompt(0.0, new_tokens=50, priority=Priority.LOW)
    low = WaitingPrompt(5.0, deadline_seconds=9.0, new_tokens=50, priority=Priority.LOW)
    batch = WaitingPrompt(0.0, new_tokens=50, priority=Priority.BATCH)
    late = WaitingPrompt(5.0, deadline_seconds=9.0, new_tokens=60)
    fresh = WaitingPrompt(now, new_tokens=30)

    def shares(*ranked: WaitingPrompt) -> list[tuple[int, int]]:
        return allocate_step_tokens(ranked, now, 100, {b""})

    assert shares(fresh, late, starving, low, batch) == [
        (2, 50), (1, 25), (0, 25), (3, 100), (4, 100),
    ]  # fmt: skip
    assert shares(fresh, starving, low, batch) == [(1, 50), (0, 30), (2, 20), (3, 100)]
    assert shares(late, low) == [(0, 60), (1, 40)]
    assert shares(low, batch) == [(0, 50), (1, 50)]


def test_late_share_is_within_what_a_tenant_gets() -> None:
    now = 10.0
    rich = WaitingPrompt(0.0, deadline_seconds=1.0, new_tokens=90, tenant=b"r")
    poor = WaitingPrompt(now, new_tokens=60, tenant=b"p")
    poor_late = WaitingPrompt(now, deadline_seconds=1.0, new_tokens=90, tenant=b"p")
    assert allocate_step_tokens([poor, rich], now, 100, {b"p"}) == [(0, 60), (1, 40)]
    assert allocate_step_tokens([poor, rich, poor_late], now, 100, {b"p"}) == [
        (2, 30), (0, 30), (1, 40),
    ]  # fmt: skip


def test_late_work_lengthens_work_in_time_until_it_is_computed() -> None:
    assert seconds_beside_late(3.0, 0.0) == 3.0
    assert seconds_beside_late(3.0, 1.0) == 4.0
    assert seconds_beside_late(3.0, 9.0) == 3.0 / (1 - LATE_SHARE)


SECONDS = st.floats(0, 1e6)
WAITING = st.builds(
    WaitingPrompt,
    arrival_seconds=SECONDS,
    deadline_seconds=SECONDS | st.just(math.inf),
    objective_seconds=SECONDS | st.just(math.inf),
    remaining_seconds=SECONDS,
    new_tokens=st.integers(0, 10**7),
    was_preempted=st.booleans(),
    priority=st.sampled_from(Priority),
    tenant=st.sampled_from([b"", b"other"]),
)


@given(waiting=st.lists(WAITING, max_size=12), now=SECONDS, budget=st.integers(1, 10**5))
def test_all_of_a_step_is_used(waiting: list[WaitingPrompt], now: float, budget: int) -> None:
    shares = allocate_step_tokens(waiting, now, budget, {b""})
    assert sorted(index for index, _ in shares) == list(range(len(waiting)))
    left = budget
    for index, limit in shares:
        left -= min(limit, waiting[index].new_tokens, left)
    assert left == max(budget - sum(each.new_tokens for each in waiting), 0)


@given(waiting=st.lists(WAITING, max_size=12), now=SECONDS, budget=st.integers(1, 10**5))
def test_overdue_prompts_and_others_get_half_of_a_step_each(
    waiting: list[WaitingPrompt], now: float, budget: int
) -> None:
    """Or all that they need. Of the overdue ones, it is for those that came first."""
    for each in waiting:
        each.priority, each.tenant, each.was_preempted = Priority.NORMAL, b"", False
    order = PREFILL_ORDERS["deadline"]
    waiting.sort(key=lambda each: order.rank(each, now))
    shares, used = allocate_step_tokens(waiting, now, budget, {b""}), dict[int, int]()
    for index, limit in shares:
        used[index] = min(limit, waiting[index].new_tokens, budget - sum(used.values()))
    half = (budget + 1) // 2
    for is_overdue, least in ((True, half), (False, budget - half)):
        kind = [i for i, each in enumerate(waiting) if each.is_overdue(now) == is_overdue]
        wanted = sum(waiting[index].new_tokens for index in kind)
        assert sum(used[index] for index in kind) >= min(least, wanted)
        unfinished = [index for index in kind if used[index] < waiting[index].new_tokens]
        assert not any(used[index] for index in kind if unfinished and index > unfinished[0])
