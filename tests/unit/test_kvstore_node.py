"""The store node's DRAM tier over the in-memory transport: what is put is verified and lent."""

import asyncio
import threading

import pytest

from baton.clock import ManualClock
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef, Endpoint
from baton.core.store import BlockFilter, PutRequest
from baton.errors import Corrupt, Invalid, Overloaded, Unavailable
from baton.transport.base import TransferRange
from baton.transport.memory import MemoryTransport
from tests.store_house import KEYS, SIZE, House


async def test_what_was_put_is_lent() -> None:
    house = House()
    assert await house.put(0, 1, 2) == (3, 0)
    assert await house.put(0, 1, 3) == (1, 2)
    assert await house.read(0, 1, 2, 3) == [house.block(number) for number in range(4)]
    stats = house.node.stats()
    assert (stats.num_blocks, stats.used_bytes, stats.violation) == (4, 4 * SIZE, "")
    assert (stats.put_blocks, stats.put_bytes) == (4, 4 * SIZE)


async def test_asking_alone_pins_nothing() -> None:
    house = House()
    await house.put(0, 1, 2, 3)
    for _ in range(100):
        told = await house.lease(0, 1, 2, 3, 4, max_bytes=0)
        assert (told.lease_id, told.blocks, told.num_held) == ("", (), 4)
    assert house.node.stats().leased_blocks == 0
    assert await house.put(4, 5, 6, 7) == (4, 0)


async def test_checking_every_key_before_a_put_never_makes_one_fail() -> None:
    """In an arena four times too small."""
    house = House(room=4)
    for _ in range(10):
        for number in range(16):
            await house.held(*range(16))
            stored, present = await house.put(number)
            assert stored + present == 1
    assert house.node.stats().evictions == 156


async def test_a_lease_takes_what_it_asked_for() -> None:
    house = House()
    await house.put(0, 1, 2)
    leased = await house.lease(0, 1, 2, 3, max_bytes=2 * SIZE + 1)
    assert [block.key for block in leased.blocks] == KEYS[:2]
    assert leased.num_held == 3
    assert house.node.stats().leased_blocks == 2
    house.node.release(leased.lease_id)
    house.node.release(leased.lease_id)
    stats = house.node.stats()
    assert (stats.leased_blocks, stats.hit_blocks_dram, stats.missed_blocks) == (0, 2, 1)


async def test_what_does_not_match_is_not_kept() -> None:
    house = House()
    with pytest.raises(Corrupt, match="2 blocks are not what was announced"):
        await house.node.put(house.request([0, 1], wrong=1))
    stats = house.node.stats()
    assert (stats.num_blocks, stats.checksum_failures, stats.violation) == (0, 2, "")
    assert await house.put(0, 1) == (2, 0)


async def test_blocks_before_a_damaged_one_are_kept() -> None:
    house = House()
    blocks = (house.ref(0), house.ref(1, wrong=1), house.ref(2))
    with pytest.raises(Corrupt, match="2 blocks"):
        await house.node.put(PutRequest(house.source, CHECKSUM_XXH3, blocks))
    assert await house.held(0, 1, 2) == [0]
    assert house.sound()


async def test_a_key_twice_in_one_put_is_read_once() -> None:
    house = House()
    assert await house.put(2, 2) == (1, 1)


async def test_a_reader_that_is_gone_leaves_no_slot() -> None:
    house = House()
    house.fabric.kill("worker")
    with pytest.raises(Unavailable):
        await house.put(0)
    assert house.node.stats().num_blocks == 0


async def test_a_full_store_forgets_the_end_of_the_oldest() -> None:
    house = House()
    await house.put(0, 1, 2, 3)
    await house.put(4)
    assert await house.held(0, 1, 2, 3, 4) == [0, 1, 2, 4]


