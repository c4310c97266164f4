"""Tests that the hash ring spreads keys evenly, moves few keys when workers change, and is the same
in every process."""

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import uhashring

from baton.clock import ManualClock
from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TenantId, WorkerId
from baton.core.member import Member
from baton.core.placement import PlacementQuery
from baton.core.states import Role, WorkerState
from baton.core.worker_load import WorkerLoad
from baton.placement import hash_ring
from baton.placement.hash_ring import ring_successors
from baton.placement.prefix_popularity import PrefixPopularity
from conductor.policy.baton import place
from conductor.policy.config import BatonPolicyConfig
from conductor.policy.snapshot import AnyBlockKey, PolicyQuery
from router.generation.cluster import Cluster
from router.generation.ring_placer import LOAD_SLACK, MIN_LOAD_ALLOWANCE, RingPlacer
from testkit.fakes.registry import MemoryRegistry
from tests.cluster_snapshots import FakeCache, decode, prefill, snapshot

WORKERS = tuple(sorted(f"worker-{number}" for number in range(16)))
KEYS = [number.to_bytes(4, "big") for number in range(8000)]


def first(ids: tuple[str, ...], key: bytes) -> str:
    return next(ring_successors(ids, key))


def test_each_worker_follows_a_key_once() -> None:
    for key in KEYS[:50]:
        assert sorted(ring_successors(WORKERS, key)) == list(WORKERS)


def test_keys_are_spread_evenly() -> None:
    counts = dict.fromkeys(WORKERS, 0)
    for key in KEYS:
        counts[first(WORKERS, key)] += 1
    mean = len(KEYS) / len(WORKERS)
    deviation = (sum((n - mean) ** 2 for n in counts.values()) / len(WORKERS)) ** 0.5
    assert deviation / mean < 0.12


def test_removed_worker_moves_only_its_own_keys() -> None:
    gone = WORKERS[5]
    rest = tuple(name for name in WORKERS if name != gone)
    moved = 0
    for key in KEYS:
        before, after = first(WORKERS, key), first(rest, key)
        if before == gone:
            moved += 1
            # The key moves to the next worker on the ring.
            assert after == next(name for name in ring_successors(WORKERS, key) if name != gone)
        else:
            assert after == before
    assert 0.5 / len(WORKERS) < moved / len(KEYS) < 2 / len(WORKERS)


def test_new_worker_takes_keys_from_all_and_moves_no_others() -> None:
    more = tuple(sorted((*WORKERS, "worker-new")))
    taken = dict.fromkeys(WORKERS, 0)
    for key in KEYS:
        before, after = first(WORKERS, key), first(more, key)
        if after == "worker-new":
            taken[before] += 1
        else:
            assert after == before
    assert 0.5 / len(more) < sum(taken.values()) / len(KEYS) < 2 / len(more)
    assert all(taken.values())


def member(name: str, role: Role) -> Member:
    return Member(
        WorkerId(name), role, f"{name}:1", Incarnation(1), WorkerState.READY,
        block_tokens=16, load=WorkerLoad(free_blocks=1000, num_blocks=1000),
    )  # fmt: skip


async def ring_of(*members: Member) -> tuple[MemoryRegistry, Cluster]:
    registry = MemoryRegistry(ManualClock())
    cluster = Cluster(registry, ManualClock())
    await report(registry, cluster, members, 1.0)
    return registry, cluster


async def report(
    registry: MemoryRegistry, cluster: Cluster, members: Sequence[Member], at_seconds: float
) -> None:
    for each in members:
        load = replace(each.load, at_seconds=at_seconds)
        await registry.announce(replace(each, load=load), 60.0)
    await cluster.refresh()


def shared_prompt(number: int) -> tuple[BlockKey, ...]:
    """Return the block keys of a prompt that shares its first three blocks with all others."""
    return tuple(BlockKey(bytes([n, number if n > 2 else 0]) * 8) for n in range(11))


async def test_router_without_a_conductor_places_like_an_idle_conductor() -> None:
    """Routers and conductors look up the same block of a prompt on the same hash ring: the first
    one that few of the requests so far share. When neither load nor caches differ, both choose the
    same workers. Once answers have one token, both choose a prefill worker for the whole."""
    prefills = [member(f"prefill-{n}", Role.PREFILL) for n in range(5)]
    decodes = [member(f"decode-{n}", Role.DECODE) for n in range(4)]
    registry, cluster = await ring_of(*prefills, *decodes)
    ring = RingPlacer(cluster.workers_of("", 4096))
    cache = PopularPrefixCache()
    cluster_snapshot = snapshot(
        [prefill(one.id) for one in prefills], [decode(one.id) for one in decodes], cache
    )
    for number in range(200):
        keys = shared_prompt(number)
        excluded = frozenset({WorkerId(f"prefill-{number % 6}"), WorkerId(f"decode-{number % 5}")})
        name, answer = RequestId(f"request {number}"), 32 if number < 100 else 1
        query = PolicyQuery(name, 16 * len(keys), answer, keys, excluded=excluded)
        decision = place(cluster_snapshot, query, BatonPolicyConfig())
        cache.popularity.record(keys)
        alone = await ring.place(
            PlacementQuery(
                name, Epoch(1), TenantId("t"), 16 * len(keys), answer, keys, excluded, "m"
            )
        )
        assert alone.prefill is not None
        assert (alone.prefill.id, alone.decode.id) == (decision.prefill, decision.decode)
        assert (alone.prefill == alone.decode) == (answer == 1)
        await report(registry, cluster, [*prefills, *decodes], number + 2.0)


