"""The store node, which copies blocks from workers' KV pools into its tiers and leases them to
readers."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import asdict
from functools import partial

from baton.clock import Clock
from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockKey, Incarnation
from baton.core.kv_transfer import Endpoint
from baton.core.store import (
    BlockFilter,
    LeasedBlocks,
    LeaseRequest,
    PutRequest,
    PutResult,
    StoredBlock,
    StoreStats,
    Tier,
    WatchEvent,
)
from baton.kv.event_log import BlockFeed, EventLog
from baton.transport.base import Transport
from baton.transport.host_memory import HostMemory
from baton.transport.selection import choose_transport
from kvstore.demoter import Demoter
from kvstore.disk_encoder import DiskEncoder
from kvstore.disk_tier import DiskTier
from kvstore.dram_block import DramBlock
from kvstore.dram_tier import DramTier
from kvstore.lease_handler import LeaseHandler
from kvstore.put_handler import PutHandler
from kvstore.segment import BlockRecord
from kvstore.stored_codecs import StoredCodecs
from kvstore.tiered_store import TieredStore


class StoreNode:
    """Implements :class:`baton.rpc.kvstore_service.KvStoreCore`. Other classes handle puts, leases
    and watchers; this class handles the administration. All methods run in one event loop."""

    def __init__(
        self,
        generation: Incarnation,
        memory: HostMemory,
        transports: dict[str, Transport],
        host: str,
        clock: Clock,
        dram: DramTier,
        disk: DiskTier | None = None,
        disk_encoder: DiskEncoder | None = None,
        codecs: StoredCodecs | None = None,
    ) -> None:
        """If ``disk_encoder`` is given, it encodes blocks on their way to the disk. ``codecs`` are
        needed to find out whether an encoded block is valid; without them, its checksum
        decides."""
        self._transports = transports
        self._host = host
        self._clock = clock
        self._dram = dram
        self.events = EventLog()
        self._tiers = TieredStore(memory, dram, disk, self.events, clock, disk_encoder, codecs)
        self.demoter = Demoter(self._tiers, clock)
        self._puts = PutHandler(self._tiers, self.demoter, transports, clock)
        self._leases = LeaseHandler(self._tiers, self.demoter, clock)
        self._feed = BlockFeed(generation, self._tiers.events, self._tiers.keys)

    def endpoint_for(self, transports: Sequence[str], host: str) -> Endpoint:
        name = choose_transport(tuple(self._transports), transports, host == self._host)
        return self._transports[name].export()

    # -- blocks ----------------------------------------------------------------------------

    async def put(self, request: PutRequest) -> PutResult:
        """Store blocks by reading them from the caller. Raises the errors of
        :meth:`PutHandler.put`."""
        return await self._puts.put(request)

    async def lease(self, query: LeaseRequest) -> LeasedBlocks:
        """Lease the leading blocks that are stored, reading them from the disk if necessary. Raises
        Invalid or Overloaded."""
        return await self._leases.lease(query)

    def lease_from_dram(self, query: LeaseRequest) -> LeasedBlocks | None:
        """Lease as :meth:`lease` does, but return None if that would have to wait for the disk."""
        return self._leases.lease_from_dram(query)

    def release(self, lease_id: str) -> None:
        self._leases.release(lease_id)

    def pin(self, keys: Sequence[BlockKey], seconds: float) -> int:
        """Pin for ``seconds`` the leading blocks that are in DRAM; return how many they are. Raises
        Invalid or Overloaded."""
        return self._leases.pin(keys, seconds)

    async def pin_with_promotion(self, keys: Sequence[BlockKey], seconds: float) -> int:
        """Pin as :meth:`pin` does, but first read blocks that are only on the disk into DRAM."""
        return await self._leases.pin_with_promotion(keys, seconds)

    async def report_damaged(self, keys: Sequence[BlockKey]) -> int:
        """Handle a reader's report of damaged blocks: verify the reported blocks that are in DRAM,
        and drop those whose checksum is wrong, or that can't be decoded. Return how many were
        dropped."""
        num_damaged = 0
        for key in keys:
            slot = self._dram.get(key)
            if slot is None:
                continue
            self._dram.add_reference(slot)
            try:
                damage = await run_in_thread(partial(self._tiers.find_damage, slot))
            finally:
                self._dram.release_references([slot])
            if damage is not None and self._dram.get(key) is slot:
                self._tiers.drop_reported(slot, damage)
                num_damaged += 1
        return num_damaged

    def watch(self, generation: Incarnation, number: int) -> AsyncGenerator[WatchEvent]:
        """Yield a snapshot of the stored keys, then every change. A watcher that already knows
        everything up to change ``number`` of this ``generation`` gets only the later changes,
        without a snapshot, if the event log still has them."""
        return self._feed.watch(generation, number)

    # -- administration --------------------------------------------------------------------

    def stats(self, *, check: bool = True) -> StoreStats:
        """Return the counters. If ``check`` is True, also check the integrity of both tiers, which
        visits every block; a violation is not raised, but returned as the text ``violation``."""
        dram, disk = self._dram, self._tiers.disk
        dram.expire(self._clock.monotonic())
        return StoreStats(
            arena_bytes=dram.arena_bytes,
            used_bytes=dram.used_bytes,
            raw_bytes=dram.raw_bytes,
            num_blocks=dram.num_blocks,
            leased_blocks=dram.leases.num_blocks,
            pinned_bytes=dram.pins.num_bytes,
            disk_capacity_bytes=disk.size_bytes if disk is not None else 0,
            disk_used_bytes=disk.used_bytes if disk is not None else 0,
            disk_raw_bytes=disk.raw_bytes if disk is not None else 0,
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
        """Return the matching blocks from index ``skip`` on, at most ``limit``, oldest first, and
        the total number of matching blocks."""
        found = sorted(self._matching(filter_), key=lambda block: (block.stored_at, block.depth))
        return found[skip : skip + limit], len(found)

    async def purge(self, filter_: BlockFilter) -> int:
        """Delete the matching blocks from both tiers; return how many there were. A block that is
        being read is freed when the read ends."""
        keys = {block.key for block in self._matching(filter_)}
        purged = sum(self._tiers.drop(key) for key in keys)
        self._tiers.counters.purged_blocks += purged
        await self._tiers.flush()
        return purged

    async def flush(self) -> None:
        """Apply the changes to the disk that were deferred so that requests need not wait for
        them."""
        await self._tiers.flush()

    def sweep(self) -> None:
        """Free the slots of reads that were given up and have ended since, and end the leases and
        pins that have expired."""
        self._puts.sweep()

    def keys(self) -> dict[Tier, list[BlockKey]]:
        return self._tiers.keys()

    def _matching(self, filter_: BlockFilter) -> Iterator[StoredBlock]:
        """Yield the matching blocks. A block in both tiers is yielded once, as a block in DRAM."""
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
        block.encoding.codec,
        block.encoding.raw_bytes(block.size_bytes),
    )
