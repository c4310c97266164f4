"""The store node: copies blocks from workers' KV pools into its tiers, leases them to readers."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import xxhash

from baton.clock import Clock
from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockKey, Incarnation
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef, Endpoint
from baton.core.store import (
    BlockFilter,
    LeasedBlocks,
    LeaseRequest,
    PutRequest,
    PutResult,
    StoreChange,
    StoredBlock,
    StoreStats,
    Tier,
    WatchEvent,
)
from baton.errors import Corrupt, Invalid, Overloaded
from baton.transport.base import Peer, TransferRange, Transport
from baton.transport.host_memory import HostMemory
from baton.transport.reads import TransferFailed, read_and_verify
from baton.transport.selection import choose_transport
from baton.transport.unfinished_transfers import UnfinishedTransfers
from kvstore.demoter import Demoter
from kvstore.disk_tier import DiskTier
from kvstore.dram_tier import MAX_PINNED_SHARE, DramBlock, DramTier
from kvstore.event_log import EventLog
from kvstore.segment import BlockRecord
from kvstore.tiered_store import TieredStore

MAX_PUTS = 16
"""Concurrent puts; a further one is rejected."""

MAX_PEERS = 4096
"""Workers whose connections are kept; beyond it, the oldest connection is dropped."""

MAX_PROMOTIONS = 4
"""Leases that may wait for the disk concurrently; a further one gets only the blocks in DRAM."""

READ_TIMEOUT_SECONDS = 5.0
PAGE_KEYS = 4096
"""Keys per page of a snapshot; a watcher takes a few milliseconds to apply one."""


@dataclass(slots=True)
class _PutInProgress:
    """The state of a put: ``present`` are blocks that are in DRAM already, referenced by the put;
    ``incoming`` are those to be read into newly allocated slots."""

    present: list[DramBlock]
    incoming: list[tuple[BlockRef, DramBlock]]
    num_present: int = 0


class StoreNode:
    """Implements :class:`baton.rpc.kvstore_service.KvStoreCore`. Runs in one event loop."""

    def __init__(
        self,
        generation: Incarnation,
        memory: HostMemory,
        transports: dict[str, Transport],
        host: str,
        clock: Clock,
        dram: DramTier,
        disk: DiskTier | None = None,
    ) -> None:
        self._generation = generation
        self._memory = memory
        self._transports = transports
        self._host = host
        self._clock = clock
        self._dram = dram
        self.events = EventLog()
        self._tiers = TieredStore(memory, dram, disk, self.events, clock)
        self.demoter = Demoter(self._tiers)
        self._unfinished_transfers = UnfinishedTransfers()
        self._peers: dict[str, Peer] = {}
        self._num_puts = 0
        self._num_promotions = 0

    def endpoint_for(self, transports: Sequence[str], host: str) -> Endpoint:
        name = choose_transport(tuple(self._transports), transports, host == self._host)
        return self._transports[name].export()

    # -- put -------------------------------------------------------------------------------

    async def put(self, request: PutRequest) -> PutResult:
        """Store blocks by reading them from the caller. Blocks that don't fit are left out from the
        end, since a shorter prefix is useful too. Raises Overloaded when nothing fits, Corrupt when
        a checksum doesn't match (the blocks before it are kept), Unavailable when reading from the
        caller fails."""
        if self._num_puts >= MAX_PUTS:
            raise Overloaded(f"{MAX_PUTS} puts are running", retry_after_seconds=0.2)
        transport = self._transports.get(request.source.transport)
        if transport is None:
            raise Invalid(f"this node has no transport {request.source.transport!r}")
        if request.blocks:
            self._dram.check_block_size(request.blocks[0].size_bytes)
        self._num_puts += 1
        self.sweep()
        try:
            return await self._put(request, transport)
        finally:
            self._num_puts -= 1
            self.demoter.wake_if_low()

    async def _put(self, request: PutRequest, transport: Transport) -> PutResult:
        self._dram.tick()
        put = _PutInProgress([], [])
        num_good = 0
        new_slots: list[DramBlock] = []
        try:
            self._reserve(request, put)
            new_slots = [slot for _, slot in put.incoming]
            if new_slots:
                num_good = await self._read_blocks(transport, request, put.incoming)
            bad = put.incoming[num_good:]
        except TransferFailed as error:
            self._peers.pop(request.source.owner, None)
            if error.unfinished_transfers:
                # The slots stay allocated until the reads that may still write to them have ended.
                self._unfinished_transfers.add(
                    transport, error.unfinished_transfers, lambda: self._discard(new_slots)
                )
                put.incoming.clear()
            raise
        finally:
            self._discard([slot for _, slot in put.incoming[num_good:]])
            self._dram.release_references(sorted([*put.present, *new_slots[:num_good]], key=_depth))
        if bad:
            self._tiers.counters.checksum_failures += len(bad)
            raise Corrupt(f"{len(bad)} blocks do not match their checksums, and were not stored")
        return PutResult(num_good, put.num_present)

    def _reserve(self, request: PutRequest, put: _PutInProgress) -> None:
        """Reference the blocks that are in DRAM, and allocate slots for those that are in no tier,
        as far as they fit. A put's references keep it from evicting its own blocks."""
        now = self._clock.wall_nanoseconds() / 1e9
        for key in request.preceding_keys:
            self._reference_present(key, put)
        for index, block in enumerate(request.blocks):
            if self._reference_present(block.key, put) or block.key in self._dram:
                put.num_present += 1
            elif not self._allocate(request, block, index, now, put):
                return

    def _reference_present(self, key: BlockKey, put: _PutInProgress) -> bool:
        """Reference the block if it is in DRAM; return whether it is in any tier."""
        slot = self._dram.get(key)
        if slot is not None:
            self._dram.record_use(slot)
            self._dram.add_reference(slot)
            put.present.append(slot)
            return True
        disk = self._tiers.disk
        block = disk.get(key) if disk is not None else None
        if disk is None or block is None:
            return False
        disk.record_use(block)
        return True

    def _allocate(
        self, request: PutRequest, block: BlockRef, index: int, now: float, put: _PutInProgress
    ) -> bool:
        """Allocate a slot for a block; return whether that succeeded. Raises Overloaded if no block
        of the put could be stored."""
        try:
            self._tiers.evict_over_quota(request.tenant, block.size_bytes)
            slot = self._tiers.allocate(
                block.key,
                block.size_bytes,
                depth=request.first_block + index,
                tenant=request.tenant,
                model=request.model,
                stored_at=now,
            )
            if slot is None:
                raise Overloaded("every block of the store is leased or being written")
        except Overloaded:
            if put.incoming or put.num_present:
                return False
            raise
        put.incoming.append((block, slot))
        return True

    async def _read_blocks(
        self, transport: Transport, request: PutRequest, pairs: Sequence[tuple[BlockRef, DramBlock]]
    ) -> int:
        """Read, verify and seal blocks. Returns how many leading blocks are good."""
        peer = await self._connect(transport, request.source)
        spans = [
            TransferRange(block.offset_bytes, slot.offset, slot.size_bytes) for block, slot in pairs
        ]

        def check(first: int, last: int) -> list[bool]:
            return [self._matches_checksum(request, *pair) for pair in pairs[first:last]]

        read = await read_and_verify(
            transport, peer, spans, check, READ_TIMEOUT_SECONDS, self._clock
        )
        good = pairs[: read.num_verified]
        checksums = [block.checksum for block, _ in good]
        self._tiers.seal([slot for _, slot in good], checksums, request.checksum_algorithm)
        self._tiers.counters.put_blocks += len(good)
        self._tiers.counters.put_bytes += sum(slot.size_bytes for _, slot in good)
        return len(good)

    async def _connect(self, transport: Transport, source: Endpoint) -> Peer:
        """Return the connection to a worker; connecting may take long, so connections are kept."""
        known = self._peers.get(source.owner)
        if known is None or known.endpoint != source:
            known = await run_in_thread(lambda: transport.connect(source))
            self._peers[source.owner] = known
            if len(self._peers) > MAX_PEERS:
                self._peers.pop(next(iter(self._peers)))
        return known

    def _matches_checksum(self, request: PutRequest, block: BlockRef, slot: DramBlock) -> bool:
        if request.checksum_algorithm != CHECKSUM_XXH3:
            return True  # computed on a GPU: the reader verifies it
        return bool(xxhash.xxh3_64_intdigest(self._tiers.slot_view(slot)) == block.checksum)

    def _discard(self, slots: Sequence[DramBlock]) -> None:
        for slot in slots:
            self._dram.discard(slot)

    # -- lease -----------------------------------------------------------------------------

    async def lease(self, query: LeaseRequest) -> LeasedBlocks:
        """Lease the leading blocks, reading them from the disk if necessary. With ``max_bytes`` 0,
        only count the blocks and lease nothing. Raises Invalid, Overloaded."""
        leased = self.lease_from_dram(query)
        if leased is not None:
            return leased
        num_held = self._tiers.num_leading_stored(query.keys)
        with self._referenced_slots() as slots:
            room = self._reference_leading(query, num_held, slots)
            promoted = await self._promote(query.keys[len(slots) : num_held], room)
            slots += promoted
            return self._grant_lease(query, num_held, slots, len(promoted))

    def lease_from_dram(self, query: LeaseRequest) -> LeasedBlocks | None:
        """Like :meth:`lease` if all blocks are in DRAM; None if it would have to wait for the
        disk."""
        self._dram.expire(self._clock.monotonic())
        num_held = self._tiers.num_leading_stored(query.keys)
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
        lease_id = self._dram.lease(leased, query.lease_seconds, self._clock.monotonic())
        counts.hit_blocks_dram += len(leased) - num_promoted
        counts.hit_blocks_disk += num_promoted
        blocks = tuple(BlockRef(s.offset, s.size_bytes, s.checksum, s.key) for s in leased)
        return LeasedBlocks(lease_id, leased[0].algorithm, blocks, num_held, num_promoted)

    def release(self, lease_id: str) -> None:
        self._dram.release(lease_id)

    def pin(self, keys: Sequence[BlockKey], seconds: float) -> int:
        """Pin the leading blocks that are in DRAM for ``seconds``; return how many. Raises Invalid,
        Overloaded."""
        now = self._clock.monotonic()
        self._dram.expire(now)
        slots: list[DramBlock] = []
        for key in keys:
            slot = self._dram.get(key)
            if slot is None:
                break
            slots.append(slot)
        if slots:
            self._dram.pin(slots, seconds, now)
        return len(slots)

    async def pin_with_promotion(self, keys: Sequence[BlockKey], seconds: float) -> int:
        """Like :meth:`pin`, but first read blocks that are only on the disk into DRAM, up to the
        limit for pinned bytes. Raises Invalid, Overloaded."""
        num_held = self._tiers.num_leading_stored(keys)
        limit = LeaseRequest(tuple(keys), seconds, int(MAX_PINNED_SHARE * self._dram.arena_bytes))
        with self._referenced_slots() as slots:
            room = self._reference_leading(limit, num_held, slots)
            if room and len(slots) < num_held:
                slots += await self._promote(keys[len(slots) : num_held], room)
            return self.pin(keys, seconds)

    @contextmanager
    def _referenced_slots(self) -> Iterator[list[DramBlock]]:
        """Yield an empty list; on exit, release one reference to each slot that was added to it."""
        slots: list[DramBlock] = []
        try:
            yield slots
        finally:
            self._dram.release_references(slots)

    def _reference_leading(self, query: LeaseRequest, num_held: int, slots: list[DramBlock]) -> int:
        """Reference the leading blocks that are in DRAM, and append them to ``slots``. Returns the
        bytes that are left of ``max_bytes``; 0 if the next block does not fit."""
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
        wanted, room = [], max_bytes
        for key in keys:
            block = disk.get(key)
            if block is None or block.size_bytes > room:
                break
            room -= block.size_bytes
            wanted.append(key)
        self._num_promotions += 1
        try:
            return await self._tiers.promote(wanted)
        finally:
            self._num_promotions -= 1
            self.demoter.wake_if_low()

    async def report_damaged(self, keys: Sequence[BlockKey]) -> int:
        """Handle a reader's report of damaged blocks: verify them and drop those that are damaged.
        Returns how many were."""
        num_damaged = 0
        for key in keys:
            slot = self._dram.get(key)
            if slot is None:
                continue
            self._dram.add_reference(slot)
            try:
                intact = await run_in_thread(partial(self._tiers.matches_checksum, slot))
            finally:
                self._dram.release_references([slot])
            if not intact and self._dram.get(key) is slot:
                self._tiers.drop_damaged(key, Tier.DRAM, "reported by a reader")
                num_damaged += 1
        return num_damaged

    # -- watchers --------------------------------------------------------------------------

    async def watch(self, generation: Incarnation, number: int) -> AsyncGenerator[WatchEvent]:
        """Yield a snapshot of the stored keys, then every change. A watcher that has everything up
        to change ``number`` of this ``generation`` gets only the changes after it."""
        known = generation == self._generation and self.events.changes_after(number) is not None
        while True:
            if not known:
                number = self.events.last_number
                for page in self._snapshot(number):
                    yield page
            for change in self.events.changes_after(number) or ():
                number = change.number
                yield self._change_event(change)
            await self.events.wait_for_change(number)
            known = self.events.changes_after(number) is not None

    def _snapshot(self, number: int) -> list[WatchEvent]:
        """Return all stored keys as of change ``number``, in pages."""
        pages = [
            WatchEvent(self._generation, number, tier, tuple(keys[start : start + PAGE_KEYS]))
            for tier, keys in self._tiers.keys().items()
            for start in range(0, len(keys), PAGE_KEYS)
        ]
        pages = pages or [WatchEvent(self._generation, number, Tier.NONE, ())]
        last = len(pages) - 1
        return [page.with_page_flags(reset=i == 0, more=i < last) for i, page in enumerate(pages)]

    def _change_event(self, change: StoreChange) -> WatchEvent:
        return WatchEvent(self._generation, change.number, change.tier, change.keys)

    # -- administration --------------------------------------------------------------------

    def stats(self, *, check: bool = True) -> StoreStats:
        """Return the counters. With ``check``, also check the integrity, which visits every
        block."""
        dram, disk = self._dram, self._tiers.disk
        dram.expire(self._clock.monotonic())
        return StoreStats(
            arena_bytes=dram.arena_bytes,
            used_bytes=dram.used_bytes,
            num_blocks=dram.num_blocks,
            leased_blocks=dram.num_leased,
            pinned_bytes=dram.pinned_bytes,
            disk_capacity_bytes=disk.size_bytes if disk is not None else 0,
            disk_used_bytes=disk.used_bytes if disk is not None else 0,
            disk_blocks=disk.num_blocks if disk is not None else 0,
            evictions=dram.evictions,
            quota_evictions=dram.quota_evictions,
            disk_evictions=disk.evictions if disk is not None else 0,
            violation=self._integrity_error() if check else "",
            **asdict(self._tiers.counters),
        )

    def list_blocks(
        self, filter_: BlockFilter, skip: int, limit: int
    ) -> tuple[list[StoredBlock], int]:
        """Return a page of the matching blocks, oldest first, and their total number."""
        found = sorted(self._matching(filter_), key=lambda block: (block.stored_at, block.depth))
        return found[skip : skip + limit], len(found)

    async def purge(self, filter_: BlockFilter) -> int:
        """Delete the matching blocks from both tiers; return how many. A block that is being read
        is freed when the read ends."""
        keys = {block.key for block in self._matching(filter_)}
        purged = sum(self._tiers.drop(key) for key in keys)
        self._tiers.counters.purged_blocks += purged
        await self._tiers.flush()
        return purged

    async def flush(self) -> None:
        """Apply the changes to the disk that were deferred to keep them off the request path."""
        await self._tiers.flush()

    def sweep(self) -> None:
        """Free the slots of unfinished transfers that have ended, and expire leases."""
        self._unfinished_transfers.sweep()
        self._dram.expire(self._clock.monotonic())

    def keys(self) -> dict[Tier, list[BlockKey]]:
        return self._tiers.keys()

    def _matching(self, filter_: BlockFilter) -> Iterator[StoredBlock]:
        """Yield the matching blocks; a block in both tiers counts as in DRAM."""
        for slot in self._dram.sealed():
            if filter_.matches(slot.tenant, slot.model, slot.stored_at):
                yield _stored(slot, Tier.DRAM, slot.num_references)
        for block in self._tiers.disk.blocks() if self._tiers.disk is not None else ():
            record, in_dram = block.record, self._dram.get(block.key) is not None
            if not in_dram and filter_.matches(record.tenant, record.model, record.stored_at):
                yield _stored(record, Tier.DISK, 0)

    def _integrity_error(self) -> str:
        try:
            self._dram.check_integrity()
            if self._tiers.disk is not None:
                self._tiers.disk.check_integrity()
        except AssertionError as error:
            return str(error) or "integrity violated"
        return ""


def _depth(slot: DramBlock) -> int:
    return slot.depth


def _same_algorithm_prefix(slots: Sequence[DramBlock]) -> list[DramBlock]:
    """Return the leading blocks that have the same checksum algorithm: a lease names only one."""
    for index, slot in enumerate(slots):
        if slot.algorithm != slots[0].algorithm:
            return list(slots[:index])
    return list(slots)


def _stored(block: DramBlock | BlockRecord, tier: Tier, num_leases: int) -> StoredBlock:
    return StoredBlock(
        block.key,
        tier,
        block.size_bytes,
        block.depth,
        block.tenant,
        block.model,
        block.stored_at,
        num_leases,
    )
