"""Placement, whatever the cluster: policies are pure, bounded loads are bounded, sums agree."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import WorkerId
from baton.errors import BatonError
from conductor.load_tracker import LoadTracker
from conductor.policy.baselines import CHWBL_LOAD_FACTOR, chwbl
from conductor.policy.policies import PLACEMENT_POLICIES, get_policy
from conductor.policy.snapshot import Snapshot, StoredPrefix, WorkerPool
from tests.fleet import FakeCache, decode, prefill, query, snapshot

counts = st.integers(0, 6)
queues = st.lists(st.tuples(st.floats(-2, 9), st.floats(0, 3)), max_size=4)
promises = st.integers(0, 12_000)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    readers = [prefill(f"p{n}", *draw(queues)) for n in range(draw(counts))]
    writers = [decode(f"d{n}", draw(promises)) for n in range(draw(counts))]
    for view in (*readers, *writers):
        view.measured = draw(st.booleans())
    cached = {view.id: draw(st.integers(0, 8)) for view in readers}
    held = StoredPrefix("s", draw(st.integers(1, 8))) if draw(st.booleans()) else None
    shares = draw(st.lists(st.floats(0, 1), max_size=8))
    return snapshot(readers, writers, FakeCache(cached, held, shares), num_placed=draw(counts))


def outcome(policy: str, seen: Snapshot, **asked: object) -> str:
    try:
        return repr(get_policy(policy)(seen, query(**asked)))  # type: ignore[arg-type]
    except BatonError as error:
        return repr(error)


@given(
    snapshots(),
    st.sampled_from(PLACEMENT_POLICIES),
    st.sets(st.sampled_from(["p0", "p1", "d0", "d1"])),
)
@settings(max_examples=300)
def test_policies_are_pure_and_answer_with_reasons(
    seen: Snapshot, policy: str, failed: set[str]
) -> None:
    excluded = frozenset(WorkerId(name) for name in failed)
    before = repr(list(seen.prefills)) + repr(list(seen.decodes))
    first = outcome(policy, seen, excluded=excluded)
    assert outcome(policy, seen, excluded=excluded) == first
    assert repr(list(seen.prefills)) + repr(list(seen.decodes)) == before
    promised = outcome(policy, seen, excluded=excluded, promised=True)
    able = [view for view in (*seen.prefills, *seen.decodes) if view.id not in excluded]
    assert promised.startswith("Decision" if able else "Unavailable")


@given(snapshots(), st.sampled_from(PLACEMENT_POLICIES))
def test_only_workers_that_are_there_are_chosen(seen: Snapshot, policy: str) -> None:
    try:
        decision = get_policy(policy)(seen, query(promised=True))
    except BatonError:
        return
    if decision.prefill is not None:
        assert decision.prefill in seen.prefills and decision.decode in seen.decodes
    else:
        assert decision.decode in seen.prefills or decision.decode in seen.decodes
        assert not len(seen.prefills) or not len(seen.decodes)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 10**6))
def test_bounded_loads_are_bounded(loads: list[int], number: int) -> None:
    """Whoever gets it has at most 1.25 times the mean then, rounded up; if the loads were within
    that before, they all stay so."""
    readers = [prefill(f"p{n:02}", num_requests=load) for n, load in enumerate(loads)]
    decision = chwbl(snapshot(readers, [decode("d")]), query(f"r{number}"))
    bound = math.ceil(CHWBL_LOAD_FACTOR * (sum(loads) + 1) / len(loads))
    assert decision.prefill is not None
    assert loads[int(decision.prefill[1:])] + 1 <= bound


@given(st.integers(1, 12), st.lists(st.integers(0, 3), min_size=1, max_size=150))
def test_a_run_of_bounded_loads_stays_bounded(num_workers: int, heads: list[int]) -> None:
    """From empty workers on, nobody ever has more than the bound."""
    ledger = LoadTracker()
    for number in range(num_workers):
        ledger.add_prefill(prefill(f"p{number:02}"))
    ledger.add_decode(decode("d"))
    for number, head in enumerate(heads):
        seen = snapshot(list(ledger.prefills), list(ledger.decodes))
        asked = query(f"r{number}")
        asked = type(asked)(f"r{number}", 133, 1000, (bytes([head]) * 16,))
        ledger.dispatched(float(number), asked, chwbl(seen, asked), 100.0)
        bound = math.ceil(CHWBL_LOAD_FACTOR * (number + 1) / num_workers)
        assert max(view.num_requests for view in ledger.prefills) <= bound


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=60))
def test_a_pool_is_always_in_the_order_of_load(changes: list[tuple[int, int]]) -> None:
    pool = WorkerPool([decode(f"d{number}") for number in range(5)])
    for number, promised in changes:
        view = pool.take(WorkerId(f"d{number}"))
        view.promised_tokens = promised
        pool.put(view)
        order = [(each.load, each.id) for each in pool.least()]
        assert order == sorted((each.load, each.id) for each in pool)
