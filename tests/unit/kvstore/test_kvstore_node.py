"""Tests the store node's DRAM tier over the in-memory transport: puts and their checksums, leases,
eviction, quotas and pins."""

import asyncio
import threading

import pytest

from baton.clock import ManualClock
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef, Endpoint
from baton.core.store import BlockFilter, PutRequest
from baton.errors import Corrupt, Invalid, Overloaded, Unavailable
from baton.transport.base import TransferRange
from testkit.fakes.transport import MemoryTransport
from tests.store_harness import KEYS, SIZE, StoreHarness


async def test_stored_blocks_can_be_leased() -> None:
    store = StoreHarness()
    assert await store.put(0, 1, 2) == (3, 0)
    assert await store.put(0, 1, 3) == (1, 2)
    assert await store.read(0, 1, 2, 3) == [store.block(number) for number in range(4)]
    stats = store.node.stats()
    assert (stats.num_blocks, stats.used_bytes, stats.violation) == (4, 4 * SIZE, "")
    assert (stats.put_blocks, stats.put_bytes) == (4, 4 * SIZE)


async def test_lookup_without_bytes_leases_nothing() -> None:
    store = StoreHarness()
    await store.put(0, 1, 2, 3)
    for _ in range(100):
        found = await store.lease(0, 1, 2, 3, 4, max_bytes=0)
        assert (found.lease_id, found.blocks, found.num_stored) == ("", (), 4)
    assert store.node.stats().leased_blocks == 0
    assert await store.put(4, 5, 6, 7) == (4, 0)


async def test_checking_every_key_before_a_put_never_makes_one_fail() -> None:
    """The arena has space for a quarter of the blocks, so most puts must evict one. A lookup of all
    keys must not protect the blocks from the eviction that follows."""
    store = StoreHarness(dram_blocks=4)
    for _ in range(10):
        for number in range(16):
            await store.stored_numbers(*range(16))
            stored, present = await store.put(number)
            assert stored + present == 1
    assert store.node.stats().evictions == 156


async def test_lease_covers_only_the_requested_bytes() -> None:
    store = StoreHarness()
    await store.put(0, 1, 2)
    leased = await store.lease(0, 1, 2, 3, max_bytes=2 * SIZE + 1)
    assert [block.key for block in leased.blocks] == KEYS[:2]
    assert leased.num_stored == 3
    assert store.node.stats().leased_blocks == 2
    store.node.release(leased.lease_id)
    store.node.release(leased.lease_id)
    stats = store.node.stats()
    assert (stats.leased_blocks, stats.hit_blocks_dram, stats.missed_blocks) == (0, 2, 1)


async def test_block_with_a_wrong_checksum_is_not_stored() -> None:
    store = StoreHarness()
    with pytest.raises(Corrupt, match=r"does not match its checksum; .* \(2 in total\)"):
        await store.node.put(store.request([0, 1], checksum_error=1))
    stats = store.node.stats()
    assert (stats.num_blocks, stats.checksum_failures, stats.violation) == (0, 2, "")
    assert await store.put(0, 1) == (2, 0)


async def test_blocks_before_a_damaged_one_are_stored() -> None:
    store = StoreHarness()
    blocks = (store.ref(0), store.ref(1, checksum_error=1), store.ref(2))
    with pytest.raises(Corrupt, match=r"\(2 in total\)"):
        await store.node.put(PutRequest(store.source, CHECKSUM_XXH3, blocks))
    assert await store.stored_numbers(0, 1, 2) == [0]
    assert store.has_integrity()


async def test_duplicate_key_in_one_put_is_read_once() -> None:
    store = StoreHarness()
    assert await store.put(2, 2) == (1, 1)


async def test_put_from_a_dead_worker_leaves_no_slot() -> None:
    store = StoreHarness()
    store.fabric.kill("worker")
    with pytest.raises(Unavailable):
        await store.put(0)
    assert store.node.stats().num_blocks == 0


async def test_full_store_evicts_the_end_of_the_oldest_chain() -> None:
    store = StoreHarness()
    await store.put(0, 1, 2, 3)
    await store.put(4)
    assert await store.stored_numbers(0, 1, 2, 3, 4) == [0, 1, 2, 4]


