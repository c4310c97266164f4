"""Keeps some slots in DRAM free by copying blocks to the disk before their slots are needed."""

import asyncio

from kvstore.dram_block import DramBlock
from kvstore.tiered_store import TieredStore

LOW_WATERMARK_SHARE, HIGH_WATERMARK_SHARE = 0.04, 0.08
"""Shares of the part of the arena that is available to a slot size. When less than the low share is
free, slots are freed until the high share is free."""

BATCH_BYTES = 16 * 1024 * 1024
"""Maximum number of bytes written at a time. It is limited because blocks can't be evicted while
they are being written."""


class Demoter:
    """Demotes blocks in the background. On a node without a disk it does nothing, since blocks are
    then evicted without a copy."""

    def __init__(self, tiers: TieredStore) -> None:
        self._tiers = tiers
        self._wakeup = asyncio.Event()

    def wake_if_low(self) -> None:
        """Wake up :meth:`run` if few slots are free. Call this after slots were allocated."""
        if self._tiers.can_demote and any(self._is_low(size) for size in self._slot_sizes()):
            self._wakeup.set()

    async def run(self) -> None:
        """Demote blocks until cancelled."""
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            for size in self._slot_sizes():
                if self._is_low(size):
                    await self._free_slots(size)

    async def demote_all(self) -> int:
        """Write all blocks that are only in DRAM to the disk, the most recently used first, and
        return how many were written. Call this when the node is about to stop."""
        tiers, flushed = self._tiers, 0
        if tiers.disk is None:
            return 0
        slots = sorted(tiers.dram.sealed(), key=lambda slot: (-slot.last_used, slot.depth))
        wanted = [slot for slot in slots if slot.key not in tiers.disk]
        for batch in _batches(wanted):
            if not tiers.can_demote:
                break
            flushed += await self._demote(batch)
        return flushed

    def _slot_sizes(self) -> list[int]:
        return self._tiers.dram.slot_sizes()

    def _is_low(self, slot_bytes: int) -> bool:
        return self._tiers.dram.num_free(slot_bytes) < self._slots_per_share(
            LOW_WATERMARK_SHARE, slot_bytes
        )

    def _slots_per_share(self, share: float, slot_bytes: int) -> int:
        available = self._tiers.dram.available_bytes(slot_bytes)
        return max(int(share * available / slot_bytes), 1)

    async def _free_slots(self, slot_bytes: int) -> None:
        """Demote batches until enough slots are free, every block is referenced, or the disk
        fails."""
        tiers, goal = self._tiers, self._slots_per_share(HIGH_WATERMARK_SHARE, slot_bytes)
        while tiers.can_demote and tiers.dram.num_free(slot_bytes) < goal:
            missing = goal - tiers.dram.num_free(slot_bytes)
            batch = self._reference_victims(slot_bytes, missing)
            if not batch:
                return
            await self._demote_referenced(batch)
            tiers.evict([slot for slot in batch if self._is_evictable(slot)])

    def _is_evictable(self, slot: DramBlock) -> bool:
        """Whether the block is on the disk, still in its DRAM slot, and not referenced: a request
        may have referenced it while it was being copied."""
        tiers = self._tiers
        assert tiers.disk is not None
        is_idle = tiers.dram.get(slot.key) is slot and slot.num_references == 0
        return is_idle and slot.key in tiers.disk

    def _reference_victims(self, slot_bytes: int, num_blocks: int) -> list[DramBlock]:
        batch: list[DramBlock] = []
        while len(batch) < num_blocks and sum(slot.size_bytes for slot in batch) < BATCH_BYTES:
            victims = self._tiers.dram.select_victims(slot_bytes)
            if not victims:
                break
            for slot in victims:
                self._tiers.dram.add_reference(slot)
            batch += victims
        return batch

    async def _demote(self, slots: list[DramBlock]) -> int:
        present = [slot for slot in slots if self._tiers.dram.get(slot.key) is slot]
        for slot in present:
            self._tiers.dram.add_reference(slot)
        return await self._demote_referenced(present)

    async def _demote_referenced(self, slots: list[DramBlock]) -> int:
        try:
            return await self._tiers.demote(slots)
        finally:
            self._tiers.dram.release_references(slots)


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
