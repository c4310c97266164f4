"""Tests of budgets and fair queues, against plain models, and with cancellation at each await."""

import asyncio
from contextlib import ExitStack
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.concurrency.budget import Budget, BudgetShare
from baton.concurrency.fair_queue import FairQueue
from baton.core.ids import TenantId
from baton.errors import Overloaded

A, B = TenantId("a"), TenantId("b")
OWNERS = ("a", "b", "c")


# -- fair queue -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("add", "take", "remove")),
            st.sampled_from(OWNERS),
            st.sets(st.sampled_from(OWNERS)),
            st.sets(st.integers(0, 60)),
        ),
        max_size=60,
    )
)
def test_queue_equals_a_list_of_owners_with_lists_of_items(
    steps: list[tuple[str, str, set[str], set[int]]],
) -> None:
    queue, model = FairQueue[int](), list[tuple[str, list[int]]]()
    for number, (kind, owner, served, unwanted) in enumerate(steps):
        if kind == "add":
            queue.add(owner, number)
            if owner not in dict(model):
                model.append((owner, []))
            dict(model)[owner].append(number)
        elif kind == "take":
            taken = queue.take(served.__contains__, lambda item, no=unwanted: item not in no)
            assert taken == _take_from(model, served, unwanted)
        else:
            item = min(dict(model).get(owner, []), default=-1)
            queue.remove(owner, item)
            for each, items in model.copy():
                if item in items:
                    items.remove(item)
                    if not items:
                        model.remove((each, items))
        assert len(queue) == sum(len(items) for _, items in model)
        assert all(queue.num_items_of(each) == len(dict(model).get(each, ())) for each in OWNERS)


def _take_from(
    model: list[tuple[str, list[int]]], served: set[str], unwanted: set[int]
) -> tuple[str, int] | None:
    for entry in model.copy():
        owner, items = entry
        if owner not in served:
            continue
        wanted = [item for item in items if item not in unwanted]
        model.remove(entry)
        if wanted:
            rest = items[items.index(wanted[0]) + 1 :]
            if rest:
                model.append((owner, rest))
            return owner, wanted[0]
    return None


def test_owners_take_turns_and_the_largest_loses_its_oldest() -> None:
    queue = FairQueue[int]()
    for number, owner in enumerate(("a", "a", "a", "b", "b", "c")):
        queue.add(owner, number)
    assert queue.take_from_largest() == 0
    taken = [queue.take() for _ in range(len(queue))]
    assert taken == [("b", 3), ("c", 5), ("a", 1), ("b", 4), ("a", 2)]
    assert len(queue) == 0 and queue.take() is None


# -- refusing -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    limit=st.integers(1, 20),
    weights=st.tuples(*[st.sampled_from((1, 2, 4)) for _ in OWNERS]),
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 6), st.booleans()), max_size=50
    ),
)
def test_budget_equals_weighted_max_min_fairness(
    limit: int, weights: tuple[int, ...], steps: list[tuple[bool, int, int, bool]]
) -> None:
    budget, used = Budget(limit), dict.fromkeys(range(len(OWNERS)), 0)
    for acquires, owner, amount, shared in steps:
        if not acquires:
            amount = min(amount, used[owner])
            budget.release(amount, OWNERS[owner])
            used[owner] -= amount
        else:
            admitted = _admits(limit, weights, used, owner, amount, shared)
            if admitted:
                budget.acquire(amount, OWNERS[owner], weights[owner], shared)
                used[owner] += amount
            else:
                with pytest.raises(Overloaded) as refusal:
                    budget.acquire(amount, OWNERS[owner], weights[owner], shared)
                assert refusal.value.retry_after_seconds == 1.0
        assert budget.num_in_use == sum(used.values())
        assert [budget.num_in_use_by(each) for each in OWNERS] == list(used.values())


def _admits(
    limit: int,
    weights: tuple[int, ...],
    used: dict[int, int],
    owner: int,
    amount: int,
    shared: bool,
) -> bool:
    total = sum(used.values()) + amount
    users = {each for each, count in used.items() if count}
    if not amount or total > limit or not shared or total <= limit - limit // 4:
        return total <= limit or not amount
    if users == {owner}:
        return False
    share = Fraction(limit * weights[owner], sum(weights[each] for each in users | {owner}))
    return used[owner] + amount <= share