async def test_put_is_overloaded_while_all_blocks_are_leased() -> None:
    store = StoreHarness()
    await store.put(0, 1, 2, 3)
    lease = await store.lease(0, 1, 2, 3)
    with pytest.raises(Overloaded, match="blocks are leased, pinned or being copied"):
        await store.put(4, 5)
    store.node.release(lease.lease_id)
    assert await store.put(4, 5) == (2, 0)


async def test_put_does_not_evict_its_own_prefix() -> None:
    store = StoreHarness()
    await store.put(0, 1)
    await store.put(2, 3)
    assert await store.put(0, 1, 4) == (1, 2)
    # The last block of the chain 2, 3 was evicted.
    assert await store.stored_numbers(0, 1, 2, 3, 4) == [0, 1, 2, 4]


async def test_head_of_a_put_counts_as_used() -> None:
    store = StoreHarness()
    await store.put(0, 1)
    await store.put(2, 3)
    request = PutRequest(
        store.source, CHECKSUM_XXH3, (store.ref(4),), preceding_keys=tuple(KEYS[:2])
    )
    assert (await store.node.put(request)).num_stored == 1
    assert await store.stored_numbers(0, 1, 2, 3, 4) == [0, 1, 2, 4]
    only_head = PutRequest(store.source, CHECKSUM_XXH3, (), preceding_keys=(KEYS[2],))
    assert (await store.node.put(only_head)).num_stored == 0
    await store.put(5)
    assert await store.stored_numbers(0, 1, 2, 4, 5) == [0, 2, 4, 5]


async def test_put_larger_than_the_store_keeps_its_prefix() -> None:
    store = StoreHarness()
    assert await store.put(0, 1, 2, 3, 4, 5) == (4, 0)
    assert await store.stored_numbers(*range(6)) == [0, 1, 2, 3]
    assert await store.put(0, 1, 2, 3, 4, 5) == (0, 4)
    stats = store.node.stats()
    assert (stats.num_blocks, stats.evictions, stats.violation) == (4, 0, "")


async def test_tenant_over_its_quota_evicts_its_own_blocks() -> None:
    store = StoreHarness(dram_blocks=4, tenant_bytes=2 * SIZE)
    await store.put(0, 1, tenant=b"a")
    await store.put(2, tenant=b"b")
    assert await store.put(3, tenant=b"a") == (1, 0)
    assert await store.stored_numbers(0, 1, 2, 3) == [0, 2, 3]
    stats = store.node.stats()
    assert (stats.evictions, stats.quota_evictions, stats.violation) == (0, 1, "")
    lease = await store.lease(0)
    await store.put(4, tenant=b"a")  # evicts 3 rather than 0, which is leased
    assert await store.stored_numbers(0, 2, 3, 4) == [0, 2, 4]
    other = await store.lease(4)
    with pytest.raises(Overloaded, match="quota of 128 bytes is used up"):
        await store.put(5, tenant=b"a")
    store.node.release(lease.lease_id)
    store.node.release(other.lease_id)
    assert await store.put(5, tenant=b"a") == (1, 0)


async def test_pinned_blocks_are_not_evicted() -> None:
    store = StoreHarness()
    await store.put(0, 1, 2, 3)
    assert store.node.pin(KEYS[2:], 60.0) == 2
    for number in range(4, 12):
        await store.put(number)
    assert await store.stored_numbers(0, 1, 2, 3) == [2, 3]
    assert store.node.stats().pinned_bytes == 2 * SIZE
    with pytest.raises(Overloaded, match="at most 50% of the"):
        store.node.pin([KEYS[11]], 60.0)
    assert isinstance(store.clock, ManualClock)
    store.clock.advance(60.0)
    assert store.node.stats().pinned_bytes == 0
    assert store.node.pin([KEYS[15]], 60.0) == 0
    with pytest.raises(Invalid, match=r"a pin of 1e\+09 s was requested"):
        store.node.pin([KEYS[11]], 1e9)


