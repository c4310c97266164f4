"""Frees slots in DRAM by copying blocks to the disk: in the background, before slots are needed,
and at once for blocks that need more of them."""

import asyncio
import math

from baton.clock import Clock
from kvstore.dram_block import DramBlock
from kvstore.limits import BATCH_BYTES
from kvstore.tiered_store import TieredStore

LOW_WATERMARK_SHARE, HIGH_WATERMARK_SHARE = 0.04, 0.08
"""Shares of the part of the arena that is available to a slot size. When less than the low share is
free, slots are freed until the high share is free."""


class Demoter:
    """Demotes blocks. On a node without a disk it does nothing, since blocks are then evicted
    without a copy."""

    def __init__(self, tiers: TieredStore, clock: Clock) -> None:
        self._tiers = tiers
        self._clock = clock
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
            await self.demote_if_low()

    async def demote_if_low(self) -> None:
        """Demote blocks of the slot sizes of which few slots are free."""
        for size in self._slot_sizes():
            if self._is_low(size):
                await self.make_room(size, self._slots_per_share(HIGH_WATERMARK_SHARE, size))

    async def make_room(self, slot_bytes: int, num_slots: int, deadline: float = math.inf) -> None:
        """Demote batches until ``num_slots`` slots are free, no other block can be evicted, the
        disk fails or is full, or the clock has passed ``deadline``."""
        tiers = self._tiers
        while tiers.can_demote and self._clock.monotonic() < deadline:
            missing = num_slots - tiers.dram.num_free(slot_bytes)
            batch = self._reference_victims(slot_bytes, missing)
            if not batch:
                return
            await self._demote_referenced(batch)
            evictable = [slot for slot in batch if self._is_evictable(slot)]
            if not evictable:
                return
            tiers.evict(evictable)

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
