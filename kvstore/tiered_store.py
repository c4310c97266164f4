"""Combines the two tiers of a store node into one store, with lookup, allocation, demotion and
promotion."""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto

import structlog

from baton.clock import Clock
from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockKey
from baton.core.kv_codec import KvCodecName
from baton.core.store import ALL_CODECS, Tier
from baton.errors import BatonError, Corrupt, Overloaded, Unavailable
from baton.kv.event_log import EventLog
from baton.transport.host_memory import HostMemory
from kvstore.block_encoding import BlockEncoding
from kvstore.checksum import block_checksum
from kvstore.disk_encoder import DiskEncoder, DiskForm
from kvstore.disk_tier import DiskBlock, DiskTier
from kvstore.dram_block import DramBlock, DramBlockState
from kvstore.dram_tier import DramTier
from kvstore.segment import BlockRecord
from kvstore.stored_codecs import StoredCodecs

DISK_BACKOFF_SECONDS = 10.0
"""After a disk failure, nothing is written to the disk for this long."""

log = structlog.get_logger(__name__)


class Damage(Enum):
    """The damage of a block: its bytes have changed since it was put, or they are those that were
    put, but no valid encoding."""

    CHECKSUM = auto()
    ENCODING = auto()


@dataclass(slots=True)
class StoreCounters:
    """Counters since the node's start; see :class:`baton.core.store.StoreStats`."""

    hit_blocks_dram: int = 0
    hit_blocks_disk: int = 0
    missed_blocks: int = 0
    put_blocks: int = 0
    put_bytes: int = 0
    demotions: int = 0
    encoded_demotions: int = 0
    dropped_blocks: int = 0
    promotions: int = 0
    purged_blocks: int = 0
    checksum_failures: int = 0
    disk_failures: int = 0