async def test_put_cancelled_during_its_copy_waits_for_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.transport.reads.INLINE_BYTES", 0)
    store = StoreHarness()
    copying, go_on = threading.Event(), threading.Event()

    def block_copy(endpoint: Endpoint, span: TransferRange) -> str:
        copying.set()
        assert go_on.wait(30.0)
        return ""

    store.fabric.fault = block_copy
    putting = asyncio.create_task(store.put(0))
    await asyncio.to_thread(copying.wait, 30.0)
    putting.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert store.node.stats().num_blocks == 1  # the slot is still being written
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert store.node.stats().num_blocks == 0


async def test_cancelled_put_leaves_no_slot() -> None:
    store = StoreHarness()
    putting = asyncio.create_task(store.put(0, 1))
    while not store.node.stats().num_blocks:
        await asyncio.sleep(0)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    stats = store.node.stats()
    assert (stats.num_blocks, stats.violation) == (0, "")
    assert await store.put(0, 1) == (2, 0)


async def test_block_damaged_during_transfer_is_not_stored() -> None:
    store = StoreHarness()
    store.fabric.fault = lambda endpoint, span: "corrupt"
    with pytest.raises(Corrupt):
        await store.put(0)
    store.fabric.fault = lambda endpoint, span: "lost"
    with pytest.raises(Unavailable, match="lost"):
        await store.put(0)
    stats = store.node.stats()
    assert (stats.num_blocks, stats.checksum_failures, stats.violation) == (0, 1, "")


async def test_flipped_bit_is_found_when_a_reader_reports_it() -> None:
    store = StoreHarness()
    await store.put(0, 1, 2)
    leased = await store.lease(0, 1, 2)
    store.flip_bit(leased.blocks[1].offset_bytes + 7)
    assert await store.node.report_damaged(KEYS[:3]) == 1
    stats = store.node.stats()
    assert (stats.checksum_failures, stats.used_bytes, stats.violation) == (1, 3 * SIZE, "")
    # Block 1 is no longer found; its slot is freed when the lease is released.
    assert await store.stored_numbers(0, 1, 2) == [0, 2]
    store.node.release(leased.lease_id)
    assert store.node.stats().used_bytes == 2 * SIZE
    assert await store.node.report_damaged(KEYS) == 0
    assert await store.put(0, 1, 2) == (1, 2)


async def test_leases_expire() -> None:
    store = StoreHarness()
    await store.put(0, 1)
    assert (await store.lease(0, 1)).lease_id
    assert isinstance(store.clock, ManualClock)
    store.clock.advance(4.75)
    assert store.node.stats().leased_blocks == 2
    store.clock.advance(0.25)
    assert store.node.stats().leased_blocks == 0


async def test_invalid_requests_are_rejected() -> None:
    store = StoreHarness()
    request = store.request([0])
    unknown = Endpoint("pigeon", "worker", 1, "here", 8 * SIZE, b"")
    with pytest.raises(Invalid, match="no transport 'pigeon'"):
        await store.node.put(PutRequest(unknown, CHECKSUM_XXH3, request.blocks))
    huge = BlockRef(0, 5 * SIZE, 0, KEYS[0])
    with pytest.raises(Invalid, match=r"the size of a slab .*; raise store_bytes"):
        await store.node.put(PutRequest(store.source, CHECKSUM_XXH3, (huge,)))
    outside = BlockRef(16 * SIZE - 1, SIZE, 0, KEYS[0])
    with pytest.raises(Invalid):
        await store.node.put(PutRequest(store.source, CHECKSUM_XXH3, (outside,)))
    for seconds in (0.0, 61.0, float("nan")):
        await store.put(1)
        with pytest.raises(Invalid, match="must last more than 0 and up to 60 s"):
            await store.lease(1, seconds=seconds)
    assert (store.node.stats().num_blocks, store.node.stats().leased_blocks) == (1, 0)


async def test_concurrent_puts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.put_handler.MAX_PUTS", 1)
    store = StoreHarness()
    putting = asyncio.create_task(store.put(0))
    while not store.node.stats().num_blocks:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="1 puts are already running") as refusal:
        await store.put(1)
    assert refusal.value.retry_after_seconds == 0.2
    assert await putting == (1, 0)
    assert await store.put(1) == (1, 0)