async def test_leased_blocks_make_a_put_wait_its_turn() -> None:
    house = House()
    await house.put(0, 1, 2, 3)
    lease = await house.lease(0, 1, 2, 3)
    with pytest.raises(Overloaded, match="leased or being filled"):
        await house.put(4, 5)
    house.node.release(lease.lease_id)
    assert await house.put(4, 5) == (2, 0)


async def test_a_put_takes_no_room_from_its_own_prefix() -> None:
    house = House()
    await house.put(0, 1)
    await house.put(2, 3)
    assert await house.put(0, 1, 4) == (1, 2)
    assert await house.held(0, 1, 2, 3, 4) == [0, 1, 2, 4]  # of 2 and 3 the end went


async def test_the_head_of_a_put_counts_as_used() -> None:
    house = House()
    await house.put(0, 1)
    await house.put(2, 3)
    request = PutRequest(house.source, CHECKSUM_XXH3, (house.ref(4),), head=tuple(KEYS[:2]))
    assert (await house.node.put(request)).stored == 1
    assert await house.held(0, 1, 2, 3, 4) == [0, 1, 2, 4]
    only_head = PutRequest(house.source, CHECKSUM_XXH3, (), head=(KEYS[2],))
    assert (await house.node.put(only_head)).stored == 0
    await house.put(5)
    assert await house.held(0, 1, 2, 4, 5) == [0, 2, 4, 5]


async def test_of_a_put_without_room_for_all_the_prefix_is_kept() -> None:
    house = House()
    assert await house.put(0, 1, 2, 3, 4, 5) == (4, 0)
    assert await house.held(*range(6)) == [0, 1, 2, 3]
    assert await house.put(0, 1, 2, 3, 4, 5) == (0, 4)
    stats = house.node.stats()
    assert (stats.num_blocks, stats.evictions, stats.violation) == (4, 0, "")


async def test_a_tenant_over_its_quota_loses_its_own() -> None:
    house = House(room=4, tenant_bytes=2 * SIZE)
    await house.put(0, 1, tenant=b"a")
    await house.put(2, tenant=b"b")
    assert await house.put(3, tenant=b"a") == (1, 0)
    assert await house.held(0, 1, 2, 3) == [0, 2, 3]
    stats = house.node.stats()
    assert (stats.evictions, stats.quota_evictions, stats.violation) == (0, 1, "")
    lease = await house.lease(0)
    await house.put(4, tenant=b"a")  # of 0, which is leased, and 3
    assert await house.held(0, 2, 3, 4) == [0, 2, 4]
    other = await house.lease(4)
    with pytest.raises(Overloaded, match="a tenant may have 128 bytes"):
        await house.put(5, tenant=b"a")
    house.node.release(lease.lease_id)
    house.node.release(other.lease_id)
    assert await house.put(5, tenant=b"a") == (1, 0)


async def test_pinned_blocks_stay() -> None:
    house = House()
    await house.put(0, 1, 2, 3)
    assert house.node.pin(KEYS[2:], 60.0) == 2
    for number in range(4, 12):
        await house.put(number)
    assert await house.held(0, 1, 2, 3) == [2, 3]
    assert house.node.stats().pinned_bytes == 2 * SIZE
    with pytest.raises(Overloaded, match="50% may be"):
        house.node.pin([KEYS[11]], 60.0)
    assert isinstance(house.clock, ManualClock)
    house.clock.advance(60.0)
    assert house.node.stats().pinned_bytes == 0
    assert house.node.pin([KEYS[15]], 60.0) == 0
    with pytest.raises(Invalid, match="a pin lasts"):
        house.node.pin([KEYS[11]], 1e9)


async def test_a_put_cancelled_while_bytes_come_in_waits_for_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.transport.reads.INLINE_BYTES", 0)
    house = House()
    copying, go_on = threading.Event(), threading.Event()

    def hold(endpoint: Endpoint, span: TransferRange) -> str:
        copying.set()
        assert go_on.wait(30.0)
        return ""

    house.fabric.fault = hold
    putting = asyncio.create_task(house.put(0))
    await asyncio.to_thread(copying.wait, 30.0)
    putting.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert house.node.stats().num_blocks == 1  # still written to
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert house.node.stats().num_blocks == 0


