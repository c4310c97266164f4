"""Keeps room in DRAM: what is to go is on the disk before anybody needs its place."""

import asyncio

from kvstore.dram_tier import DramBlock
from kvstore.tiered_store import TieredStore

LOW_WATERMARK_SHARE, HIGH_WATERMARK_SHARE = 0.04, 0.08
"""Of the arena: below the one room is made, up to the other."""

BATCH_BYTES = 16 * 1024 * 1024
"""Written at a time, so that what is held for it is little."""


class Demoter:
    """Runs in the background. Without a disk there is nothing to prepare: eviction is instant."""

    def __init__(self, tiers: TieredStore) -> None:
        self._tiers = tiers
        self._wanted = asyncio.Event()

    def notice(self) -> None:
        """Room was taken."""
        if self._tiers.can_write_out and any(self._is_low(size) for size in self._sizes()):
            self._wanted.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            for size in self._sizes():
                if self._is_low(size):
                    await self._make_room(size)

    async def flush(self) -> int:
        """Everything that is in DRAM only goes to the disk, the most useful first; returns how
        many blocks did. For a node that is about to stop."""
        tiers, flushed = self._tiers, 0
        if tiers.disk is None:
            return 0
        slots = sorted(tiers.shelf.sealed(), key=lambda slot: (-slot.last_used, slot.depth))
        wanted = [slot for slot in slots if slot.key not in tiers.disk]
        for batch in _batches(wanted):
            if not tiers.can_write_out:
                break
            flushed += await self._write(batch)
        return flushed

    def _sizes(self) -> list[int]:
        return self._tiers.shelf.sizes()

    def _is_low(self, size_bytes: int) -> bool:
        return self._tiers.shelf.num_free(size_bytes) < self._num_blocks(
            LOW_WATERMARK_SHARE, size_bytes
        )

    def _num_blocks(self, share: float, size_bytes: int) -> int:
        return max(int(share * self._tiers.shelf.arena_bytes / size_bytes), 1)

    async def _make_room(self, size_bytes: int) -> None:
        """A batch at a time, until there is enough, everything is held, or the disk fails."""
        tiers, goal = self._tiers, self._num_blocks(HIGH_WATERMARK_SHARE, size_bytes)
        while tiers.can_write_out and tiers.shelf.num_free(size_bytes) < goal:
            missing = goal - tiers.shelf.num_free(size_bytes)
            batch = self._hold_victims(size_bytes, missing)
            if not batch:
                return
            await self._write_held(batch)
            tiers.evict([slot for slot in batch if self._may_go(slot)])

    def _may_go(self, slot: DramBlock) -> bool:
        """It is safe on the disk, and nobody came for it meanwhile."""
        tiers = self._tiers
        assert tiers.disk is not None
        here = tiers.shelf.get(slot.key) is slot and slot.num_holds == 0
        return here and slot.key in tiers.disk

    def _hold_victims(self, size_bytes: int, num_blocks: int) -> list[DramBlock]:
        batch: list[DramBlock] = []
        while len(batch) < num_blocks and sum(slot.size_bytes for slot in batch) < BATCH_BYTES:
            victims = self._tiers.shelf.victims(size_bytes)
            if not victims:
                break
            for slot in victims:
                self._tiers.shelf.hold(slot)
            batch += victims
        return batch

    async def _write(self, slots: list[DramBlock]) -> int:
        present = [slot for slot in slots if self._tiers.shelf.get(slot.key) is slot]
        for slot in present:
            self._tiers.shelf.hold(slot)
        return await self._write_held(present)

    async def _write_held(self, slots: list[DramBlock]) -> int:
        try:
            return await self._tiers.write_out(slots)
        finally:
            self._tiers.shelf.let_go(slots)


def _batches(slots: list[DramBlock]) -> list[list[DramBlock]]:
    batches: list[list[DramBlock]] = []
    size = BATCH_BYTES
    for slot in slots:
        if size >= BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(slot)
        size += slot.size_bytes
    return batches
