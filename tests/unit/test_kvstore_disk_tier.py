"""Between DRAM and SSD: demotion, promotion, restarts, and what is broken on the way."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.core.store import BlockFilter, Tier
from baton.errors import Overloaded, Unavailable
from kvstore.disk_tier import DiskTier
from kvstore.segment import Segment
from tests.store_house import KEYS, SIZE, House


def tiers(house: House) -> list[int]:
    return [house.node._tiers.tier_of(key) for key in KEYS[:6]]


async def settle(house: House) -> None:
    """Lets the background make its room."""
    house.node.demotion.notice()
    for size in house.shelf.sizes():
        await house.node.demotion._make_room(size)


async def test_what_is_to_go_is_on_the_disk_first(tmp_path: Path) -> None:
    house = House(folder=tmp_path)
    await house.put(0, 1, 2, 3)
    await settle(house)
    assert tiers(house) == [Tier.DRAM, Tier.DRAM, Tier.DRAM, Tier.DISK, Tier.NONE, Tier.NONE]
    assert await house.put(4) == (1, 0)  # without an eviction
    stats = house.node.stats()
    assert (stats.evictions, stats.demotions, stats.dropped_blocks) == (1, 1, 0)
    assert (stats.disk_blocks, stats.violation) == (1, "")


async def test_a_burst_drops_what_could_not_be_written_in_time(tmp_path: Path) -> None:
    house = House(folder=tmp_path)
    await house.put(0, 1, 2, 3)
    await house.put(4, 5)
    stats = house.node.stats()
    assert (stats.evictions, stats.dropped_blocks, stats.disk_blocks) == (2, 2, 0)


async def test_a_lease_promotes(tmp_path: Path) -> None:
    house = House(folder=tmp_path)
    await house.put(0, 1, 2, 3)
    await house.node.demotion.flush()
    await house.put(4, 5)
    assert tiers(house) == [1, 1, 2, 2, 1, 1]
    leased = await house.lease(0, 1, 2, 3)
    assert (len(leased.blocks), leased.num_held, leased.num_promoted) == (4, 4, 2)
    house.node.release(leased.lease_id)
    assert await house.read(0, 1, 2, 3) == [house.block(n) for n in range(4)]
    stats = house.node.stats()
    assert (stats.hit_blocks_dram, stats.hit_blocks_disk, stats.promotions) == (6, 2, 2)
    assert house.sound()


async def test_a_lease_promotes_no_more_than_it_asks_for(tmp_path: Path) -> None:
    house = House(folder=tmp_path)
    await house.put(0, 1, 2, 3)
    await house.node.demotion.flush()
    await house.put(4, 5, 6, 7)
    leased = await house.lease(0, 1, 2, 3, max_bytes=2 * SIZE)
    assert (len(leased.blocks), leased.num_held, leased.num_promoted) == (2, 4, 2)


async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    house = House(folder=tmp_path)
    await house.put(0, 1, 2, 3, tenant=b"t" * 16, model=b"m" * 16)
    assert await house.node.demotion.flush() == 4
    assert await house.node.demotion.flush() == 0
    assert house.disk is not None
    house.disk.close()
    again = House(folder=tmp_path)
    assert tiers(again) == [2, 2, 2, 2, 0, 0]
    assert await again.read(0, 1, 2, 3) == [house.block(n) for n in range(4)]
    blocks, _ = again.node.list_blocks(BlockFilter(tenant=b"t" * 16), 0, 9)
    assert [(b.depth, b.model) for b in blocks] == [(n, b"m" * 16) for n in range(4)]


async def test_a_demoted_copy_is_not_written_twice(tmp_path: Path) -> None:
    house = House(folder=tmp_path)
    await house.put(0, 1, 2, 3)
    await house.node.demotion.flush()
    await settle(house)
    assert (house.node.stats().demotions, house.node.stats().dropped_blocks) == (4, 0)


async def test_a_pin_promotes(tmp_path: Path) -> None:
    house = House(folder=tmp_path)
    await house.put(0, 1, 2, 3)
    await house.node.demotion.flush()
    await house.put(4, 5)
    assert tiers(house)[2:4] == [Tier.DISK, Tier.DISK]
    assert await house.node.pin_all(KEYS[2:4], 60.0) == 2
    assert tiers(house)[2:4] == [Tier.DRAM, Tier.DRAM]
    assert house.node.stats().pinned_bytes == 2 * SIZE  # half of all: as much as may be
    with pytest.raises(Overloaded, match="50% may be"):
        await house.node.pin_all(KEYS[1:2], 60.0)
    await house.put(0, 1, 4, 5)
    assert tiers(house)[2:4] == [Tier.DRAM, Tier.DRAM]
    assert await house.node.pin_all(KEYS[8:9], 60.0) == 0
    assert house.sound()


async def test_more_than_may_be_pinned_is_not_read_in(tmp_path: Path) -> None:
    house = House(folder=tmp_path)
    await house.put(0, 1, 2, 3)
    await house.node.demotion.flush()
    await house.put(4, 5)
    await house.lease(4, 5)
    before = house.node.stats().promotions
    assert await house.node.pin_all(KEYS[:4], 60.0) == 2
    assert house.node.stats().promotions == before


async def test_a_bit_flipped_on_the_disk_is_found_by_the_promotion(tmp_path: Path) -> None:
    house = House(folder=tmp_path)
    await house.put(0, 1, 2, 3)
    await house.node.demotion.flush()
    await house.put(4, 5, 6, 7)
    assert house.disk is not None
    block = house.disk.get(KEYS[1])
    assert block is not None
    flip(block.segment, block.segment._offset(block.slot) + 3)
    leased = await house.lease(0, 1, 2, 3)
    assert [block.key for block in leased.blocks] == KEYS[:1]
    house.node.release(leased.lease_id)
    stats = house.node.stats()
    assert (stats.checksum_failures, stats.disk_blocks, stats.violation) == (1, 3, "")
    assert await house.held(0, 1, 2) == [0, 2]


async def test_a_damaged_copy_in_dram_leaves_the_one_on_the_disk(tmp_path: Path) -> None:
    house = House(folder=tmp_path)
    await house.put(0)
    await house.node.demotion.flush()
    leased = await house.lease(0)
    house.node.release(leased.lease_id)
    house.flip(leased.blocks[0].offset_bytes)
    assert await house.node.report(KEYS[:1]) == 1
    assert tiers(house)[0] is Tier.DISK
    assert await house.read(0) == [house.block(0)]


async def test_a_segment_cut_short(tmp_path: Path) -> None:
    house = House(folder=tmp_path)
    await house.put(0, 1)
    await house.node.demotion.flush()
    await house.put(4, 5, 6, 7)
    assert house.disk is not None
    block = house.disk.get(KEYS[0])
    assert block is not None
    os.truncate(block.segment.path, block.segment._offset(block.slot) + 1)
    assert (await house.lease(0, 1)).blocks == ()
    assert (house.node.stats().checksum_failures, house.sound()) == (1, True)
    house.disk.close()
    again = DiskTier(tmp_path, 256 * 1024, segment_bytes=64 * 1024)
    assert KEYS[0] not in again
    again.check_integrity()


async def test_a_full_disk_costs_only_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(folder=tmp_path)
    assert isinstance(house.clock, ManualClock)

    def fail(self: Segment, *args: object) -> None:
        raise Unavailable("no space left on device")

    monkeypatch.setattr(Segment, "write", fail)
    await house.put(0, 1, 2, 3)
    assert await house.node.demotion.flush() == 0
    stats = house.node.stats()
    assert (stats.disk_failures, stats.disk_blocks, stats.num_blocks) == (1, 0, 4)
    assert await house.put(4, 5) == (2, 0)
    monkeypatch.undo()
    assert await house.node.demotion.flush() == 0  # it rests
    house.clock.advance(10.0)
    assert await house.node.demotion.flush() == 4
    assert house.sound()


async def test_no_room_for_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", fail)
    house = House(folder=tmp_path)
    await house.put(0, 1)
    assert await house.node.demotion.flush() == 0
    assert (house.node.stats().disk_blocks, house.sound()) == (0, True)
    assert house.disk is not None and house.disk.describe() == ""


async def test_a_cancelled_demotion_and_promotion_leave_nothing_held(tmp_path: Path) -> None:
    house = House(folder=tmp_path)
    await house.put(0, 1, 2, 3)
    for _ in range(2):
        flushing = asyncio.create_task(house.node.demotion.flush())
        await asyncio.sleep(0)
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing
        assert house.sound()
    await house.node.demotion.flush()
    await house.put(4, 5, 6, 7)
    leasing = asyncio.create_task(house.lease(0, 1))
    await asyncio.sleep(0)
    leasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leasing
    assert (house.node.stats().leased_blocks, house.sound()) == (0, True)
    assert await house.read(0, 1) == [house.block(0), house.block(1)]


async def test_a_purge_reaches_the_disk(tmp_path: Path) -> None:
    house = House(folder=tmp_path)
    await house.put(0, 1, tenant=b"a")
    await house.put(2, 3, tenant=b"b")
    await house.node.demotion.flush()
    assert await house.node.purge(BlockFilter(tenant=b"a")) == 2
    assert house.disk is not None
    house.disk.close()
    assert tiers(House(folder=tmp_path))[:4] == [0, 0, 2, 2]


async def test_the_event_loop_never_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(folder=tmp_path, disk_bytes=64 * 1024)
    called: list[tuple[str, bool]] = []

    def watch(name: str) -> None:
        call = getattr(os, name)

        def watched(*args: object) -> object:
            called.append((name, threading.current_thread() is threading.main_thread()))
            return call(*args)

        monkeypatch.setattr(os, name, watched)

    for name in ("pwrite", "preadv", "posix_fallocate"):
        watch(name)
    await house.put(0, 1, 2, 3)
    await house.node.demotion.flush()
    await house.put(4, 5, 6, 7)
    assert await house.read(0, 1) == [house.block(0), house.block(1)]
    assert house.disk is not None
    assert house.disk.drop(KEYS[2]) and not house.disk.is_settled
    await house.node.settle()
    assert await house.node.purge(BlockFilter()) == 5 and house.disk.is_settled
    assert {name for name, _ in called} == {"pwrite", "preadv", "posix_fallocate"}
    assert not [name for name, in_loop in called if in_loop]


def flip(segment: Segment, offset: int) -> None:
    with segment.path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
