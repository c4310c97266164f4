"""The store node: reads blocks out of workers' pools into its tiers, and lends them out."""

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
"""Reads from workers at a time; a further put is refused."""

MAX_PEERS = 4096
"""Workers whose connections are at hand; further ones are looked up."""

MAX_PROMOTIONS = 4
"""Leases that wait for the disk at a time; a further one gets what is in DRAM."""

READ_TIMEOUT_SECONDS = 5.0
PAGE_KEYS = 4096
"""Of a snapshot; a watcher takes a few milliseconds for each."""


@dataclass(slots=True)
class _PutInProgress:
    """A put under way: what is there already, held, and what comes in."""

    present: list[DramBlock]
    coming: list[tuple[BlockRef, DramBlock]]
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
        shelf: DramTier,
        disk: DiskTier | None = None,
    ) -> None:
        self._generation = generation
        self._memory = memory
        self._transports = transports
        self._host = host
        self._clock = clock
        self._shelf = shelf
        self.events = EventLog()
        self._tiers = TieredStore(memory, shelf, disk, self.events, clock)
        self.demotion = Demoter(self._tiers)
        self._strays = UnfinishedTransfers()
        self._peers: dict[str, Peer] = {}
        self._num_puts = 0
        self._num_promotions = 0

    def endpoint_for(self, transports: Sequence[str], host: str) -> Endpoint:
        name = choose_transport(tuple(self._transports), transports, host == self._host)
        return self._transports[name].export()

    # -- put -------------------------------------------------------------------------------

    async def put(self, request: PutRequest) -> PutResult:
        """What there is no room for is left out, from the end: a prefix is worth having alone.
        Raises Overloaded when there is room for nothing, Corrupt when a checksum doesn't match
        (the blocks before it are kept), Unavailable when the caller can't be read."""
        if self._num_puts >= MAX_PUTS:
            raise Overloaded(f"{MAX_PUTS} puts are running", retry_after_seconds=0.2)
        transport = self._transports.get(request.source.transport)
        if transport is None:
            raise Invalid(f"this node has no transport {request.source.transport!r}")
        if request.blocks:
            self._shelf.check_size(request.blocks[0].size_bytes)
        self._num_puts += 1
        self.sweep()
        try:
            return await self._put(request, transport)
        finally:
            self._num_puts -= 1
            self.demotion.notice()

    async def _put(self, request: PutRequest, transport: Transport) -> PutResult:
        self._shelf.tick()
        filling = _PutInProgress([], [])
        num_good = 0
        held: list[DramBlock] = []
        try:
            self._reserve(request, filling)
            held = [slot for _, slot in filling.coming]
            if held:
                num_good = await self._fill(transport, request, filling.coming)
            bad = filling.coming[num_good:]
        except TransferFailed as error:
            self._peers.pop(request.source.owner, None)
            if error.strays:
                # Nobody gets the slots before the reads that may still write to them have ended.
                self._strays.keep(transport, error.strays, lambda: self._discard(held))
                filling.coming.clear()
            raise
        finally:
            self._discard([slot for _, slot in filling.coming[num_good:]])
            self._shelf.let_go(sorted([*filling.present, *held[:num_good]], key=_depth))
        if bad:
            self._tiers.counts.checksum_failures += len(bad)
            raise Corrupt(f"{len(bad)} blocks are not what was announced, and were not kept")
        return PutResult(num_good, filling.num_present)

    def _reserve(self, request: PutRequest, filling: _PutInProgress) -> None:
        """Holds what is here, and takes slots for what isn't, as far as there is room: what a
        put holds can't go for its own sake."""
        now = self._clock.wall_nanoseconds() / 1e9
        for key in request.head:
            self._hold_present(key, filling)
        for index, block in enumerate(request.blocks):
            if self._hold_present(block.key, filling) or block.key in self._shelf:
                filling.num_present += 1
            elif not self._take(request, block, index, now, filling):
                return

    def _hold_present(self, key: BlockKey, filling: _PutInProgress) -> bool:
        slot = self._shelf.get(key)
        if slot is not None:
            self._shelf.use(slot)
            self._shelf.hold(slot)
            filling.present.append(slot)
            return True
        disk = self._tiers.disk
        block = disk.get(key) if disk is not None else None
        if disk is None or block is None:
            return False
        disk.use(block)
        return True

    def _take(
        self, request: PutRequest, block: BlockRef, index: int, now: float, filling: _PutInProgress
    ) -> bool:
        """Raises Overloaded when the put can't have anything at all."""
        try:
            self._tiers.make_quota(request.tenant, block.size_bytes)
            slot = self._tiers.take(
                block.key,
                block.size_bytes,
                depth=request.first_block + index,
                tenant=request.tenant,
                model=request.model,
                stored_at=now,
            )
            if slot is None:
                raise Overloaded("every block of the store is leased or being filled")
        except Overloaded:
            if filling.coming or filling.num_present:
                return False
            raise
        filling.coming.append((block, slot))
        return True

    async def _fill(
        self, transport: Transport, request: PutRequest, pairs: Sequence[tuple[BlockRef, DramBlock]]
    ) -> int:
        """Reads, verifies and seals; how many leading blocks are good."""
        peer = await self._connected(transport, request.source)
        spans = [
            TransferRange(block.offset_bytes, slot.offset, slot.size_bytes) for block, slot in pairs
        ]

        def check(first: int, last: int) -> list[bool]:
            return [self._is_announced(request, *pair) for pair in pairs[first:last]]

        read = await read_and_verify(
            transport, peer, spans, check, READ_TIMEOUT_SECONDS, self._clock
        )
        good = pairs[: read.num_good]
        checksums = [block.checksum for block, _ in good]
        self._tiers.seal([slot for _, slot in good], checksums, request.checksum_algorithm)
        self._tiers.counts.put_blocks += len(good)
        self._tiers.counts.put_bytes += sum(slot.size_bytes for _, slot in good)
        return len(good)

    async def _connected(self, transport: Transport, source: Endpoint) -> Peer:
        """To connect may take long; whom the node is connected to already is at hand."""
        known = self._peers.get(source.owner)
        if known is None or known.endpoint != source:
            known = await run_in_thread(lambda: transport.connect(source))
            self._peers[source.owner] = known
            if len(self._peers) > MAX_PEERS:
                self._peers.pop(next(iter(self._peers)))
        return known

    def _is_announced(self, request: PutRequest, block: BlockRef, slot: DramBlock) -> bool:
        if request.checksum_algorithm != CHECKSUM_XXH3:
            return True  # of a GPU's memory: its reader checks
        return bool(xxhash.xxh3_64_intdigest(self._tiers.window(slot)) == block.checksum)

    def _discard(self, slots: Sequence[DramBlock]) -> None:
        for slot in slots:
            self._shelf.discard(slot)

    # -- lease -----------------------------------------------------------------------------

    async def lease(self, query: LeaseRequest) -> LeasedBlocks:
        """Raises Invalid, Overloaded. Asking alone pins nothing: without ``max_bytes`` no lease
        is taken."""
        leased = self.lease_at_once(query)
        if leased is not None:
            return leased
        num_held = self._tiers.num_held(query.keys)
        with self._holding() as slots:
            room = self._collect(query, num_held, slots)
            promoted = await self._promote(query.keys[len(slots) : num_held], room)
            slots += promoted
            return self._lend(query, num_held, slots, len(promoted))

    def lease_at_once(self, query: LeaseRequest) -> LeasedBlocks | None:
        """The same where everything lies in DRAM; None when it has to wait for the disk."""
        self._shelf.expire(self._clock.monotonic())
        num_held = self._tiers.num_held(query.keys)
        if not num_held or query.max_bytes <= 0:
            self._tiers.counts.missed_blocks += len(query.keys) - num_held
            return LeasedBlocks("", "", (), num_held)
        with self._holding() as slots:
            room = self._collect(query, num_held, slots)
            if room and len(slots) < num_held:
                return None
            return self._lend(query, num_held, slots, 0)

    def _lend(
        self, query: LeaseRequest, num_held: int, slots: Sequence[DramBlock], num_promoted: int
    ) -> LeasedBlocks:
        """A lease of ``slots``, the last ``num_promoted`` of which came from the disk."""
        counts = self._tiers.counts
        counts.missed_blocks += len(query.keys) - num_held
        leased = _same_algorithm_prefix(slots)
        if not leased:
            return LeasedBlocks("", "", (), num_held)
        self._shelf.tick()
        num_promoted = max(num_promoted - (len(slots) - len(leased)), 0)
        for slot in leased[: len(leased) - num_promoted]:
            self._shelf.use(slot)
        lease_id = self._shelf.lease(leased, query.seconds, self._clock.monotonic())
        counts.hit_blocks_dram += len(leased) - num_promoted
        counts.hit_blocks_disk += num_promoted
        blocks = tuple(BlockRef(s.offset, s.size_bytes, s.checksum, s.key) for s in leased)
        return LeasedBlocks(lease_id, leased[0].algorithm, blocks, num_held, num_promoted)

    def release(self, lease_id: str) -> None:
        self._shelf.release(lease_id)

    def pin(self, keys: Sequence[BlockKey], seconds: float) -> int:
        """How many leading blocks are kept for so long. Raises Invalid, Overloaded."""
        now = self._clock.monotonic()
        self._shelf.expire(now)
        slots: list[DramBlock] = []
        for key in keys:
            slot = self._shelf.get(key)
            if slot is None:
                break
            slots.append(slot)
        if slots:
            self._shelf.pin(slots, seconds, now)
        return len(slots)

    async def pin_all(self, keys: Sequence[BlockKey], seconds: float) -> int:
        """The same, with those that lie on the disk only read in first, up to what may be pinned at
        all. Raises Invalid, Overloaded."""
        num_held = self._tiers.num_held(keys)
        most = LeaseRequest(tuple(keys), seconds, int(MAX_PINNED_SHARE * self._shelf.arena_bytes))
        with self._holding() as slots:
            room = self._collect(most, num_held, slots)
            if room and len(slots) < num_held:
                slots += await self._promote(keys[len(slots) : num_held], room)
            return self.pin(keys, seconds)

    @contextmanager
    def _holding(self) -> Iterator[list[DramBlock]]:
        """A list of slots that are held as long as this lasts."""
        slots: list[DramBlock] = []
        try:
            yield slots
        finally:
            self._shelf.let_go(slots)

    def _collect(self, query: LeaseRequest, num_held: int, slots: list[DramBlock]) -> int:
        """Adds what lies in DRAM, held, up to the first block that doesn't. Returns the room that
        is left then, 0 when the next block does not fit it."""
        room = query.max_bytes
        for key in query.keys[:num_held]:
            slot = self._shelf.get(key)
            if slot is None:
                return room
            if slot.size_bytes > room:
                return 0
            room -= slot.size_bytes
            self._shelf.hold(slot)
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
            return await self._tiers.read_in(wanted)
        finally:
            self._num_promotions -= 1
            self.demotion.notice()

    async def report(self, keys: Sequence[BlockKey]) -> int:
        """Somebody got damaged bytes: the bad ones among our copies go. How many were bad."""
        bad = 0
        for key in keys:
            slot = self._shelf.get(key)
            if slot is None:
                continue
            self._shelf.hold(slot)
            try:
                sound = await run_in_thread(partial(self._tiers.is_sound, slot))
            finally:
                self._shelf.let_go([slot])
            if not sound and self._shelf.get(key) is slot:
                self._tiers.drop_damaged(key, Tier.DRAM, "reported by a reader")
                bad += 1
        return bad

    # -- watchers --------------------------------------------------------------------------

    async def watch(self, generation: Incarnation, number: int) -> AsyncGenerator[WatchEvent]:
        """What is held, then every change. A watcher that knows everything up to ``number`` of
        this ``generation`` gets what followed."""
        known = generation == self._generation and self.events.after(number) is not None
        while True:
            if not known:
                number = self.events.number
                for page in self._snapshot(number):
                    yield page
            for change in self.events.after(number) or ():
                number = change.number
                yield self._page(change)
            await self.events.wait(number)
            known = self.events.after(number) is not None

    def _snapshot(self, number: int) -> list[WatchEvent]:
        """All of one moment, so that the changes after ``number`` follow on it."""
        pages = [
            WatchEvent(self._generation, number, tier, tuple(keys[start : start + PAGE_KEYS]))
            for tier, keys in self._tiers.keys().items()
            for start in range(0, len(keys), PAGE_KEYS)
        ]
        pages = pages or [WatchEvent(self._generation, number, Tier.NONE, ())]
        last = len(pages) - 1
        return [page.marked(reset=i == 0, more=i < last) for i, page in enumerate(pages)]

    def _page(self, change: StoreChange) -> WatchEvent:
        return WatchEvent(self._generation, change.number, change.tier, change.keys)

    # -- for the operator ------------------------------------------------------------------

    def stats(self, *, check: bool = True) -> StoreStats:
        """Checking the books takes a look at every block."""
        shelf, disk = self._shelf, self._tiers.disk
        shelf.expire(self._clock.monotonic())
        return StoreStats(
            arena_bytes=shelf.arena_bytes,
            used_bytes=shelf.used_bytes,
            num_blocks=shelf.num_blocks,
            leased_blocks=shelf.num_leased,
            pinned_bytes=shelf.pinned_bytes,
            disk_capacity_bytes=disk.size_bytes if disk is not None else 0,
            disk_used_bytes=disk.used_bytes if disk is not None else 0,
            disk_blocks=disk.num_blocks if disk is not None else 0,
            evictions=shelf.evictions,
            quota_evictions=shelf.quota_evictions,
            disk_evictions=disk.evictions if disk is not None else 0,
            violation=self._violation() if check else "",
            **asdict(self._tiers.counts),
        )

    def list_blocks(
        self, filter_: BlockFilter, skip: int, limit: int
    ) -> tuple[list[StoredBlock], int]:
        """A page of the blocks that match, oldest first, and how many there are in all."""
        found = sorted(self._matching(filter_), key=lambda block: (block.stored_at, block.depth))
        return found[skip : skip + limit], len(found)

    async def purge(self, filter_: BlockFilter) -> int:
        """Forgets the blocks that match, also on the disk; a block that is being read goes after
        that."""
        keys = {block.key for block in self._matching(filter_)}
        purged = sum(self._tiers.drop(key) for key in keys)
        self._tiers.counts.purged_blocks += purged
        await self._tiers.settle()
        return purged

    async def settle(self) -> None:
        """Does what was put off, so that nobody waits for the disk."""
        await self._tiers.settle()

    def sweep(self) -> None:
        """Frees the slots of reads that could not be ended, once they have ended."""
        self._strays.sweep()
        self._shelf.expire(self._clock.monotonic())

    def keys(self) -> dict[Tier, list[BlockKey]]:
        return self._tiers.keys()

    def _matching(self, filter_: BlockFilter) -> Iterator[StoredBlock]:
        """A block in both tiers counts as in DRAM."""
        for slot in self._shelf.sealed():
            if filter_.matches(slot.tenant, slot.model, slot.stored_at):
                yield _stored(slot, Tier.DRAM, slot.num_holds)
        for block in self._tiers.disk.blocks() if self._tiers.disk is not None else ():
            record, here = block.record, self._shelf.get(block.key) is not None
            if not here and filter_.matches(record.tenant, record.model, record.stored_at):
                yield _stored(record, Tier.DISK, 0)

    def _violation(self) -> str:
        try:
            self._shelf.check_integrity()
            if self._tiers.disk is not None:
                self._tiers.disk.check_integrity()
        except AssertionError as error:
            return str(error) or "integrity violated"
        return ""


def _depth(slot: DramBlock) -> int:
    return slot.depth


def _same_algorithm_prefix(slots: Sequence[DramBlock]) -> list[DramBlock]:
    """The leading ones with one checksum algorithm: a lease names but one."""
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
