"""Stores blocks: reads them from workers' KV pools into DRAM."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from baton.clock import Clock
from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockKey
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef, Endpoint
from baton.core.store import PutRequest, PutResult, Tier
from baton.errors import Corrupt, Invalid, Overloaded
from baton.registry.limits import MAX_MEMBERS
from baton.transport.base import Peer, TransferRange, Transport
from baton.transport.reads import TransferFailed, read_and_verify
from baton.transport.unfinished_transfers import UnfinishedTransfers
from kvstore.block_encoding import BlockEncoding, encodings_of
from kvstore.demoter import Demoter
from kvstore.dram_block import DramBlock
from kvstore.limits import MAX_PUTS, MAX_WAIT_SECONDS
from kvstore.tiered_store import TieredStore

READ_TIMEOUT_SECONDS = 5.0


@dataclass(slots=True)
class _PutInProgress:
    """The state of a put. ``present`` are the blocks that are already in DRAM, which the put
    references; ``incoming`` are the blocks to be read into newly allocated slots. ``num_present``
    is the number of blocks of the request that are already in a tier."""

    present: list[DramBlock]
    incoming: list[tuple[BlockRef, DramBlock]]
    num_present: int = 0


class PutHandler:
    """Handles puts, for which the store reads the blocks from the worker. If such a read fails, but
    may still write to the slots that were allocated for it, the slots stay allocated until
    :meth:`sweep` finds that the read has ended."""

    def __init__(
        self, tiers: TieredStore, demoter: Demoter, transports: dict[str, Transport], clock: Clock
    ) -> None:
        self._tiers = tiers
        self._dram = tiers.dram
        self._demoter = demoter
        self._transports = transports
        self._clock = clock
        self._unfinished_transfers = UnfinishedTransfers()
        self._peers: dict[str, Peer] = {}
        self._num_puts = 0

    async def put(self, request: PutRequest) -> PutResult:
        """Store blocks by reading them from the caller. If there is not enough space, the last
        blocks are left out, since a shorter prefix is useful, too. Raises Overloaded if too many
        puts are running or there is no space for any block, Invalid if this node lacks the
        transport or the blocks are too large, Corrupt if a block doesn't match its checksum (the
        blocks before it are kept), and Unavailable if reading from the caller fails."""
        if self._num_puts >= MAX_PUTS:
            raise Overloaded(
                f"{MAX_PUTS} puts are already running, which is the maximum",
                retry_after_seconds=0.2,
            )
        transport = self._transports.get(request.source.transport)
        if transport is None:
            raise Invalid(
                f"this store node has no transport {request.source.transport!r}; its transports: "
                f"{', '.join(sorted(self._transports))}"
            )
        encodings = encodings_of(request)
        for size_bytes in {
            encoding.raw_bytes(block.size_bytes)
            for block, encoding in zip(request.blocks, encodings, strict=True)
        }:
            self._dram.check_block_size(size_bytes)
        self._num_puts += 1
        self.sweep()
        try:
            return await self._put(request, encodings, transport)
        finally:
            self._num_puts -= 1
            self._demoter.wake_if_low()

    async def _put(
        self, request: PutRequest, encodings: Sequence[BlockEncoding], transport: Transport
    ) -> PutResult:
        self._dram.tick()
        put = _PutInProgress([], [])
        num_good = 0
        new_slots: list[DramBlock] = []
        try:
            await self._reserve(request, encodings, put)
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
            raise Corrupt(
                f"a block does not match its checksum; it and the blocks after it ({len(bad)} in "
                "total) were not stored"
            )
        return PutResult(num_good, put.num_present)

    async def _reserve(
        self, request: PutRequest, encodings: Sequence[BlockEncoding], put: _PutInProgress
    ) -> None:
        """Reference the blocks that are in DRAM, and allocate slots for the blocks that are in no
        tier, as far as there is space. The references keep the put from evicting its own blocks.
        If slots are missing, wait until blocks that are only in DRAM are on the disk."""
        now = self._clock.wall_nanoseconds() / 1e9
        for key in request.preceding_keys:
            self._reference_present(key, put)
        deadline = self._clock.monotonic() + MAX_WAIT_SECONDS
        sizes = [e.slot_bytes(b.size_bytes) for e, b in zip(encodings, request.blocks, strict=True)]
        missing = Counter(
            size for size, block in zip(sizes, request.blocks, strict=True) if self._is_new(block)
        )
        for index, block in enumerate(request.blocks):
            if self._is_new(block):
                size = sizes[index]
                await self._demoter.make_room(size, missing[size], deadline)
                missing[size] -= 1
            if self._reference_present(block.key, put) or block.key in self._dram:
                put.num_present += 1
            elif not self._allocate(request, block, encodings[index], index, now, put):
                return

    def _is_new(self, block: BlockRef) -> bool:
        is_filling = block.key in self._dram
        return not is_filling and self._tiers.tier_of(block.key) is Tier.NONE

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
        self,
        request: PutRequest,
        block: BlockRef,
        encoding: BlockEncoding,
        index: int,
        now: float,
        put: _PutInProgress,
    ) -> bool:
        """Allocate a slot for a block; return whether that succeeded. Raises Overloaded if no block
        of the put could be stored."""
        try:
            slot = self._tiers.allocate(
                block.key,
                block.size_bytes,
                encoding,
                request.tenant,
                depth=request.first_block + index,
                model=request.model,
                stored_at=now,
            )
            if slot is None:
                raise Overloaded(
                    "no block in the store's DRAM can be evicted to make room: too many blocks are "
                    "leased, pinned or being copied"
                )
        except Overloaded:
            if put.incoming or put.num_present:
                return False
            raise
        put.incoming.append((block, slot))
        return True

    async def _read_blocks(
        self, transport: Transport, request: PutRequest, pairs: Sequence[tuple[BlockRef, DramBlock]]
    ) -> int:
        """Read, verify and seal blocks. Return how many leading blocks match their checksums.
        Raises TransferFailed."""
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
        """Return the connection to a worker. Connections are kept, because connecting may take
        long."""
        known = self._peers.get(source.owner)
        if known is None or known.endpoint != source:
            known = await run_in_thread(lambda: transport.connect(source))
            self._peers[source.owner] = known
            if len(self._peers) > MAX_MEMBERS:
                self._peers.pop(next(iter(self._peers)))
        return known

    def _matches_checksum(self, request: PutRequest, block: BlockRef, slot: DramBlock) -> bool:
        if request.checksum_algorithm != CHECKSUM_XXH3:
            return True  # computed on a GPU: the reader verifies it
        return bool(xxhash.xxh3_64_intdigest(self._tiers.slot_view(slot)) == block.checksum)

    def _discard(self, slots: Sequence[DramBlock]) -> None:
        for slot in slots:
            self._dram.discard(slot)

    def sweep(self) -> None:
        """Free the slots of reads that were given up and have ended since, and end the leases and
        pins that have expired."""
        self._unfinished_transfers.sweep()
        self._dram.expire(self._clock.monotonic())


def _depth(slot: DramBlock) -> int:
    return slot.depth