@pytest.mark.parametrize(
    ("held", "owner", "expected"),
    [
        ((8, 0), A, "handles 8 bytes now, and 1 more would exceed its limit of 8"),
        ((6, 0), A, "handles 6 bytes of this model now, and the rest of the limit of 8 is reserved "
         "for other models"),
        ((6, 1), A, "handles 6 bytes of this model now, and 1 more would exceed the model's fair "
         "share of 4; all models together use 7 of at most 8"),
    ],
)  # fmt: skip
def test_refusals(held: tuple[int, int], owner: str, expected: str) -> None:
    budget = Budget(8, "bytes", user="model")
    for amount, each in zip(held, (A, B), strict=True):
        budget.acquire(amount, each, 1.0, False)
    with pytest.raises(Overloaded) as refusal:
        budget.acquire(1, owner, 1.0, True)
    assert str(refusal.value) == f"this router {expected}"


def test_share_is_returned_when_its_block_ends_unless_it_is_detached() -> None:
    budget = Budget(8)
    with BudgetShare(budget, A, 1.0, False) as share:
        share._acquire(5)
        with pytest.raises(Overloaded):
            share._acquire(4)
        share._keep(3)
        assert budget.num_in_use == 3
    assert budget.num_in_use == 0
    with BudgetShare(budget, A, 1.0, False) as share:
        share._acquire(2)
        release = share.detach()
    assert budget.num_in_use == 2
    release()
    assert budget.num_in_use == 0


def fill(budget: Budget, held: ExitStack, tenant: TenantId, weight: float = 1.0) -> int:
    """Send requests until one is refused; return how many were admitted."""
    count = 0
    while True:
        try:
            held.enter_context(budget.hold(1, tenant, weight, shared=True))
        except Overloaded:
            return count
        count += 1


def test_single_tenant_leaves_a_reserve_for_others() -> None:
    budget = Budget(8)
    with ExitStack() as held:
        assert fill(budget, held, A) == 6
        assert fill(budget, held, B) == 2
    assert budget.num_in_use == 0
    with budget.hold(8, A):
        assert budget.num_in_use == 8


def test_tenant_below_its_share_gets_every_free_slot() -> None:
    budget = Budget(8)
    with ExitStack() as of_a, ExitStack() as of_b:
        first = [of_a.enter_context(ExitStack()) for _ in range(6)]
        for place in first:
            place.enter_context(budget.hold(1, A, shared=True))
        assert fill(budget, of_b, B) == 2
        for place in first[:3]:
            place.close()
            assert fill(budget, of_a, A) == 0 or budget.num_in_use_by(B) >= 4
            fill(budget, of_b, B)
        assert (budget.num_in_use_by(A), budget.num_in_use_by(B)) == (4, 4)


def test_admitted_requests_stay_when_the_share_shrinks() -> None:
    budget = Budget(8)
    with ExitStack() as held:
        assert fill(budget, held, A) == 6
        assert fill(budget, held, B) == 2
        with budget.hold(0, A, shared=True):
            assert budget.num_in_use == 8
    with budget.hold(0, A, shared=True):
        assert budget.num_in_use == 0


def test_shares_follow_weights() -> None:
    budget = Budget(12)
    with ExitStack() as held, ExitStack() as of_a:
        assert fill(budget, of_a, A) == 9
        assert fill(budget, held, B, 2.0) == 3
        of_a.close()
        assert fill(budget, held, B, 2.0) == 6
        assert fill(budget, held, A) == 3


# -- waiting --------------------------------------------------------------------------------------