async def test_a_cancelled_put_leaves_no_slot() -> None:
    house = House()
    putting = asyncio.create_task(house.put(0, 1))
    while not house.node.stats().num_blocks:
        await asyncio.sleep(0)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    stats = house.node.stats()
    assert (stats.num_blocks, stats.violation) == (0, "")
    assert await house.put(0, 1) == (2, 0)


async def test_what_is_damaged_on_the_way_is_not_kept() -> None:
    house = House()
    house.fabric.fault = lambda endpoint, span: "corrupt"
    with pytest.raises(Corrupt):
        await house.put(0)
    house.fabric.fault = lambda endpoint, span: "lost"
    with pytest.raises(Unavailable, match="lost"):
        await house.put(0)
    stats = house.node.stats()
    assert (stats.num_blocks, stats.checksum_failures, stats.violation) == (0, 1, "")


async def test_a_flipped_bit_is_found_when_a_reader_reports() -> None:
    house = House()
    await house.put(0, 1, 2)
    leased = await house.lease(0, 1, 2)
    house.flip(leased.blocks[1].offset_bytes + 7)
    assert await house.node.report(KEYS[:3]) == 1
    stats = house.node.stats()
    assert (stats.checksum_failures, stats.used_bytes, stats.violation) == (1, 3 * SIZE, "")
    assert await house.held(0, 1, 2) == [0, 2]  # gone at once, its slot with its lease
    house.node.release(leased.lease_id)
    assert house.node.stats().used_bytes == 2 * SIZE
    assert await house.node.report(KEYS) == 0
    assert await house.put(0, 1, 2) == (1, 2)


async def test_leases_end_by_the_clock() -> None:
    house = House()
    await house.put(0, 1)
    assert (await house.lease(0, 1)).lease_id
    assert isinstance(house.clock, ManualClock)
    house.clock.advance(4.75)
    assert house.node.stats().leased_blocks == 2
    house.clock.advance(0.25)
    assert house.node.stats().leased_blocks == 0


async def test_wrong_requests() -> None:
    house = House()
    request = house.request([0])
    unknown = Endpoint("pigeon", "worker", 1, "here", 8 * SIZE, b"")
    with pytest.raises(Invalid, match="no transport 'pigeon'"):
        await house.node.put(PutRequest(unknown, CHECKSUM_XXH3, request.blocks))
    huge = BlockRef(0, 5 * SIZE, 0, KEYS[0])
    with pytest.raises(Invalid, match=r"does not fit a slab .*: raise store_bytes"):
        await house.node.put(PutRequest(house.source, CHECKSUM_XXH3, (huge,)))
    outside = BlockRef(16 * SIZE - 1, SIZE, 0, KEYS[0])
    with pytest.raises(Invalid):
        await house.node.put(PutRequest(house.source, CHECKSUM_XXH3, (outside,)))
    for seconds in (0.0, 61.0, float("nan")):
        await house.put(1)
        with pytest.raises(Invalid, match="a lease lasts up to 60 s"):
            await house.lease(1, seconds=seconds)
    assert (house.node.stats().num_blocks, house.node.stats().leased_blocks) == (1, 0)


async def test_puts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.node.MAX_PUTS", 1)
    house = House()
    putting = asyncio.create_task(house.put(0))
    while not house.node.stats().num_blocks:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="1 puts are running") as refusal:
        await house.put(1)
    assert refusal.value.retry_after_seconds == 0.2
    assert await putting == (1, 0)
    assert await house.put(1) == (1, 0)


