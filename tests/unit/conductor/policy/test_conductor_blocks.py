"""Tests what the live conductor knows of the blocks that workers and stores have."""

from dataclasses import replace

import pytest

from baton.core.ids import Incarnation, WorkerId
from baton.core.states import Role, WorkerState
from baton.core.store import StoreHint, Tier, WatchEvent
from conductor.cache_index import CacheIndex
from conductor.policy.snapshot import StoredPrefix
from conductor.store_mirror import StoreMirror
from tests.unit.conductor.test_conductor import (
    ConductorHarness,
    decode_member,
    keys,
    member,
    prefill_member,
)


async def test_conversation_stays_with_its_prefill_worker() -> None:
    cluster = ConductorHarness()
    await cluster.announce(*(prefill_member(f"p{n}") for n in range(4)), decode_member("d"))
    homes, at_hand = set(), []
    for length in (4, 8, 12):
        placement = cluster.place(f"turn {length}", 16 * length + 5, keys(*range(length)))
        assert placement.prefill is not None
        homes.add(placement.prefill.id)
        at_hand.append(placement.prefill_alternatives[0].local_blocks)
        cluster.clock.advance(60.0)
    assert at_hand == [0, 4, 8] and len(homes) == 1


async def test_restarted_worker_has_an_empty_cache() -> None:
    cluster = ConductorHarness()
    await cluster.announce(prefill_member("p"), decode_member("d"))
    cluster.place("one", 48, keys(1, 2, 3))

    def at_hand() -> int:
        cache = cluster.conductor.snapshot().cache
        return cache.num_local_blocks(cluster.prefill_view("p"), keys(1, 2, 3))

    assert at_hand() == 3
    await cluster.announce(replace(prefill_member("p"), state=WorkerState.DRAINING))
    cluster.conductor.snapshot()
    await cluster.announce(prefill_member("p"))
    assert at_hand() == 3
    cluster.place("two", 48, keys(1, 2, 3))
    await cluster.announce(replace(prefill_member("p", running=0), generation=Incarnation(2)))
    assert at_hand() == 0
    assert cluster.prefill_view("p").num_requests == 0
    cluster.place("three", 33, keys(1, 2))
    assert at_hand() == 2


@pytest.mark.parametrize("drain_was_seen", [True, False])
async def test_worker_that_changes_its_role_moves_to_the_other_pool(drain_was_seen: bool) -> None:
    cluster = ConductorHarness()
    await cluster.announce(prefill_member("w", running=3), prefill_member("p"), decode_member("d"))
    cluster.place("one", 48, keys(1, 2, 3), excluded=frozenset({"p"}))
    if drain_was_seen:
        await cluster.announce(replace(prefill_member("w"), state=WorkerState.DRAINING))
        cluster.conductor.snapshot()
    cluster.clock.advance(1.0)
    await cluster.announce(decode_member("w", decode_requests=2))
    snapshot = cluster.conductor.snapshot()
    assert (snapshot.prefills.ids, set(snapshot.decodes.ids)) == (("p",), {"d", "w"})
    assert cluster.decode_view("w").num_requests == 2
    cluster.clock.advance(1.0)
    await cluster.announce(prefill_member("w", running=1))
    snapshot = cluster.conductor.snapshot()
    assert (set(snapshot.prefills.ids), snapshot.decodes.ids) == ({"p", "w"}, ("d",))
    assert cluster.prefill_view("w").num_requests == 1
    # Its KV pool is the same one as before.
    assert snapshot.cache.num_local_blocks(cluster.prefill_view("w"), keys(1, 2, 3)) == 3


async def test_stored_blocks_are_local_on_the_stores_host_and_fetchable_elsewhere() -> None:
    cluster = ConductorHarness()
    here, there = {"host": "h0"}, {"host": "h1"}
    await cluster.announce(
        *(replace(prefill_member(f"p{n}", **(here if n < 2 else there)), kv_bytes_per_token=1000)
          for n in range(4)),
        decode_member("d"),
        member("s0", Role.KVSTORE, **here), member("s1", Role.KVSTORE, **there),  # type: ignore[arg-type]
    )  # fmt: skip
    chain = keys(1, 2, 3, 4)
    cluster.add_stored_blocks("s0", *chain[:3])
    cluster.add_stored_blocks("s1", *chain[:1])
    snapshot = cluster.conductor.snapshot()
    cache = snapshot.cache
    assert [cache.num_local_blocks(snapshot.prefills[f"p{n}"], chain) for n in range(4)] == [
        3,
        3,
        1,
        1,
    ]
    assert cache.longest_stored_prefix(chain) == StoredPrefix("s0", 3)
    assert cache.workers_with_prefix(chain, 2) == ["p0", "p1"]
    placement = cluster.place("one", 70, chain)
    assert placement.prefill is not None and placement.prefill.id in ("p0", "p1")
    assert placement.store_hint == StoreHint(WorkerId("s0"), 3)
    far = cluster.place("one", 70, chain, 2, frozenset({"p0", "p1"}))
    assert far.prefill is not None and far.prefill.id in ("p2", "p3")
    assert far.prefill_alternatives[0].fetched_blocks == 3
    assert far.store_hint == StoreHint(WorkerId("s0"), 3)
    cluster.add_stored_blocks("s1", *chain[:3])
    again = cluster.place("one", 70, chain, 3, frozenset({"p0", "p1"}))
    assert again.store_hint == StoreHint(WorkerId("s1"), 3)


async def test_share_of_requests_per_block_key_is_tracked() -> None:
    cluster = ConductorHarness()
    await cluster.announce(prefill_member("p"), decode_member("d"))
    for number in range(24):
        cluster.place(str(number), 32, keys(0, number + 1))
    share = cluster.conductor.snapshot().cache.request_share
    assert [share(key) for key in keys(0, 1, 99)] == [0.5, 0.0, 0.0]


async def test_expected_cache_contents_are_bounded_by_the_pools_size() -> None:
    cluster = ConductorHarness()
    await cluster.announce(prefill_member("p", num_blocks=3), decode_member("d"))
    cluster.place("old", 32, keys(1, 2))
    cluster.place("new", 32, keys(3, 4))
    view = cluster.prefill_view("p")
    cache = cluster.conductor.snapshot().cache
    assert [cache.num_local_blocks(view, keys(*each)) for each in ((1, 2), (3, 4))] == [1, 2]


def test_workers_that_report_their_blocks_count_as_they_say() -> None:
    reported = StoreMirror()
    cache = CacheIndex(StoreMirror(), reported)
    warm, cold, silent = map(WorkerId, ("warm", "cold", "silent"))
    chain = keys(1, 2, 3, 4)
    for worker, blocks in ((warm, chain[:3]), (cold, ())):
        page = WatchEvent(Incarnation(1), 0, Tier.DRAM, tuple(blocks), is_reset=True)
        assert reported.apply(worker, page)
    cache.prefill_index.record(cold, chain)
    cache.prefill_index.record(silent, chain[:2])
    depths = [cache.num_device_blocks(worker, chain) for worker in (warm, cold, silent)]
    assert depths == [3, 0, 2]
    assert cache.workers_with_prefix(chain, 3) == [warm, silent]
    assert cache.longest_stored_prefix(chain) is None
    reported.drop_node(cold)  # from now on, what it was sent counts
    assert cache.workers_with_prefix(chain, 3) == [cold, warm, silent]