class Work:
    """Jobs of several owners. A job occupies a slot until the test ends it; ``began`` lists the
    jobs in the order in which they got their slots."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._release: dict[str, asyncio.Event] = {}
        self.began: list[str] = []

    def begin(self, name: str) -> "asyncio.Task[None]":
        return asyncio.create_task(self._work(name))

    async def end(self, name: str) -> None:
        self._release[name].set()
        for _ in range(5):
            await asyncio.sleep(0)

    async def _work(self, name: str) -> None:
        self._release[name] = asyncio.Event()
        async with self._budget.turn(name[0]):
            self.began.append(name)
            await self._release[name].wait()


async def test_no_owner_takes_all_slots_and_owners_alternate() -> None:
    budget = Budget(2, "things", max_waiting=16)
    work = Work(budget)
    tasks = [work.begin(name) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert work.began == ["a1", "b1"]
    await work.end("a1")
    assert work.began == ["a1", "b1", "a2"]
    await work.end("b1")
    assert work.began == ["a1", "b1", "a2", "b2"]
    await work.end("a2")
    assert work.began[4:] == ["c1"]
    tasks[2].cancel()  # a3, while it waits
    for name in ("b2", "c1", "a4"):
        await work.end(name)
    await asyncio.wait(tasks)
    assert work.began[5:] == ["a4"] and budget.num_waiting == budget.num_in_use == 0


async def test_waiting_jobs_are_bounded_per_owner_and_in_total() -> None:
    budget = Budget(1, "things", max_waiting=8)
    work = Work(budget)
    tasks = [work.begin(f"a{number}") for number in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too many things are waiting"):
        await budget.wait("a")
    others = [work.begin(f"{name}1") for name in "bcdefg"]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await budget.wait("h")
    for task in (*tasks, *others):
        task.cancel()
    await asyncio.wait((*tasks, *others))
    assert budget.num_waiting == budget.num_in_use == 0


@settings(deadline=None)
@given(
    num_units=st.integers(1, 3),
    owner_limit=st.integers(1, 3),
    steps=st.lists(
        st.tuples(
            st.sampled_from(("begin", "end", "cancel", "end and cancel")), st.integers(0, 30)
        ),
        max_size=40,
    ),
)
def test_turns_equal_a_plain_model_whatever_is_cancelled(
    num_units: int, owner_limit: int, steps: list[tuple[str, int]]
) -> None:
    asyncio.run(_compare_turns(num_units, owner_limit, steps))


async def _compare_turns(num_units: int, owner_limit: int, steps: list[tuple[str, int]]) -> None:
    """Run calls that hold a unit until they are ended or cancelled. "end and cancel" cancels a
    waiting call at the moment at which another call's end may give it its turn."""
    budget = Budget(num_units, owner_limit=owner_limit)
    tasks, ends = dict[str, "asyncio.Task[None]"](), dict[str, asyncio.Event]()
    running, waiting = list[str](), list[tuple[str, list[str]]]()

    async def call(name: str) -> None:
        async with budget.turn(name[0]):
            await ends[name].wait()

    def may_run(owner: str) -> bool:
        own = sum(name[0] == owner for name in running)
        return len(running) < num_units and own < owner_limit

    def give_turns() -> None:
        for entry in waiting.copy():
            owner, names = entry
            if may_run(owner):
                waiting.remove(entry)
                running.append(names.pop(0))
                if names:
                    waiting.append(entry)
                return

    def drop(name: str) -> None:
        for entry in waiting.copy():
            if name in entry[1]:
                entry[1].remove(name)
                if not entry[1]:
                    waiting.remove(entry)

    for number, (kind, pick) in enumerate(steps):
        queued = [name for _, names in waiting for name in names]
        if kind == "begin":
            owner = OWNERS[pick % 3]
            name = f"{owner}{number}"
            ends[name] = asyncio.Event()
            tasks[name] = asyncio.create_task(call(name))
            if may_run(owner):
                running.append(name)
            elif owner in dict(waiting):
                dict(waiting)[owner].append(name)
            else:
                waiting.append((owner, [name]))
        if kind in ("cancel", "end and cancel") and queued:
            name = queued[pick % len(queued)]
            tasks[name].cancel()
            if kind == "cancel":
                await _settle()
            drop(name)
        if kind in ("end", "end and cancel") and running:
            name = running.pop(pick % len(running))
            if pick % 2:
                tasks[name].cancel()  # while it holds a unit
            ends[name].set()
            give_turns()
        await _settle()
        queued = [name for _, names in waiting for name in names]
        assert (budget.num_in_use, budget.num_waiting) == (len(running), len(queued))
        assert all(
            budget.num_in_use_by(each) == sum(name[0] == each for name in running)
            for each in OWNERS
        )
        assert {name for name, task in tasks.items() if not task.done()} == {*running, *queued}
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert budget.num_in_use == budget.num_waiting == 0


async def test_call_that_is_cancelled_just_after_it_got_its_turn_passes_it_on() -> None:
    budget = Budget(1)
    await budget.wait(A)
    first, second = (asyncio.create_task(budget.wait(owner)) for owner in (B, A))
    await asyncio.sleep(0)
    budget.release(1, A)  # gives the turn to the first call, whose task has not run yet
    first.cancel()
    await asyncio.wait([first, second])
    assert first.cancelled() and not second.cancelled()
    assert (budget.num_in_use_by(A), budget.num_in_use_by(B), budget.num_waiting) == (1, 0, 0)


async def _settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)
