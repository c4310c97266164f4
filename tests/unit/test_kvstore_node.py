"""The store node over the in-memory transport: what is put is verified, lent, and told."""

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import xxhash

from baton.clock import ManualClock
from baton.core.handoff import CHECKSUM_XXH3, BlockRef, Endpoint
from baton.core.ids import BlockKey, Generation, WorkerId
from baton.core.store import PutRequest
from baton.errors import Corrupt, Invalid, Overloaded, Unavailable
from baton.kv.index import Holder, PrefixHit
from baton.kv.memory_index import MemoryKvIndex
from baton.transport.base import Span
from baton.transport.memory import MemoryFabric, MemoryTransport
from baton.transport.region import HostMemory
from kvstore.node import StoreNode

SIZE = 64
KEYS = [BlockKey(bytes([number]) * 16) for number in range(8)]


class House:
    """A worker's memory, and a node with room for four blocks."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.clock = clock = ManualClock()
        self.pool = HostMemory("worker", 8 * SIZE)
        self.bytes = np.frombuffer(self.pool.view, dtype=np.uint8)
        self.bytes[:] = np.random.default_rng(1).integers(256, size=8 * SIZE, dtype=np.uint8)
        worker = MemoryTransport(self.fabric, "worker", 1, clock)
        worker.register(self.pool.region)
        self.source: Endpoint = worker.export()
        self.arena = HostMemory("store", 4 * SIZE)
        transport = MemoryTransport(self.fabric, "store", 1, clock)
        transport.register(self.arena.region)
        self.index = MemoryKvIndex()
        self.holder = Holder(WorkerId("store"), Generation(1))
        self.node = StoreNode(
            self.holder, self.arena, {"memory": transport}, self.index, "here", clock,
            slab_bytes=4 * SIZE,
        )  # type: ignore[arg-type]  # fmt: skip

    def request(self, numbers: Sequence[int], wrong: int = 0) -> PutRequest:
        blocks = []
        for number in numbers:
            data = self.bytes[number * SIZE : (number + 1) * SIZE].tobytes()
            checksum = xxhash.xxh3_64_intdigest(data) + wrong
            blocks.append(BlockRef(number * SIZE, SIZE, checksum, KEYS[number]))
        return PutRequest(self.source, CHECKSUM_XXH3, tuple(blocks))

    def stored(self, number: int) -> bytes:
        leased = self.node.lease([KEYS[number]], 1.0)
        self.node.release(leased.lease_id)
        start = leased.blocks[0].offset_bytes
        return bytes(self.arena.view[start : start + SIZE])


async def test_what_was_put_is_lent_and_told() -> None:
    house = House()
    result = await house.node.put(house.request([0, 1, 2]))
    assert (result.stored, result.already_present) == (3, 0)
    result = await house.node.put(house.request([0, 1, 3]))
    assert (result.stored, result.already_present) == (1, 2)
    for number in range(4):
        expected = house.bytes[number * SIZE : (number + 1) * SIZE].tobytes()
        assert house.stored(number) == expected
    publishing = asyncio.create_task(house.node.publish())
    while (await house.index.longest_prefix(KEYS[:4])).num_blocks < 4:
        await asyncio.sleep(0)
    publishing.cancel()
    assert await house.index.longest_prefix(KEYS) == PrefixHit(4, (house.holder,))
    stats = house.node.stats()
    assert (stats.num_blocks, stats.used_bytes, stats.violation) == (4, 4 * SIZE, "")


async def test_what_does_not_match_is_not_kept() -> None:
    house = House()
    with pytest.raises(Corrupt, match="not what was announced"):
        await house.node.put(house.request([0, 1], wrong=1))
    stats = house.node.stats()
    assert (stats.num_blocks, stats.checksum_failures, stats.violation) == (0, 1, "")
    assert (await house.node.put(house.request([0, 1]))).stored == 2


async def test_a_key_twice_in_one_put_is_read_once() -> None:
    house = House()
    assert (await house.node.put(house.request([2, 2]))).stored == 1


async def test_a_reader_that_is_gone_leaves_no_slot() -> None:
    house = House()
    house.fabric.kill("worker")
    with pytest.raises(Unavailable):
        await house.node.put(house.request([0]))
    assert house.node.stats().num_blocks == 0


async def test_a_full_store_forgets_the_oldest_and_tells() -> None:
    house = House()
    await house.node.put(house.request([0, 1, 2, 3]))
    await house.node.put(house.request([4]))
    publishing = asyncio.create_task(house.node.publish())
    while (await house.index.longest_prefix([KEYS[4]])).num_blocks < 1:
        await asyncio.sleep(0)
    publishing.cancel()
    # Of the prefix 0 to 3 the end went.
    assert (await house.index.longest_prefix(KEYS[:4])).num_blocks == 3


async def test_leased_blocks_make_a_put_wait_its_turn() -> None:
    house = House()
    await house.node.put(house.request([0, 1, 2, 3]))
    lease = house.node.lease(KEYS[:4], 10.0)
    assert len(lease.blocks) == 4
    with pytest.raises(Overloaded):
        await house.node.put(house.request([4, 5]))
    house.node.release(lease.lease_id)
    assert (await house.node.put(house.request([4, 5]))).stored == 2


async def test_a_put_takes_no_room_from_its_own_prefix() -> None:
    house = House()
    await house.node.put(house.request([0, 1]))
    await house.node.put(house.request([2, 3]))
    result = await house.node.put(house.request([0, 1, 4]))
    assert (result.stored, result.already_present) == (1, 2)
    assert len(house.node.lease([KEYS[n] for n in (0, 1, 4)], 1.0).blocks) == 3
    assert len(house.node.lease([KEYS[2]], 1.0).blocks) == 1  # of 2 and 3 the end went


async def test_of_a_put_without_room_for_all_the_prefix_is_kept() -> None:
    house = House()
    result = await house.node.put(house.request([0, 1, 2, 3, 4, 5]))
    assert (result.stored, result.already_present) == (4, 0)
    assert [block.key for block in house.node.lease(KEYS, 1.0).blocks] == KEYS[:4]
    result = await house.node.put(house.request([0, 1, 2, 3, 4, 5]))
    assert (result.stored, result.already_present) == (0, 4)
    stats = house.node.stats()
    assert (stats.num_blocks, stats.evictions, stats.violation) == (4, 0, "")


@pytest.mark.parametrize("resync", ["by the next change", "by itself"])
async def test_an_index_that_was_gone_is_told_everything(
    resync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if resync == "by itself":
        monkeypatch.setattr("kvstore.node.RETRY_SECONDS", 0.0)
    house = House()
    house.index.reachable = False
    publishing = asyncio.create_task(house.node.publish())
    await house.node.put(house.request([0, 1]))
    while not house.node._must_resync:
        await asyncio.sleep(0)
    house.index.reachable = True
    expected = 2
    if resync == "by the next change":
        await house.node.put(house.request([2]))
        expected = 3
    while (await house.index.longest_prefix(KEYS[:3])).num_blocks < expected:
        await asyncio.sleep(0)
    publishing.cancel()


async def test_changes_beyond_the_bound_are_told_all_the_same() -> None:
    house = House()
    house.node._changes = asyncio.Queue(1)
    for number in range(4):
        await house.node.put(house.request([number]))
    publishing = asyncio.create_task(house.node.publish())
    while (await house.index.longest_prefix(KEYS[:4])).num_blocks < 4:
        await asyncio.sleep(0)
    publishing.cancel()


async def test_a_put_cancelled_while_bytes_come_in_waits_for_their_end() -> None:
    house = House()
    copying, go_on = threading.Event(), threading.Event()

    def hold(endpoint: Endpoint, span: Span) -> str:
        copying.set()
        assert go_on.wait(30.0)
        return ""

    house.fabric.fault = hold
    putting = asyncio.create_task(house.node.put(house.request([0])))
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
    putting = asyncio.create_task(house.node.put(house.request([0, 1])))
    while not house.node.stats().num_blocks:
        await asyncio.sleep(0)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    stats = house.node.stats()
    assert (stats.num_blocks, stats.violation) == (0, "")
    assert (await house.node.put(house.request([0, 1]))).stored == 2


async def test_what_is_damaged_on_the_way_is_not_kept() -> None:
    house = House()
    house.fabric.fault = lambda endpoint, span: "corrupt"
    with pytest.raises(Corrupt):
        await house.node.put(house.request([0]))
    house.fabric.fault = lambda endpoint, span: "lost"
    with pytest.raises(Unavailable, match="lost"):
        await house.node.put(house.request([0]))
    stats = house.node.stats()
    assert (stats.num_blocks, stats.checksum_failures, stats.violation) == (0, 1, "")


async def test_leases_end_by_the_clock() -> None:
    house = House()
    await house.node.put(house.request([0, 1]))
    assert house.node.lease(KEYS[:2], 5.0).lease_id
    house.clock.advance(4.75)
    assert house.node.stats().leased_blocks == 2
    house.clock.advance(0.25)
    assert house.node.stats().leased_blocks == 0
    assert (house.node.stats().hits, house.node.stats().misses) == (2, 0)


async def test_wrong_requests() -> None:
    house = House()
    request = house.request([0])
    unknown = Endpoint("pigeon", "worker", 1, "here", 8 * SIZE, b"")
    with pytest.raises(Invalid, match="no transport 'pigeon'"):
        await house.node.put(PutRequest(unknown, CHECKSUM_XXH3, request.blocks))
    huge = BlockRef(0, 5 * SIZE, 0, KEYS[0])
    with pytest.raises(Invalid, match="does not fit a slab"):
        await house.node.put(PutRequest(house.source, CHECKSUM_XXH3, (huge,)))
    outside = BlockRef(8 * SIZE - 1, SIZE, 0, KEYS[0])
    with pytest.raises(Invalid):
        await house.node.put(PutRequest(house.source, CHECKSUM_XXH3, (outside,)))
    assert house.node.stats().num_blocks == 0


async def test_puts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.node.MAX_PUTS", 1)
    house = House()
    putting = asyncio.create_task(house.node.put(house.request([0])))
    while not house.node.stats().num_blocks:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="1 puts are running") as refusal:
        await house.node.put(house.request([1]))
    assert refusal.value.retry_after_seconds == 0.2
    assert (await putting).stored == 1
    assert (await house.node.put(house.request([1]))).stored == 1


async def test_what_is_put_again_counts_as_used() -> None:
    house = House()
    await house.node.put(house.request([0, 1]))
    await house.node.put(house.request([2, 3]))
    assert (await house.node.put(house.request([0, 1]))).already_present == 2
    await house.node.put(house.request([4]))
    held = [len(house.node.lease([key], 1.0).blocks) for key in KEYS[:5]]
    assert held == [1, 1, 1, 0, 1]


async def test_slots_of_a_stray_read_come_back() -> None:
    class Stubborn(MemoryTransport):
        """Can't end a read before ``under_way`` is False."""

        under_way = True

        def copy(self, endpoint: Endpoint, span: Span) -> None:
            raise Unavailable("frozen")

        def release(self, transfer: object) -> bool:
            return not self.under_way

    house = House()
    clock = ManualClock()
    transport = Stubborn(house.fabric, "stubborn", 1, clock)
    transport.register(house.arena.region)
    house.node._transports["memory"] = transport  # type: ignore[assignment]
    house.node._clock = clock
    putting = asyncio.create_task(house.node.put(house.request([0])))
    while not putting.done():
        clock.advance(0.5)
        await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await putting
    assert house.node.stats().num_blocks == 1  # nobody else may have the slot
    transport.under_way = False
    house.node._recover_strays()
    assert house.node.stats().num_blocks == 0
