"""Tests each of the baseline placement policies, which come from other systems, on a hand-made
snapshot."""

from dataclasses import replace

import pytest

from baton.core.ids import WorkerId
from baton.errors import Overloaded
from baton.placement.hash_ring import ring_successors
from conductor.policy import baselines
from conductor.policy.snapshot import Snapshot, StoredPrefix
from tests.cluster_snapshots import BLOCK_KEYS, FakeCache, decode, prefill, query, snapshot

PREFILLS = ("p0", "p1", "p2")
DECODES = ("d0", "d1", "d2")


def make_snapshot(cache: FakeCache | None = None, *, turn: int = 0) -> Snapshot:
    """Return a snapshot in which p0 has the most work in the fewest requests, and p2 the least work
    in the most requests. The same is true of the decode workers d0 and d2."""
    workers = [
        prefill("p0", (9.0, 3.0), queued_tokens=300, num_requests=1),
        prefill("p1", (9.0, 2.0), queued_tokens=200, num_requests=2),
        prefill("p2", (9.0, 1.0), queued_tokens=100, num_requests=3),
    ]
    others = [
        decode("d0", 900, context_tokens=300, num_requests=1),
        decode("d1", 800, context_tokens=200, num_requests=2),
        decode("d2", 700, context_tokens=100, num_requests=3),
    ]
    return snapshot(workers, others, cache, num_placed=turn)


def chosen(
    rule: baselines.PlacementPolicy, of: Snapshot, **fields: object
) -> tuple[str | None, str]:
    decision = rule(of, query(**fields))  # type: ignore[arg-type]
    return decision.prefill, decision.decode


def test_round_robin_alternates_workers() -> None:
    turns = [chosen(baselines.round_robin, make_snapshot(turn=turn)) for turn in range(4)]
    assert turns == [("p0", "d0"), ("p1", "d1"), ("p2", "d2"), ("p0", "d0")]


def test_random_is_even_and_independent() -> None:
    drawn = [chosen(baselines.random, make_snapshot(turn=turn)) for turn in range(900)]
    for names, index in ((PREFILLS, 0), (DECODES, 1)):
        counts = [[pair[index] for pair in drawn].count(name) for name in names]
        assert all(250 < count < 350 for count in counts)
    assert len(set(drawn)) == 9


def test_least_work_compares_queue_seconds_and_tokens() -> None:
    assert chosen(baselines.least_work, make_snapshot()) == ("p2", "d2")


def test_power_of_two_takes_the_better_of_two() -> None:
    pairs = {chosen(baselines.power_of_two, make_snapshot(turn=turn)) for turn in range(60)}
    # The worst of the three workers is never better than the other one of a pair.
    assert {pair[0] for pair in pairs} == {"p1", "p2"}
    assert {pair[1] for pair in pairs} == {"d0", "d1"}


def test_session_hash_keeps_a_session_on_its_worker() -> None:
    homes = {
        chosen(baselines.session_hash, make_snapshot(turn=turn), name=f"r{turn}", session="talk")
        for turn in range(9)
    }
    assert len(homes) == 1
    others = {
        chosen(baselines.session_hash, make_snapshot(), session=f"{number}") for number in range(60)
    }
    assert {pair[0] for pair in others} == set(PREFILLS)


def test_consistent_hash_uses_the_ring_of_the_first_block() -> None:
    home = next(ring_successors(PREFILLS, BLOCK_KEYS[0]))
    assert chosen(baselines.consistent_hash, make_snapshot()) == (home, "d2")


def test_bounded_load_hashing_skips_overloaded_workers() -> None:
    # There are seven requests, including the new one: a worker may have at most three.
    ring = [name for name in ring_successors(PREFILLS, BLOCK_KEYS[0]) if name != "p2"]
    assert chosen(baselines.chwbl, make_snapshot()) == (ring[0], "d2")


def test_cache_aware_needs_a_long_match_and_even_loads() -> None:
    assert chosen(baselines.cache_aware, make_snapshot(FakeCache({"p2": 3}))) == ("p2", "d0")
    assert chosen(baselines.cache_aware, make_snapshot(FakeCache({"p2": 2}))) == ("p0", "d0")
    assert chosen(baselines.cache_aware, make_snapshot(FakeCache({"gone": 8}))) == ("p0", "d0")
    uneven = make_snapshot(FakeCache({"p2": 8}))
    uneven.prefills["p2"].num_requests = 66
    assert chosen(baselines.cache_aware, uneven) == ("p0", "d0")


def test_kv_overlap_compares_queued_and_new_tokens() -> None:
    assert chosen(baselines.kv_overlap, make_snapshot()) == ("p2", "d2")
    # Queued and new tokens: 300 + 5 on p0, 100 + 133 on p2.
    assert chosen(baselines.kv_overlap, make_snapshot(FakeCache({"p0": 8}))) == ("p2", "d2")
    assert chosen(baselines.kv_overlap, make_snapshot(FakeCache({"p1": 8}))) == ("p1", "d2")


def test_new_tokens_times_batch_compares_that_product() -> None:
    # The products are 433 * 2, 333 * 3 and 233 * 4.
    assert chosen(baselines.new_tokens_times_batch, make_snapshot()) == ("p0", "d0")
    # The second product is 205 * 3 rather than 333 * 3.
    assert chosen(baselines.new_tokens_times_batch, make_snapshot(FakeCache({"p1": 8}))) == (
        "p1",
        "d0",
    )


def test_min_ttft_adds_queue_transfer_and_compute() -> None:
    assert chosen(baselines.min_ttft, make_snapshot()) == ("p2", "d2")
    # Queue and compute time: 2 s + 0.05 s on p1, 1 s + 1.33 s on p2.
    decision = baselines.min_ttft(make_snapshot(FakeCache({"p1": 8})), query())
    assert (decision.prefill, decision.fetch_source) == ("p1", None)
    assert decision.ttft_seconds == pytest.approx(2.05)
    # p2 fetches the stored prefix, which takes 0.128 s, and computes the rest.
    fetched = baselines.min_ttft(make_snapshot(FakeCache({"p1": 2}, StoredPrefix("s", 8))), query())
    assert (fetched.prefill, fetched.fetch_source) == ("p2", StoredPrefix("s", 8))
    near = baselines.min_ttft(make_snapshot(FakeCache({"p2": 7}, StoredPrefix("s", 8))), query())
    assert near.fetch_source is None  # the stored prefix is less than 1.3 times as long


def test_min_ttft_refuses_what_misses_the_slo() -> None:
    hasty = query(ttft_slo_seconds=0.5)
    with pytest.raises(Overloaded, match=r"TTFT is 2\.33 s"):
        baselines.min_ttft(make_snapshot(), hasty)
    with pytest.raises(Overloaded, match=r"latency is 0\.014 s"):
        baselines.min_ttft(make_snapshot(), query(itl_slo_seconds=0.0135))
    assert baselines.min_ttft(make_snapshot(), replace(hasty, must_admit=True)).prefill == WorkerId(
        "p2"
    )
    assert baselines.min_ttft_no_reject(make_snapshot(), hasty).prefill == WorkerId("p2")


def test_baseline_decision_has_the_load_trackers_fields() -> None:
    decision = baselines.round_robin(make_snapshot(FakeCache({"p0": 2})), query())
    assert decision.reason == "2 of 8 blocks cached"
    assert decision.service_seconds == pytest.approx(1.01)
    assert decision.ttft_seconds == pytest.approx(4.01)
    assert decision.itl_seconds == pytest.approx(0.012)
