"""Tests with random clusters that placement policies are pure, choose existing workers, and bound
the workers' loads."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import WorkerId
from baton.errors import BatonError
from conductor.load_tracker import LoadTracker
from conductor.policy.baselines import CHWBL_LOAD_FACTOR, chwbl
from conductor.policy.policies import PLACEMENT_POLICIES, get_policy
from conductor.policy.snapshot import Snapshot, StoredPrefix, WorkerPool
from tests.cluster_snapshots import FakeCache, decode, prefill, query, snapshot

counts = st.integers(0, 6)
queues = st.lists(st.tuples(st.floats(-2, 9), st.floats(0, 3)), max_size=4)
promises = st.integers(0, 12_000)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    prefills = [prefill(f"p{n}", *draw(queues)) for n in range(draw(counts))]
    decodes = [decode(f"d{n}", draw(promises)) for n in range(draw(counts))]
    for view in (*prefills, *decodes):
        view.is_measured = draw(st.booleans())
    cached = {view.id: draw(st.integers(0, 8)) for view in prefills}
    stored = StoredPrefix("s", draw(st.integers(1, 8))) if draw(st.booleans()) else None
    shares = draw(st.lists(st.floats(0, 1), max_size=8))
    return snapshot(prefills, decodes, FakeCache(cached, stored, shares), num_placed=draw(counts))


def outcome(policy: str, cluster: Snapshot, **fields: object) -> str:
    """Return the policy's decision, or the error that it raises, as text."""
    try:
        return repr(get_policy(policy)(cluster, query(**fields)))  # type: ignore[arg-type]
    except BatonError as error:
        return repr(error)


@given(
    snapshots(),
    st.sampled_from(PLACEMENT_POLICIES),
    st.sets(st.sampled_from(["p0", "p1", "d0", "d1"])),
)
@settings(max_examples=300)
def test_policies_are_pure_and_always_place_admitted_requests(
    cluster: Snapshot, policy: str, failed: set[str]
) -> None:
    excluded = frozenset(WorkerId(name) for name in failed)
    before = repr(list(cluster.prefills)) + repr(list(cluster.decodes))
    first = outcome(policy, cluster, excluded=excluded)
    assert outcome(policy, cluster, excluded=excluded) == first
    assert repr(list(cluster.prefills)) + repr(list(cluster.decodes)) == before
    promised = outcome(policy, cluster, excluded=excluded, must_admit=True)
    usable = [view for view in (*cluster.prefills, *cluster.decodes) if view.id not in excluded]
    assert promised.startswith("Decision" if usable else "Unavailable")


@given(snapshots(), st.sampled_from(PLACEMENT_POLICIES))
def test_only_existing_workers_are_chosen(cluster: Snapshot, policy: str) -> None:
    try:
        decision = get_policy(policy)(cluster, query(must_admit=True))
    except BatonError:
        return
    if decision.prefill == decision.decode:
        assert decision.prefill in cluster.prefills and not len(cluster.decodes)
    elif decision.prefill is not None:
        assert decision.prefill in cluster.prefills and decision.decode in cluster.decodes
    else:
        assert decision.decode in cluster.decodes and not len(cluster.prefills)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 10**6))
def test_chwbl_bounds_the_load_of_the_chosen_worker(loads: list[int], number: int) -> None:
    """After the placement, the chosen worker's load is at most 1.25 times the mean load, rounded
    up. So a cluster whose loads are all within this bound stays within it."""
    prefills = [prefill(f"p{n:02}", num_requests=load) for n, load in enumerate(loads)]
    decision = chwbl(snapshot(prefills, [decode("d")]), query(f"r{number}"))
    bound = math.ceil(CHWBL_LOAD_FACTOR * (sum(loads) + 1) / len(loads))
    assert decision.prefill is not None
    assert loads[int(decision.prefill[1:])] + 1 <= bound


@given(st.integers(1, 12), st.lists(st.integers(0, 3), min_size=1, max_size=150))
def test_chwbl_keeps_all_loads_bounded_over_a_sequence(num_workers: int, heads: list[int]) -> None:
    """If all workers are idle at first, no worker's load ever exceeds 1.25 times the mean load,
    rounded up."""
    tracker = LoadTracker()
    for number in range(num_workers):
        tracker.add(prefill(f"p{number:02}"))
    tracker.add(decode("d"))
    for number, head in enumerate(heads):
        cluster = snapshot(list(tracker.prefills), list(tracker.decodes))
        request = query(f"r{number}")
        request = type(request)(f"r{number}", 133, 1000, (bytes([head]) * 16,))
        tracker.record_dispatch(float(number), request, chwbl(cluster, request), 100.0)
        bound = math.ceil(CHWBL_LOAD_FACTOR * (number + 1) / num_workers)
        assert max(view.num_requests for view in tracker.prefills) <= bound


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=60))
def test_a_pool_is_always_sorted_by_load(changes: list[tuple[int, int]]) -> None:
    pool = WorkerPool([decode(f"d{number}") for number in range(5)])
    for number, promised in changes:
        view = pool.take_for_update(WorkerId(f"d{number}"))
        view.projected_tokens = promised
        pool.put(view)
        order = [(each.load, each.id) for each in pool.by_load()]
        assert order == sorted((each.load, each.id) for each in pool)