async def test_slots_of_a_stray_read_come_back() -> None:
    class Stubborn(MemoryTransport):
        """Can't end a read before ``under_way`` is False."""

        under_way = True

        def copy(self, endpoint: Endpoint, span: TransferRange) -> None:
            raise Unavailable("frozen")

        def release(self, transfer: object) -> bool:
            return not self.under_way

    house = House()
    assert isinstance(house.clock, ManualClock)
    transport = Stubborn(house.fabric, "stubborn", 1, house.clock)
    transport.register(house.arena.region)
    house.node._transports["memory"] = transport  # type: ignore[assignment]
    putting = asyncio.create_task(house.put(0))
    while not putting.done():
        house.clock.advance(0.5)
        await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await putting
    assert house.node.stats().num_blocks == 1  # nobody else may have the slot
    transport.under_way = False
    house.node.sweep()
    assert (house.node.stats().num_blocks, house.sound()) == (0, True)


async def test_the_operator_lists_and_purges() -> None:
    house = House()
    assert isinstance(house.clock, ManualClock)
    await house.put(0, 1, tenant=b"a", model=b"m")
    house.clock.advance(10.0)
    await house.put(2, tenant=b"b", model=b"m")
    await house.put(3, tenant=b"b", model=b"n")
    blocks, total = house.node.list_blocks(BlockFilter(), 1, 2)
    assert ([block.key for block in blocks], total) == ([KEYS[1], KEYS[2]], 4)
    assert (blocks[0].depth, blocks[0].tenant, blocks[0].stored_at) == (1, b"a", 0.0)
    assert house.node.list_blocks(BlockFilter(tenant=b"b"), 0, 9)[1] == 2
    lease = await house.lease(2)
    assert await house.node.purge(BlockFilter(tenant=b"b", model=b"m")) == 1
    assert await house.node.purge(BlockFilter(stored_before=10.0)) == 2
    assert await house.held(0, 1, 2, 3) == [3]
    assert house.node.stats().used_bytes == 2 * SIZE  # one is still read
    house.node.release(lease.lease_id)
    assert await house.node.purge(BlockFilter()) == 1
    stats = house.node.stats()
    assert (stats.num_blocks, stats.purged_blocks, stats.violation) == (0, 4, "")


async def test_a_block_that_is_pinned_again_counts_once_and_stays_longer() -> None:
    house = House(room=8)
    await house.put(0, 1, 2)
    assert house.node.pin(KEYS[:2], 60.0) == 2
    assert house.node.pin([KEYS[0], KEYS[0], KEYS[1], KEYS[2]], 100.0) == 4
    assert house.node.pin(KEYS[:1], 10.0) == 1
    assert house.node.stats().pinned_bytes == 3 * SIZE
    assert isinstance(house.clock, ManualClock)
    house.clock.advance(99.0)
    assert house.node.stats().pinned_bytes == 3 * SIZE
    house.clock.advance(1.0)
    stats = house.node.stats()
    assert (stats.pinned_bytes, stats.leased_blocks, stats.violation) == (0, 0, "")


async def test_a_tenant_pins_a_part_of_its_quota() -> None:
    house = House(room=8, tenant_bytes=4 * SIZE)
    await house.put(0, 1, 2, tenant=b"a")
    await house.put(3, tenant=b"b")
    assert house.node.pin(KEYS[:2], 60.0) == 2
    with pytest.raises(Overloaded, match="the tenant has pinned 128 bytes"):
        house.node.pin(KEYS[:3], 60.0)
    assert house.node.pin(KEYS[3:4], 60.0) == 1


async def test_what_is_purged_is_not_pinned_any_more() -> None:
    house = House()
    await house.put(0, 1)
    house.node.pin(KEYS[:2], 60.0)
    assert await house.node.purge(BlockFilter()) == 2
    stats = house.node.stats()
    assert (stats.num_blocks, stats.pinned_bytes, stats.violation) == (0, 0, "")
    await house.put(0)
    assert house.node.pin(KEYS[:1], 30.0) == 1
    assert isinstance(house.clock, ManualClock)
    house.clock.advance(60.0)
    assert house.node.stats().violation == ""
