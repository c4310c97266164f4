"""Tests how blocks move between DRAM and SSD: demotion, promotion, restarts, and failures on the
way."""

import asyncio
import os
import threading
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.core.store import BlockFilter, Tier
from baton.errors import Overloaded, Unavailable
from kvstore import demoter
from kvstore.disk_tier import DiskTier
from kvstore.limits import MAX_WAIT_SECONDS
from kvstore.segment import Segment
from tests.store_harness import KEYS, SIZE, StoreHarness


def tiers(store: StoreHarness) -> list[int]:
    return [store.node._tiers.tier_of(key) for key in KEYS[:6]]


async def settle(store: StoreHarness) -> None:
    """Free slots by demoting blocks, as the background task does."""
    await store.node.demoter.demote_if_low()


async def test_blocks_are_demoted_before_they_are_evicted(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1, 2, 3)
    await settle(store)
    assert tiers(store) == [Tier.DRAM, Tier.DRAM, Tier.DRAM, Tier.DISK, Tier.NONE, Tier.NONE]
    assert await store.put(4) == (1, 0)  # without waiting for an eviction
    stats = store.node.stats()
    assert (stats.evictions, stats.demotions, stats.dropped_blocks) == (1, 1, 0)
    assert (stats.disk_blocks, stats.violation) == (1, "")


async def test_burst_waits_until_blocks_in_its_way_are_on_the_disk(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1, 2, 3)
    assert await store.put(4, 5) == (2, 0)
    stats = store.node.stats()
    assert (stats.evictions, stats.dropped_blocks, stats.disk_blocks) == (2, 0, 2)
    assert await store.read(0, 1, 2, 3) == [store.block(n) for n in range(4)]
    assert store.has_integrity()