class TieredStore:
    """The DRAM and SSD tiers. All changes of the store's contents go through this class, which
    appends them to the event log. All methods run in one event loop; only :meth:`demote`,
    :meth:`promote` and :meth:`flush` wait for the disk."""

    def __init__(
        self,
        memory: HostMemory,
        dram: DramTier,
        disk: DiskTier | None,
        events: EventLog,
        clock: Clock,
        disk_encoder: DiskEncoder | None = None,
        codecs: StoredCodecs | None = None,
    ) -> None:
        self.dram = dram
        self.disk = disk
        self.events = events
        self.counters = StoreCounters()
        self._view = memory.view
        self._disk_encoder = disk_encoder
        self._codecs = codecs
        self._clock = clock
        self._disk_backoff_until = float("-inf")
        if disk is not None:
            events.append(Tier.DISK, [block.key for block in disk.blocks()])

    # -- lookup ----------------------------------------------------------------------------

    def tier_of(self, key: BlockKey) -> Tier:
        if self.dram.get(key) is not None:
            return Tier.DRAM
        return Tier.DISK if self.disk is not None and key in self.disk else Tier.NONE

    def keys(self) -> dict[Tier, list[BlockKey]]:
        """Return all stored keys, each under its fastest tier."""
        dram = [slot.key for slot in self.dram.sealed()]
        in_dram = set(dram)
        blocks: Iterable[DiskBlock] = self.disk.blocks() if self.disk is not None else ()
        return {Tier.DRAM: dram, Tier.DISK: [b.key for b in blocks if b.key not in in_dram]}

    def num_leading_stored(
        self, keys: Sequence[BlockKey], codecs: Set[KvCodecName] = ALL_CODECS
    ) -> int:
        """Return the number of keys before the first key that is in neither tier, or whose block is
        in a codec that is not in ``codecs``."""
        for count, key in enumerate(keys):
            encoding = self._encoding_of(key)
            if encoding is None or encoding.codec not in codecs:
                return count
        return len(keys)

    def _encoding_of(self, key: BlockKey) -> BlockEncoding | None:
        """Return the encoding of a block in its fastest tier; None if it is in neither."""
        slot = self.dram.get(key)
        if slot is not None:
            return slot.encoding
        block = self.disk.get(key) if self.disk is not None else None
        return block.record.encoding if block is not None else None

    def find_damage(self, slot: DramBlock) -> Damage | None:
        """Return what is wrong with a block in DRAM, None if nothing is. This reads or decodes the
        block, so don't call it in the event loop. Checksums by algorithms that the node doesn't
        know are verified by the reader, and count as right here."""
        data = self.slot_view(slot)
        checksum = block_checksum(slot.algorithm, data)
        if checksum is not None and checksum != slot.checksum:
            return Damage.CHECKSUM
        if self._codecs is not None and self._codecs.is_invalid(slot.encoding, data):
            return Damage.ENCODING
        return None

    def slot_view(self, slot: DramBlock) -> memoryview:
        return self._view[slot.offset : slot.offset + slot.size_bytes]

    # -- allocation and eviction -----------------------------------------------------------

    def allocate(
        self,
        key: BlockKey,
        size_bytes: int,
        encoding: BlockEncoding,
        tenant: bytes,
        **tags: object,
    ) -> DramBlock | None:
        """Allocate a slot to be filled, evicting blocks if necessary: first the tenant's own blocks
        if it would exceed its quota. Return None if too many blocks are referenced. Raises
        Overloaded if the quota is used up by referenced blocks."""
        slot_bytes = encoding.slot_bytes(size_bytes)
        self.evict(self.dram.victims_over_quota(tenant, slot_bytes), for_quota=True)
        tags["tenant"] = tenant
        slot = self.dram.allocate(key, size_bytes, encoding, **tags)
        while slot is None:
            victims = self.dram.select_victims(slot_bytes)
            if not victims:
                return None
            self.evict(victims)
            slot = self.dram.allocate(key, size_bytes, encoding, **tags)
        return slot

    def evict(self, slots: Sequence[DramBlock], *, for_quota: bool = False) -> None:
        """Evict blocks from DRAM, whether they are also on the disk or not."""
        for slot in slots:
            self.dram.evict(slot, for_quota=for_quota)
            if self.disk is not None and slot.key not in self.disk:
                self.counters.dropped_blocks += 1
        self._log_tier_changes([slot.key for slot in slots])

    # -- block states ----------------------------------------------------------------------

    def seal(self, slots: Sequence[DramBlock], checksums: Sequence[int], algorithm: str) -> None:
        for slot, checksum in zip(slots, checksums, strict=True):
            self.dram.seal(slot, checksum, algorithm)
        self.events.append(Tier.DRAM, [slot.key for slot in slots])

    def drop(self, key: BlockKey) -> bool:
        """Remove a block from both tiers. Return whether it was in at least one of them."""
        slot = self.dram.get(key)
        if slot is not None:
            self.dram.doom(slot)
        on_disk = self.disk is not None and self.disk.drop(key)
        if slot is not None or on_disk:
            self.events.append(Tier.NONE, [key])
            return True
        return False

    def drop_damaged(self, key: BlockKey, tier: Tier, found_by: str) -> None:
        """Remove one tier's damaged copy of a block; the other tier's copy may be intact.
        ``found_by`` says what found the damage, and is only logged."""
        self.counters.checksum_failures += 1
        log.warning("block_damaged", key=key.hex(), tier=tier.name.lower(), found_by=found_by)
        slot = self.dram.get(key)
        if tier is Tier.DRAM and slot is not None:
            self.dram.doom(slot)
        elif tier is Tier.DISK and self.disk is not None:
            self.disk.drop(key)
        remaining = self.tier_of(key)
        self.events.append(remaining, [key])

    def drop_reported(self, slot: DramBlock, damage: Damage) -> None:
        """Remove a block in DRAM that a reader has reported. If its bytes were put like that, so
        that a copy on the disk has them, too, the copy is removed as well."""
        self.drop_damaged(slot.key, Tier.DRAM, "reader")
        copy = self.disk.get(slot.key) if self.disk is not None else None
        if damage is Damage.ENCODING and copy is not None:
            record = copy.record
            if (record.encoding, record.checksum) == (slot.encoding, slot.checksum):
                self.drop_damaged(slot.key, Tier.DISK, "reader")

    # -- between the tiers -----------------------------------------------------------------

    @property
    def can_demote(self) -> bool:
        return self.disk is not None and self._clock.monotonic() >= self._disk_backoff_until

    async def demote(self, slots: Sequence[DramBlock]) -> int:
        """Copy blocks, to which the caller holds references, to the disk unless they are there
        already, and return how many were written. Blocks for which the disk has no space are left
        out. If a write fails, the blocks after it are left out, too."""
        assert self.disk is not None
        missing = [slot for slot in slots if self._is_only_in_dram(slot)]
        forms = await self._encode_all(missing)
        records = [
            (slot, _record_of(slot, form), form)
            for slot, form in zip(missing, forms, strict=True)
            if form is not None
        ]
        await self._add_segments([record for _, record, _ in records])
        reserved = []
        for slot, record, form in records:
            if self._is_only_in_dram(slot):
                block = self._reserve_on_disk(record)
                if block is not None:
                    reserved.append((slot, block, form.data))
        failed, written = None, 0
        try:
            failed, written = await run_in_thread(
                lambda: self._write_all([(block, data) for _, block, data in reserved])
            )
        finally:
            for index, (slot, block, _) in enumerate(reserved):
                if index < written and slot.state is DramBlockState.SEALED:
                    self.disk.seal(block)
                else:
                    self.disk.discard(block)
        if failed is not None:
            self._back_off_disk(failed)
        self.counters.demotions += written
        self.counters.encoded_demotions += sum(
            block.record.encoding.codec is not slot.encoding.codec
            for slot, block, _ in reserved[:written]
        )
        return written

    def _is_only_in_dram(self, slot: DramBlock) -> bool:
        assert self.disk is not None
        return slot.state is DramBlockState.SEALED and slot.key not in self.disk

    async def _encode_all(self, slots: Sequence[DramBlock]) -> list[DiskForm | None]:
        """Return the forms in which to write blocks to the disk. A block that turns out to be
        damaged is dropped, and its form is None."""
        encoder = self._disk_encoder
        if encoder is None:
            return [DiskForm(self.slot_view(s), s.encoding, s.checksum) for s in slots]
        forms = await run_in_thread(lambda: [self._try_encode(encoder, slot) for slot in slots])
        for slot, form in zip(slots, forms, strict=True):
            if form is None and self.dram.get(slot.key) is slot:
                self.drop_damaged(slot.key, Tier.DRAM, "demotion")
        return forms

    def _try_encode(self, encoder: DiskEncoder, slot: DramBlock) -> DiskForm | None:
        try:
            return encoder.encode(slot, self.slot_view(slot))
        except Corrupt:
            return None

    async def promote(self, keys: Sequence[BlockKey]) -> list[DramBlock]:
        """Read blocks from the disk into DRAM, in order, until one fails. The caller gets one
        reference to each block that was read. All reads run in one thread, one after the other."""
        disk = self.disk
        assert disk is not None
        pairs: list[tuple[DiskBlock, DramBlock]] = []
        for key in keys:
            block = disk.get(key)
            if block is None or key in self.dram:
                break
            slot = self._allocate_for(block)
            if slot is None:
                break
            disk.add_reference(block)
            disk.record_use(block)
            pairs.append((block, slot))
        failed: BatonError | None = None
        num_good = 0
        try:
            failed, num_good = await run_in_thread(lambda: self._read_all(pairs))
        finally:
            for _, slot in pairs[num_good:]:
                self.dram.discard(slot)
            for block, _ in pairs:
                disk.release_reference(block)
        good = pairs[:num_good]
        for block, slot in good:
            self.dram.seal(slot, block.record.checksum, block.record.algorithm)
        self.events.append(Tier.DRAM, [slot.key for _, slot in good])
        self.counters.promotions += num_good
        if isinstance(failed, Corrupt):
            self.drop_damaged(pairs[num_good][0].key, Tier.DISK, "promotion")
        elif failed is not None:
            self._back_off_disk(failed)
        return [slot for _, slot in good]

    # -- parts -----------------------------------------------------------------------------

    def _read_all(
        self, pairs: Sequence[tuple[DiskBlock, DramBlock]]
    ) -> tuple[BatonError | None, int]:
        """Read blocks in order until one fails. Return the error, or None if all were read, and the
        number of blocks that were read."""
        assert self.disk is not None
        for count, (block, slot) in enumerate(pairs):
            try:
                self.disk.read(block, self.slot_view(slot))
            except BatonError as error:
                return error, count
        return None, len(pairs)

    def _write_all(
        self, pairs: Sequence[tuple[DiskBlock, memoryview]]
    ) -> tuple[BatonError | None, int]:
        """Write blocks in order until one fails. Return the error, or None if all were written, and
        the number of blocks that were written."""
        assert self.disk is not None
        for count, (block, data) in enumerate(pairs):
            try:
                self.disk.write(block, data)
            except BatonError as error:
                return error, count
        return None, len(pairs)

    def _allocate_for(self, block: DiskBlock) -> DramBlock | None:
        try:
            return self.allocate(
                block.key,
                block.size_bytes,
                block.record.encoding,
                block.record.tenant,
                depth=block.record.depth,
                model=block.record.model,
                stored_at=block.record.stored_at,
            )
        except Overloaded:
            return None

    async def _add_segments(self, records: Sequence[BlockRecord]) -> None:
        """In a thread, create the disk segments that are missing to store ``records``."""
        assert self.disk is not None
        sizes = Counter(record.slot_bytes for record in records)
        for slot_bytes, count in sizes.items():
            while (growth := self.disk.plan_segment(slot_bytes, count)) is not None:
                try:
                    await run_in_thread(growth.create_file)
                finally:
                    self.disk.add_segment(growth)

    async def flush(self) -> None:
        """In a thread, erase the records of removed blocks from the disk."""
        disk = self.disk
        if disk is not None and not disk.is_flushed:
            await run_in_thread(disk.flush)

    def _reserve_on_disk(self, record: BlockRecord) -> DiskBlock | None:
        assert self.disk is not None
        reserved = self.disk.reserve(record)
        if reserved is None:
            return None
        block, evicted = reserved
        self._log_tier_changes(evicted)
        return block

    def _log_tier_changes(self, keys: Sequence[BlockKey]) -> None:
        """Append to the event log in which tier, if any, the blocks ``keys`` are now. They were
        just removed from one tier."""
        by_tier: dict[Tier, list[BlockKey]] = {}
        for key in keys:
            by_tier.setdefault(self.tier_of(key), []).append(key)
        for tier, tier_keys in by_tier.items():
            self.events.append(tier, tier_keys)

    def _back_off_disk(self, error: BatonError) -> None:
        self.counters.disk_failures += 1
        self._disk_backoff_until = self._clock.monotonic() + DISK_BACKOFF_SECONDS
        level = log.warning if isinstance(error, Unavailable) else log.error
        level("disk_failed", error=str(error), pause_seconds=DISK_BACKOFF_SECONDS)


def _record_of(slot: DramBlock, form: DiskForm) -> BlockRecord:
    """Return the record of a block in DRAM that is written to the disk in the form ``form``."""
    return BlockRecord(
        slot.key,
        len(form.data),
        form.checksum,
        slot.algorithm,
        slot.depth,
        slot.tenant,
        slot.model,
        slot.stored_at,
        form.encoding,
    )