async def test_slots_of_an_unfinished_transfer_are_freed_when_it_ends() -> None:
    class Stubborn(MemoryTransport):
        """A transport that can't end a transfer while ``under_way`` is true."""

        under_way = True

        def copy(self, endpoint: Endpoint, span: TransferRange) -> None:
            raise Unavailable("frozen")

        def release(self, transfer: object) -> bool:
            return not self.under_way

    store = StoreHarness()
    assert isinstance(store.clock, ManualClock)
    transport = Stubborn(store.fabric, "stubborn", 1, store.clock)
    transport.register(store.arena.region)
    store.node._transports["memory"] = transport  # type: ignore[assignment]
    putting = asyncio.create_task(store.put(0))
    while not putting.done():
        store.clock.advance(0.5)
        await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await putting
    assert store.node.stats().num_blocks == 1  # the slot may not be reused yet
    transport.under_way = False
    store.node.sweep()
    assert (store.node.stats().num_blocks, store.has_integrity()) == (0, True)


async def test_the_operator_lists_and_purges() -> None:
    store = StoreHarness()
    assert isinstance(store.clock, ManualClock)
    await store.put(0, 1, tenant=b"a", model=b"m")
    store.clock.advance(10.0)
    await store.put(2, tenant=b"b", model=b"m")
    await store.put(3, tenant=b"b", model=b"n")
    blocks, total = store.node.list_blocks(BlockFilter(), 1, 2)
    assert ([block.key for block in blocks], total) == ([KEYS[1], KEYS[2]], 4)
    assert (blocks[0].depth, blocks[0].tenant, blocks[0].stored_at) == (1, b"a", 0.0)
    assert store.node.list_blocks(BlockFilter(tenant=b"b"), 0, 9)[1] == 2
    lease = await store.lease(2)
    assert await store.node.purge(BlockFilter(tenant=b"b", model=b"m")) == 1
    assert await store.node.purge(BlockFilter(stored_before=10.0)) == 2
    assert await store.stored_numbers(0, 1, 2, 3) == [3]
    assert store.node.stats().used_bytes == 2 * SIZE  # one block is still being read
    store.node.release(lease.lease_id)
    assert await store.node.purge(BlockFilter()) == 1
    stats = store.node.stats()
    assert (stats.num_blocks, stats.purged_blocks, stats.violation) == (0, 4, "")


async def test_repinned_block_counts_once_and_stays_longer() -> None:
    store = StoreHarness(dram_blocks=8)
    await store.put(0, 1, 2)
    assert store.node.pin(KEYS[:2], 60.0) == 2
    assert store.node.pin([KEYS[0], KEYS[0], KEYS[1], KEYS[2]], 100.0) == 4
    assert store.node.pin(KEYS[:1], 10.0) == 1
    assert store.node.stats().pinned_bytes == 3 * SIZE
    assert isinstance(store.clock, ManualClock)
    store.clock.advance(99.0)
    assert store.node.stats().pinned_bytes == 3 * SIZE
    store.clock.advance(1.0)
    stats = store.node.stats()
    assert (stats.pinned_bytes, stats.leased_blocks, stats.violation) == (0, 0, "")


async def test_tenant_may_pin_only_part_of_its_quota() -> None:
    store = StoreHarness(dram_blocks=8, tenant_bytes=4 * SIZE)
    await store.put(0, 1, 2, tenant=b"a")
    await store.put(3, tenant=b"b")
    assert store.node.pin(KEYS[:2], 60.0) == 2
    with pytest.raises(Overloaded, match="the tenant has pinned 128 bytes"):
        store.node.pin(KEYS[:3], 60.0)
    assert store.node.pin(KEYS[3:4], 60.0) == 1


async def test_purged_blocks_are_no_longer_pinned() -> None:
    store = StoreHarness()
    await store.put(0, 1)
    store.node.pin(KEYS[:2], 60.0)
    assert await store.node.purge(BlockFilter()) == 2
    stats = store.node.stats()
    assert (stats.num_blocks, stats.pinned_bytes, stats.violation) == (0, 0, "")
    await store.put(0)
    assert store.node.pin(KEYS[:1], 30.0) == 1
    assert isinstance(store.clock, ManualClock)
    store.clock.advance(60.0)
    assert store.node.stats().violation == ""