async def test_requests_that_a_router_has_just_sent_count() -> None:
    """Forty requests with one prefix, sent between two load reports, do not all go to one worker;
    only the first few, before the prefix counts as popular, do."""
    prefills = [member(f"prefill-{n}", Role.PREFILL) for n in range(4)]
    workers = [*prefills, member("decode", Role.DECODE)]
    _, cluster = await ring_of(*workers)
    sent: Counter[WorkerId] = Counter()
    ring = RingPlacer(cluster.workers_of("", 4096), lambda worker: sent[worker.id])
    keys = shared_prompt(3)

    async def place_one(number: int) -> WorkerId:
        name, nobody = RequestId(f"r{number}"), frozenset[WorkerId]()
        query = PlacementQuery(name, Epoch(1), TenantId("t"), 176, 32, keys, nobody, "m")
        chosen = (await ring.place(query)).prefill
        assert chosen is not None
        sent[chosen.id] += 1
        return chosen.id

    placed = [await place_one(number) for number in range(40)]
    assert len(set(placed[:4])) == 1
    counts = Counter(placed)
    assert len(counts) == 4
    assert max(counts.values()) <= LOAD_SLACK * 40 / 4 + MIN_LOAD_ALLOWANCE


class PopularPrefixCache(FakeCache):
    """A cache that counts how many requests share a block, as a conductor's does."""

    def __init__(self) -> None:
        super().__init__()
        self.popularity = PrefixPopularity()

    def request_share(self, key: AnyBlockKey) -> float:
        return self.popularity.request_share(key)


def test_unsorted_ids_are_rejected() -> None:
    with pytest.raises(AssertionError, match="ids must be sorted"):
        first(("b", "a"), b"k")


@pytest.mark.parametrize(
    ("num_positions", "num_points"), [(hash_ring.RING_SIZE, 9 * 256), (1009, 909)]
)
def test_a_ring_has_the_points_of_its_ids(
    num_positions: int, num_points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the same as if the ring had been computed at once, also where two ids have a point
    at the same position."""
    position = hash_ring._position
    monkeypatch.setattr(hash_ring, "_position", lambda key: position(key) % num_positions)
    monkeypatch.setattr(hash_ring, "_points", hash_ring._points.__wrapped__)
    ids = WORKERS[:9]
    ring = uhashring.HashRing(
        list(ids), vnodes=hash_ring.POINTS_PER_WORKER, hash_fn=hash_ring._position
    )
    built = hash_ring._build_ring(ids)
    assert len(built.positions) == num_points
    names = [ids[owner] for owner in built.owners]
    assert list(zip(built.positions, names, strict=True)) == ring.get_points()


def test_cached_rings_are_bounded_by_their_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_ring, "MAX_CACHED_POINTS", 5 * hash_ring.POINTS_PER_WORKER)
    cache = hash_ring._RingCache()
    pair, other, one, two = WORKERS[:2], WORKERS[2:4], WORKERS[4:5], WORKERS[5:6]
    first = cache.get(pair)
    for ids in (other, pair, one):
        cache.get(ids)
    assert (list(cache._rings), cache._num_points) == ([other, pair, one], 5 * 256)
    cache.get(two)  # the ring that was not used for the longest time is dropped
    assert (list(cache._rings), cache._num_points) == ([pair, one, two], 4 * 256)
    assert cache.get(pair) is first
    cache.get(WORKERS)  # stays alone
    assert (list(cache._rings), cache._num_points) == ([WORKERS], 16 * 256)
    assert cache.get(pair) == first
    assert (list(cache._rings), cache._num_points) == ([pair], 2 * 256)


def test_ring_is_the_same_in_other_processes() -> None:
    code = (
        "from baton.placement.hash_ring import ring_successors as successors; "
        "print(*successors(('a', 'b', 'c', 'd'), b'key'))"
    )
    for hash_seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        assert answer.stdout.split() == list(ring_successors(("a", "b", "c", "d"), b"key"))