async def test_burst_drops_blocks_if_the_disk_is_too_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block takes all the time that a put waits, so the second one is not written."""
    store = StoreHarness(folder=tmp_path)
    clock, write = store.clock, Segment.write
    assert isinstance(clock, ManualClock)

    def write_slowly(self: Segment, *arguments: Any) -> None:
        clock.advance(MAX_WAIT_SECONDS)
        write(self, *arguments)

    monkeypatch.setattr(Segment, "write", write_slowly)
    monkeypatch.setattr(demoter, "BATCH_BYTES", SIZE)
    await store.put(0, 1, 2, 3)
    assert await store.put(4, 5) == (2, 0)
    stats = store.node.stats()
    assert (stats.evictions, stats.dropped_blocks, stats.disk_blocks) == (2, 1, 1)
    assert store.has_integrity()


async def test_promotion_waits_until_blocks_in_its_way_are_on_the_disk(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1, 2, 3)
    await store.put(4, 5, 6, 7)
    assert await store.read(0, 1, 2, 3) == [store.block(n) for n in range(4)]
    assert await store.read(4, 5, 6, 7) == [store.block(n) for n in range(4, 8)]
    assert (store.node.stats().dropped_blocks, store.node.stats().disk_blocks) == (0, 8)


async def test_blocks_being_promoted_are_not_evicted_from_a_full_disk(tmp_path: Path) -> None:
    """The disk has room for fourteen blocks, the oldest of which are promoted. Of the four blocks
    that make room for them, two take the places of the oldest others."""
    store = StoreHarness(folder=tmp_path, disk_bytes=64 * 1024)
    for first in range(0, 16, 4):
        await store.put(*range(first, first + 4))
    assert store.node.stats().disk_blocks == 12
    assert await store.read(0, 1, 2, 3) == [store.block(n) for n in range(4)]
    assert (store.node.stats().dropped_blocks, store.node.stats().disk_blocks) == (0, 14)
    assert len(await store.stored_numbers(*range(16))) == 14
    assert store.has_integrity()


async def test_burst_of_concurrent_puts_loses_no_block(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1, 2, 3)
    assert await asyncio.gather(store.put(4, 5), store.put(6, 7)) == [(2, 0), (2, 0)]
    assert (store.node.stats().dropped_blocks, store.node.stats().disk_blocks) == (0, 4)
    assert store.has_integrity()


async def test_what_fits_on_the_disk_is_kept_at_the_default_sizes(tmp_path: Path) -> None:
    """The proportions are those of the default sizes with blocks of 16 tokens of SmolLM2-135M in
    FP32 (720 KiB): 364 blocks in DRAM, four times as many on the disk. Seven prompts of 48 blocks
    fill 92 % of DRAM, so that the background task has nothing to do; then comes a prompt of 93
    blocks, in puts of 64 MiB. A restart finds all of them."""
    sizes = [48] * 7 + [93, 20, 20]
    ends = list(accumulate(sizes))
    prompts = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def open_store() -> StoreHarness:
        return StoreHarness(
            364, tmp_path, 4 * 364 * 4096, "baton", size=4096, slab_blocks=8, num_blocks=ends[-1]
        )

    store = open_store()
    for prompt in prompts:
        for first in range(0, len(prompt), 91):
            await store.put(*prompt[first : first + 91])
        await settle(store)
    stats = store.node.stats()
    assert (stats.dropped_blocks, stats.put_blocks) == (0, sum(sizes))
    assert [len(await store.stored_numbers(*prompt)) for prompt in prompts] == sizes
    await store.node.demoter.demote_all()
    assert store.disk is not None
    store.disk.close()
    again = open_store()
    assert [len(await again.stored_numbers(*prompt)) for prompt in prompts] == sizes


async def test_lease_promotes_blocks_from_disk(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1, 2, 3)
    await store.node.demoter.demote_all()
    await store.put(4, 5)
    assert tiers(store) == [1, 1, 2, 2, 1, 1]
    leased = await store.lease(0, 1, 2, 3)
    assert (len(leased.blocks), leased.num_stored, leased.num_promoted) == (4, 4, 2)
    store.node.release(leased.lease_id)
    assert await store.read(0, 1, 2, 3) == [store.block(n) for n in range(4)]
    stats = store.node.stats()
    assert (stats.hit_blocks_dram, stats.hit_blocks_disk, stats.promotions) == (6, 2, 2)
    assert store.has_integrity()


async def test_lease_promotes_no_more_than_it_requests(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1, 2, 3)
    await store.node.demoter.demote_all()
    await store.put(4, 5, 6, 7)
    leased = await store.lease(0, 1, 2, 3, max_bytes=2 * SIZE)
    assert (len(leased.blocks), leased.num_stored, leased.num_promoted) == (2, 4, 2)


async def test_demoted_blocks_survive_a_restart(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1, 2, 3, tenant=b"t" * 16, model=b"m" * 16)
    assert await store.node.demoter.demote_all() == 4
    assert await store.node.demoter.demote_all() == 0
    assert store.disk is not None
    store.disk.close()
    again = StoreHarness(folder=tmp_path)
    assert tiers(again) == [2, 2, 2, 2, 0, 0]
    assert await again.read(0, 1, 2, 3) == [store.block(n) for n in range(4)]
    blocks, _ = again.node.list_blocks(BlockFilter(tenant=b"t" * 16), 0, 9)
    assert [(b.depth, b.model) for b in blocks] == [(n, b"m" * 16) for n in range(4)]


async def test_demoted_copy_is_not_written_twice(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1, 2, 3)
    await store.node.demoter.demote_all()
    await settle(store)
    assert (store.node.stats().demotions, store.node.stats().dropped_blocks) == (4, 0)


async def test_pin_promotes_blocks_from_disk(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1, 2, 3)
    await store.node.demoter.demote_all()
    await store.put(4, 5)
    assert tiers(store)[2:4] == [Tier.DISK, Tier.DISK]
    assert await store.node.pin_with_promotion(KEYS[2:4], 60.0) == 2
    assert tiers(store)[2:4] == [Tier.DRAM, Tier.DRAM]
    assert store.node.stats().pinned_bytes == 2 * SIZE  # half of the DRAM tier, which is the limit
    with pytest.raises(Overloaded, match="at most 50% of the"):
        await store.node.pin_with_promotion(KEYS[1:2], 60.0)
    await store.put(0, 1, 4, 5)
    assert tiers(store)[2:4] == [Tier.DRAM, Tier.DRAM]
    assert await store.node.pin_with_promotion(KEYS[8:9], 60.0) == 0
    assert store.has_integrity()


async def test_blocks_beyond_the_pin_limit_are_not_promoted(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1, 2, 3)
    await store.node.demoter.demote_all()
    await store.put(4, 5)
    await store.lease(4, 5)
    before = store.node.stats().promotions
    assert await store.node.pin_with_promotion(KEYS[:4], 60.0) == 2
    assert store.node.stats().promotions == before


async def test_flipped_bit_on_disk_is_detected_by_the_promotion(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1, 2, 3)
    await store.node.demoter.demote_all()
    await store.put(4, 5, 6, 7)
    assert store.disk is not None
    block = store.disk.get(KEYS[1])
    assert block is not None
    flip(block.segment, block.segment.slot_offset(block.slot) + 3)
    leased = await store.lease(0, 1, 2, 3)
    assert [block.key for block in leased.blocks] == KEYS[:1]
    store.node.release(leased.lease_id)
    stats = store.node.stats()
    assert (stats.checksum_failures, stats.disk_blocks, stats.violation) == (1, 7, "")
    assert await store.stored_numbers(0, 1, 2) == [0, 2]


async def test_damaged_dram_copy_leaves_the_disk_copy(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0)
    await store.node.demoter.demote_all()
    leased = await store.lease(0)
    store.node.release(leased.lease_id)
    store.flip_bit(leased.blocks[0].offset_bytes)
    assert await store.node.report_damaged(KEYS[:1]) == 1
    assert tiers(store)[0] is Tier.DISK
    assert await store.read(0) == [store.block(0)]


async def test_truncated_segment_is_detected(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1)
    await store.node.demoter.demote_all()
    await store.put(4, 5, 6, 7)
    assert store.disk is not None
    block = store.disk.get(KEYS[0])
    assert block is not None
    os.truncate(block.segment.path, block.segment.slot_offset(block.slot) + 1)
    assert (await store.lease(0, 1)).blocks == ()
    assert (store.node.stats().checksum_failures, store.has_integrity()) == (1, True)
    store.disk.close()
    again = DiskTier(tmp_path, 256 * 1024, segment_bytes=64 * 1024)
    assert KEYS[0] not in again
    again.check_integrity()


async def test_full_disk_does_not_affect_the_dram_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreHarness(folder=tmp_path)
    assert isinstance(store.clock, ManualClock)

    def fail(self: Segment, *args: object) -> None:
        raise Unavailable("no space left on device")

    monkeypatch.setattr(Segment, "write", fail)
    await store.put(0, 1, 2, 3)
    assert await store.node.demoter.demote_all() == 0
    stats = store.node.stats()
    assert (stats.disk_failures, stats.disk_blocks, stats.num_blocks) == (1, 0, 4)
    assert await store.put(4, 5) == (2, 0)
    monkeypatch.undo()
    assert await store.node.demoter.demote_all() == 0  # the node pauses before it tries again
    store.clock.advance(10.0)
    assert await store.node.demoter.demote_all() == 4
    assert store.has_integrity()


async def test_disk_without_room_for_a_segment_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", fail)
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1)
    assert await store.node.demoter.demote_all() == 0
    assert (store.node.stats().disk_blocks, store.has_integrity()) == (0, True)
    assert store.disk is not None and store.disk.describe() == ""


async def test_cancelled_demotion_and_promotion_leave_no_references(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1, 2, 3)
    for _ in range(2):
        flushing = asyncio.create_task(store.node.demoter.demote_all())
        await asyncio.sleep(0)
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing
        assert store.has_integrity()
    await store.node.demoter.demote_all()
    await store.put(4, 5, 6, 7)
    leasing = asyncio.create_task(store.lease(0, 1))
    await asyncio.sleep(0)
    leasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leasing
    assert (store.node.stats().leased_blocks, store.has_integrity()) == (0, True)
    assert await store.read(0, 1) == [store.block(0), store.block(1)]


async def test_purge_includes_the_disk(tmp_path: Path) -> None:
    store = StoreHarness(folder=tmp_path)
    await store.put(0, 1, tenant=b"a")
    await store.put(2, 3, tenant=b"b")
    await store.node.demoter.demote_all()
    assert await store.node.purge(BlockFilter(tenant=b"a")) == 2
    assert store.disk is not None
    store.disk.close()
    assert tiers(StoreHarness(folder=tmp_path))[:4] == [0, 0, 2, 2]


async def test_disk_io_never_runs_in_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreHarness(folder=tmp_path, disk_bytes=64 * 1024)
    called: list[tuple[str, bool]] = []

    def watch(name: str) -> None:
        call = getattr(os, name)

        def watched(*args: object) -> object:
            called.append((name, threading.current_thread() is threading.main_thread()))
            return call(*args)

        monkeypatch.setattr(os, name, watched)

    for name in ("pwrite", "preadv", "posix_fallocate"):
        watch(name)
    await store.put(0, 1, 2, 3)
    await store.node.demoter.demote_all()
    await store.put(4, 5, 6, 7)
    assert await store.read(0, 1) == [store.block(0), store.block(1)]
    assert store.disk is not None
    assert store.disk.drop(KEYS[2]) and not store.disk.is_flushed
    await store.node.flush()
    assert await store.node.purge(BlockFilter()) == 7 and store.disk.is_flushed
    assert {name for name, _ in called} == {"pwrite", "preadv", "posix_fallocate"}
    assert not [name for name, in_loop in called if in_loop]


def flip(segment: Segment, offset: int) -> None:
    with segment.path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
