"""Both tiers of a node as one: where a block is, how it gets room, how it moves."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog
import xxhash

from baton.clock import Clock
from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockKey
from baton.core.kv_transfer import CHECKSUM_XXH3
from baton.core.store import Tier
from baton.errors import BatonError, Corrupt, Overloaded, Unavailable
from baton.transport.host_memory import HostMemory
from kvstore.disk_tier import DiskBlock, DiskTier
from kvstore.dram_tier import DramBlock, DramBlockState, DramTier
from kvstore.event_log import EventLog
from kvstore.segment import BlockRecord

DISK_BACKOFF_SECONDS = 10.0
"""After a failure of the disk nothing is written to it for so long."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class StoreCounters:
    """Since the node's start; see :class:`baton.core.store.StoreStats`."""

    hit_blocks_dram: int = 0
    hit_blocks_disk: int = 0
    missed_blocks: int = 0
    put_blocks: int = 0
    put_bytes: int = 0
    demotions: int = 0
    dropped_blocks: int = 0
    promotions: int = 0
    purged_blocks: int = 0
    checksum_failures: int = 0
    disk_failures: int = 0


class TieredStore:
    """Every change of what is held goes through here, and from here to the event log. Runs in
    one event loop; only :meth:`write_out` and :meth:`read_in` wait, for the disk."""

    def __init__(
        self,
        memory: HostMemory,
        shelf: DramTier,
        disk: DiskTier | None,
        events: EventLog,
        clock: Clock,
    ) -> None:
        self.shelf = shelf
        self.disk = disk
        self.events = events
        self.counts = StoreCounters()
        self._view = memory.view
        self._clock = clock
        self._disk_rests_until = float("-inf")
        if disk is not None:
            events.append(Tier.DISK, [block.key for block in disk.blocks()])

    # -- questions -------------------------------------------------------------------------

    def tier_of(self, key: BlockKey) -> Tier:
        if self.shelf.get(key) is not None:
            return Tier.DRAM
        return Tier.DISK if self.disk is not None and key in self.disk else Tier.NONE

    def keys(self) -> dict[Tier, list[BlockKey]]:
        """Everything that is held, each key under its fastest tier."""
        dram = [slot.key for slot in self.shelf.sealed()]
        held = set(dram)
        blocks: Iterable[DiskBlock] = self.disk.blocks() if self.disk is not None else ()
        return {Tier.DRAM: dram, Tier.DISK: [b.key for b in blocks if b.key not in held]}

    def num_held(self, keys: Sequence[BlockKey]) -> int:
        """Leading keys that are held in whatever tier."""
        for count, key in enumerate(keys):
            if self.tier_of(key) is Tier.NONE:
                return count
        return len(keys)

    def is_sound(self, slot: DramBlock) -> bool:
        """Whether the bytes are what the checksum says. Reads them: not in the event loop. What
        has another algorithm's checksum is its reader's to check."""
        if slot.algorithm != CHECKSUM_XXH3:
            return True
        return bool(xxhash.xxh3_64_intdigest(self.window(slot)) == slot.checksum)

    def window(self, slot: DramBlock) -> memoryview:
        return self._view[slot.offset : slot.offset + slot.size_bytes]

    # -- room ------------------------------------------------------------------------------

    def take(self, key: BlockKey, size_bytes: int, **tags: object) -> DramBlock | None:
        """A slot to be filled, after whatever had to go at once; None when all else is held."""
        slot = self.shelf.take(key, size_bytes, **tags)
        while slot is None:
            victims = self.shelf.victims(size_bytes)
            if not victims:
                return None
            self.evict(victims)
            slot = self.shelf.take(key, size_bytes, **tags)
        return slot

    def make_quota(self, tenant: bytes, size_bytes: int) -> None:
        """Raises Overloaded when the tenant can't have so much."""
        self.evict(self.shelf.over_quota(tenant, size_bytes), for_quota=True)

    def evict(self, slots: Sequence[DramBlock], *, for_quota: bool = False) -> None:
        """Out of DRAM, whether they are on the disk or not."""
        for slot in slots:
            self.shelf.evict(slot, for_quota=for_quota)
            if self.disk is not None and slot.key not in self.disk:
                self.counts.dropped_blocks += 1
        self._note_left([slot.key for slot in slots])

    # -- a block's life --------------------------------------------------------------------

    def seal(self, slots: Sequence[DramBlock], checksums: Sequence[int], algorithm: str) -> None:
        for slot, checksum in zip(slots, checksums, strict=True):
            self.shelf.seal(slot, checksum, algorithm)
        self.events.append(Tier.DRAM, [slot.key for slot in slots])

    def drop(self, key: BlockKey) -> bool:
        """From both tiers: damaged or purged."""
        slot = self.shelf.get(key)
        if slot is not None:
            self.shelf.doom(slot)
        on_disk = self.disk is not None and self.disk.drop(key)
        if slot is not None or on_disk:
            self.events.append(Tier.NONE, [key])
            return True
        return False

    def drop_damaged(self, key: BlockKey, tier: Tier, where: str) -> None:
        """One tier's copy is not what its checksum says; the other's may do."""
        self.counts.checksum_failures += 1
        log.warning("block_damaged", key=key.hex(), tier=tier.name.lower(), where=where)
        slot = self.shelf.get(key)
        if tier is Tier.DRAM and slot is not None:
            self.shelf.doom(slot)
        elif tier is Tier.DISK and self.disk is not None:
            self.disk.drop(key)
        left = self.tier_of(key)
        self.events.append(left, [key])

    # -- between the tiers -----------------------------------------------------------------

    @property
    def can_write_out(self) -> bool:
        return self.disk is not None and self._clock.monotonic() >= self._disk_rests_until

    async def write_out(self, slots: Sequence[DramBlock]) -> int:
        """Copies held blocks to the disk where they are not yet; returns how many it wrote. What
        can't be written is left out."""
        assert self.disk is not None
        await self._grow(slots)
        pairs = []
        for slot in slots:
            if slot.state is DramBlockState.SEALED and slot.key not in self.disk:
                block = self._reserve_on_disk(slot)
                if block is not None:
                    pairs.append((slot, block))
        failed, written = None, 0
        try:
            failed, written = await run_in_thread(lambda: self._write_all(pairs))
        finally:
            for index, (slot, block) in enumerate(pairs):
                if index < written and slot.state is DramBlockState.SEALED:
                    self.disk.seal(block)
                else:
                    self.disk.discard(block)
        if failed is not None:
            self._rest(failed)
        self.counts.demotions += written
        return written

    async def read_in(self, keys: Sequence[BlockKey]) -> list[DramBlock]:
        """Promotes blocks of the disk, in order, until one can't be; held by the caller. Each
        piece waits for the disk once."""
        disk = self.disk
        assert disk is not None
        pairs: list[tuple[DiskBlock, DramBlock]] = []
        for key in keys:
            block = disk.get(key)
            if block is None or key in self.shelf:
                break
            slot = self._take_for(block)
            if slot is None:
                break
            disk.hold(block)
            disk.use(block)
            pairs.append((block, slot))
        failed: BatonError | None = None
        num_good = 0
        try:
            failed, num_good = await run_in_thread(lambda: self._read_all(pairs))
        finally:
            for _, slot in pairs[num_good:]:
                self.shelf.discard(slot)
            for block, _ in pairs:
                disk.release(block)
        good = pairs[:num_good]
        for block, slot in good:
            self.shelf.seal(slot, block.record.checksum, block.record.algorithm)
        self.events.append(Tier.DRAM, [slot.key for _, slot in good])
        self.counts.promotions += num_good
        if isinstance(failed, Corrupt):
            self.drop_damaged(pairs[num_good][0].key, Tier.DISK, "promotion")
        elif failed is not None:
            self._rest(failed)
        return [slot for _, slot in good]

    # -- parts -----------------------------------------------------------------------------

    def _read_all(
        self, pairs: Sequence[tuple[DiskBlock, DramBlock]]
    ) -> tuple[BatonError | None, int]:
        """Why it ended early, if it did, and how many are good."""
        assert self.disk is not None
        for count, (block, slot) in enumerate(pairs):
            try:
                self.disk.read(block, self.window(slot))
            except BatonError as error:
                return error, count
        return None, len(pairs)

    def _write_all(
        self, pairs: Sequence[tuple[DramBlock, DiskBlock]]
    ) -> tuple[BatonError | None, int]:
        """As :meth:`_read_all`."""
        assert self.disk is not None
        for count, (slot, block) in enumerate(pairs):
            try:
                self.disk.write(block, self.window(slot))
            except BatonError as error:
                return error, count
        return None, len(pairs)

    def _take_for(self, block: DiskBlock) -> DramBlock | None:
        try:
            self.make_quota(block.record.tenant, block.size_bytes)
        except Overloaded:
            return None
        return self.take(
            block.key,
            block.size_bytes,
            depth=block.record.depth,
            tenant=block.record.tenant,
            model=block.record.model,
            stored_at=block.record.stored_at,
        )

    async def _grow(self, slots: Sequence[DramBlock]) -> None:
        """Makes the segments that ``slots`` lack, off the event loop."""
        assert self.disk is not None
        sizes = Counter(slot.size_bytes for slot in slots if slot.key not in self.disk)
        for size_bytes, count in sizes.items():
            while (growth := self.disk.growth_for(size_bytes, count)) is not None:
                try:
                    await run_in_thread(growth.make)
                finally:
                    self.disk.adopt(growth)

    async def settle(self) -> None:
        """What has left the disk's books leaves the disk, too."""
        disk = self.disk
        if disk is not None and not disk.is_settled:
            await run_in_thread(disk.settle)

    def _reserve_on_disk(self, slot: DramBlock) -> DiskBlock | None:
        assert self.disk is not None
        record = BlockRecord(
            slot.key,
            slot.size_bytes,
            slot.checksum,
            slot.algorithm,
            slot.depth,
            slot.tenant,
            slot.model,
            slot.stored_at,
        )
        reserved = self.disk.reserve(record)
        if reserved is None:
            return None
        block, evicted = reserved
        self._note_left(evicted)
        return block

    def _note_left(self, keys: Sequence[BlockKey]) -> None:
        """They have left one tier: whoever listens is told where they are now."""
        left: dict[Tier, list[BlockKey]] = {}
        for key in keys:
            left.setdefault(self.tier_of(key), []).append(key)
        for tier, moved in left.items():
            self.events.append(tier, moved)

    def _rest(self, error: BatonError) -> None:
        self.counts.disk_failures += 1
        self._disk_rests_until = self._clock.monotonic() + DISK_BACKOFF_SECONDS
        level = log.warning if isinstance(error, Unavailable) else log.error
        level("disk_failed", error=str(error), rests_seconds=DISK_BACKOFF_SECONDS)
