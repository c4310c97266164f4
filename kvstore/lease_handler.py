"""Leases and pins stored blocks, reading them from the disk if necessary."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.clock import Clock
from baton.core.ids import BlockKey
from baton.core.kv_transfer import BlockRef
from baton.core.store import LeasedBlocks, LeaseRequest
from kvstore.demoter import Demoter
from kvstore.disk_tier import DiskBlock
from kvstore.dram_block import DramBlock
from kvstore.limits import MAX_PINNED_SHARE, MAX_PROMOTIONS, MAX_WAIT_SECONDS
from kvstore.tiered_store import TieredStore


class LeaseHandler:
    """Handles leases and pins, which keep blocks from being evicted."""

    def __init__(self, tiers: TieredStore, demoter: Demoter, clock: Clock) -> None:
        self._tiers = tiers
        self._dram = tiers.dram
        self._demoter = demoter
        self._clock = clock
        self._num_promotions = 0

    async def lease(self, query: LeaseRequest) -> LeasedBlocks:
        """Lease the leading blocks, reading them from the disk if necessary. If ``query.max_bytes``
        is 0, only count the blocks and lease nothing. Raises Invalid or Overloaded, as
        :meth:`DramTier.lease` does."""
        leased = self.lease_from_dram(query)
        if leased is not None:
            return leased
        num_held = self._tiers.num_leading_stored(query.keys, query.codecs)
        with self._referenced_slots() as slots:
            room = self._reference_leading(query, num_held, slots)
            promoted = await self._promote(query.keys[len(slots) : num_held], room)
            slots += promoted
            return self._grant_lease(query, num_held, slots, len(promoted))

    def lease_from_dram(self, query: LeaseRequest) -> LeasedBlocks | None:
        """Lease as :meth:`lease` does, but return None if that would have to wait for the disk."""
        self._dram.expire(self._clock.monotonic())
        num_held = self._tiers.num_leading_stored(query.keys, query.codecs)
        if not num_held or query.max_bytes <= 0:
            self._tiers.counters.missed_blocks += len(query.keys) - num_held
            return LeasedBlocks("", "", (), num_held)
        with self._referenced_slots() as slots:
            room = self._reference_leading(query, num_held, slots)
            if room and len(slots) < num_held:
                return None
            return self._grant_lease(query, num_held, slots, 0)

    def _grant_lease(
        self, query: LeaseRequest, num_held: int, slots: Sequence[DramBlock], num_promoted: int
    ) -> LeasedBlocks:
        """Grant a lease of ``slots``, the last ``num_promoted`` of which came from the disk."""
        counts = self._tiers.counters
        counts.missed_blocks += len(query.keys) - num_held
        leased = _same_algorithm_prefix(slots)
        if not leased:
            return LeasedBlocks("", "", (), num_held)
        self._dram.tick()
        num_promoted = max(num_promoted - (len(slots) - len(leased)), 0)
        for slot in leased[: len(leased) - num_promoted]:
            self._dram.record_use(slot)
        lease_id = self._dram.leases.grant(leased, query.lease_seconds, self._clock.monotonic())
        counts.hit_blocks_dram += len(leased) - num_promoted
        counts.hit_blocks_disk += num_promoted
        blocks = tuple(
            BlockRef(s.offset, s.size_bytes, s.checksum, s.key, s.encoding.codec) for s in leased
        )
        return LeasedBlocks(lease_id, leased[0].algorithm, blocks, num_held, num_promoted)

    def release(self, lease_id: str) -> None:
        self._dram.leases.release(lease_id)

    def pin(self, keys: Sequence[BlockKey], seconds: float) -> int:
        """Pin the leading blocks, up to the first that is not in DRAM, for ``seconds``; return the
        number of pinned blocks. Raises Invalid or Overloaded, as :meth:`DramTier.pin` does."""
        now = self._clock.monotonic()
        self._dram.expire(now)
        slots: list[DramBlock] = []
        for key in keys:
            slot = self._dram.get(key)
            if slot is None:
                break
            slots.append(slot)
        if slots:
            self._dram.pins.pin(slots, seconds, now)
        return len(slots)

    async def pin_with_promotion(self, keys: Sequence[BlockKey], seconds: float) -> int:
        """Pin as :meth:`pin` does, but first read blocks that are only on the disk into DRAM, up to
        the limit for pinned bytes."""
        num_held = self._tiers.num_leading_stored(keys)
        limit = LeaseRequest(tuple(keys), seconds, int(MAX_PINNED_SHARE * self._dram.arena_bytes))
        with self._referenced_slots() as slots:
            room = self._reference_leading(limit, num_held, slots)
            if room and len(slots) < num_held:
                slots += await self._promote(keys[len(slots) : num_held], room)
            return self.pin(keys, seconds)

    @contextmanager
    def _referenced_slots(self) -> Iterator[list[DramBlock]]:
        """Yield an empty list. On exit, release one reference to each slot that the caller has
        added to the list."""
        slots: list[DramBlock] = []
        try:
            yield slots
        finally:
            self._dram.release_references(slots)

    def _reference_leading(self, query: LeaseRequest, num_held: int, slots: list[DramBlock]) -> int:
        """Reference the leading blocks that are in DRAM, and append them to ``slots``. Return the
        number of bytes that are left of ``query.max_bytes``, or 0 if the next block is larger than
        that."""
        room = query.max_bytes
        for key in query.keys[:num_held]:
            slot = self._dram.get(key)
            if slot is None:
                return room
            if slot.size_bytes > room:
                return 0
            room -= slot.size_bytes
            self._dram.add_reference(slot)
            slots.append(slot)
        return room

    async def _promote(self, keys: Sequence[BlockKey], max_bytes: int) -> list[DramBlock]:
        disk = self._tiers.disk
        if disk is None or self._num_promotions >= MAX_PROMOTIONS:
            return []
        wanted: list[DiskBlock] = []
        room = max_bytes
        for key in keys:
            block = disk.get(key)
            if block is None or block.size_bytes > room:
                break
            room -= block.size_bytes
            wanted.append(block)
        for block in wanted:
            disk.add_reference(block)  # what is demoted to make room must not take its place
        self._num_promotions += 1
        try:
            await self._make_room(wanted)
            return await self._tiers.promote([block.key for block in wanted])
        finally:
            self._num_promotions -= 1
            for block in wanted:
                disk.release_reference(block)
            self._demoter.wake_if_low()

    async def _make_room(self, blocks: Sequence[DiskBlock]) -> None:
        deadline = self._clock.monotonic() + MAX_WAIT_SECONDS
        missing = Counter(block.record.encoding.slot_bytes(block.size_bytes) for block in blocks)
        for slot_bytes, num_slots in missing.items():
            await self._demoter.make_room(slot_bytes, num_slots, deadline)


def _same_algorithm_prefix(slots: Sequence[DramBlock]) -> list[DramBlock]:
    """Return the leading blocks that have the same checksum algorithm, because a lease names only
    one algorithm."""
    for index, slot in enumerate(slots):
        if slot.algorithm != slots[0].algorithm:
            return list(slots[:index])
    return list(slots)
