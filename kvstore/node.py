"""The store node: reads blocks out of workers' pools into its arena, and lends them out."""

import asyncio
from collections.abc import Sequence

import structlog
import xxhash

from baton.clock import Clock
from baton.core.handoff import CHECKSUM_XXH3, BlockRef, Endpoint
from baton.core.ids import BlockKey
from baton.core.store import LeasedBlocks, PutRequest, PutResult, StoreStats
from baton.errors import BatonError, Corrupt, Invalid, Overloaded
from baton.kv.index import Holder, KvIndex
from baton.transport.base import Span, Transfer, Transport
from baton.transport.flow import TransferFailed, transfer
from baton.transport.region import HostMemory
from baton.transport.select import choose
from kvstore.shelf import Shelf, Slot

MAX_PUTS = 16
"""Reads from workers at a time; a further put is refused."""

MAX_UNPUBLISHED = 4096
"""Changes that the index has not been told; beyond, it is told everything anew."""

READ_SECONDS = 10.0
RETRY_SECONDS = 1.0
REPUBLISH_SECONDS = 600.0

log = structlog.get_logger(__name__)


class StoreNode:
    """Implements :class:`baton.rpc.kvstore_service.StoreCore`. Runs in one event loop."""

    def __init__(
        self,
        holder: Holder,
        memory: HostMemory,
        transports: dict[str, Transport],
        index: KvIndex,
        host: str,
        clock: Clock,
        slab_bytes: int | None = None,
    ) -> None:
        self._holder = holder
        self._memory = memory
        self._transports = transports
        self._index = index
        self._host = host
        self._clock = clock
        self._shelf = Shelf(memory.region.size_bytes, slab_bytes)
        self._num_puts = 0
        self._strays: list[tuple[Transport, Transfer, list[Slot]]] = []
        self._checksum_failures = 0
        self._changes: asyncio.Queue[tuple[bool, list[BlockKey]]] = asyncio.Queue(MAX_UNPUBLISHED)
        self._must_resync = False

    def endpoint_for(self, transports: Sequence[str], host: str) -> Endpoint:
        name = choose(tuple(self._transports), transports, host == self._host)
        return self._transports[name].export()

    async def put(self, request: PutRequest) -> PutResult:
        """What there is no room for is left out, from the end: a prefix is worth having alone.
        Raises Overloaded when there is room for nothing, Corrupt when a checksum doesn't match,
        Unavailable when the caller can't be read."""
        if self._num_puts >= MAX_PUTS:
            raise Overloaded(f"{MAX_PUTS} puts are running", retry_after_seconds=0.2)
        transport = self._transports.get(request.source.transport)
        if transport is None:
            raise Invalid(f"this node has no transport {request.source.transport!r}")
        self._num_puts += 1
        self._recover_strays()
        try:
            return await self._put(request, transport)
        finally:
            self._num_puts -= 1

    def lease(self, keys: Sequence[BlockKey], seconds: float) -> LeasedBlocks:
        return self._shelf.lease(keys, seconds, self._clock.monotonic())

    def release(self, lease_id: str) -> None:
        self._shelf.release(lease_id)

    def stats(self) -> StoreStats:
        shelf = self._shelf
        shelf.expire(self._clock.monotonic())
        try:
            shelf.check_integrity()
            violation = ""
        except AssertionError as error:
            violation = str(error) or "integrity violated"
        return StoreStats(
            arena_bytes=shelf.arena_bytes,
            used_bytes=shelf.used_bytes,
            num_blocks=shelf.num_blocks,
            leased_blocks=shelf.num_leased,
            hits=shelf.hits,
            misses=shelf.misses,
            evictions=shelf.evictions,
            checksum_failures=self._checksum_failures,
            violation=violation,
        )

    async def publish(self) -> None:
        """Tells the index what changes, until cancelled. While it can't be reached nothing is
        lost: it is told everything once it can. So it is now and then, in case it forgot."""
        while True:
            added, keys = await self._next_change()
            try:
                if self._must_resync:
                    self._must_resync = False
                    await self._index.add(self._holder, self._shelf.keys())
                change = self._index.add if added else self._index.remove
                await change(self._holder, keys)
            except BatonError as error:
                log.warning("index_unreachable", error=str(error))
                self._must_resync = True

    async def _next_change(self) -> tuple[bool, list[BlockKey]]:
        """Nothing new, and the index to be told everything, when nothing changes for long."""
        try:
            async with asyncio.timeout(RETRY_SECONDS if self._must_resync else REPUBLISH_SECONDS):
                return await self._changes.get()
        except TimeoutError:
            self._must_resync = True
            return True, []

    async def _put(self, request: PutRequest, transport: Transport) -> PutResult:
        missing = [block for block in request.blocks if block.key not in self._shelf]
        num_present = len(request.blocks) - len(missing)
        pairs: list[tuple[BlockRef, Slot]] = []
        try:
            self._reserve(request, missing, pairs)
            if pairs:
                await self._fill(transport, request, pairs)
        except TransferFailed as error:
            slots = [slot for _, slot in pairs]
            if error.stray is None:
                self._discard(slots)
            else:
                self._strays.append((transport, error.stray, slots))
            raise
        except BaseException:
            self._discard([slot for _, slot in pairs])
            raise
        # The first block is sealed last, so that of a prefix the end is evicted first.
        for block, slot in reversed(pairs):
            self._shelf.seal(slot, block.checksum, request.checksum_algorithm)
        self._shelf.touch([block.key for block in request.blocks])
        self._note(True, [block.key for block, _ in pairs])
        return PutResult(len(pairs), num_present)

    def _reserve(
        self,
        request: PutRequest,
        missing: Sequence[BlockRef],
        pairs: list[tuple[BlockRef, Slot]],
    ) -> None:
        """Fills ``pairs`` as far as there is room, without taking any from the same prefix."""
        keys = {block.key for block in request.blocks}
        for block in missing:
            if block.key in self._shelf:  # twice in one put
                continue
            try:
                slot, evicted = self._shelf.reserve(block.key, block.size_bytes, keep=keys)
            except Overloaded:
                if pairs or len(missing) < len(request.blocks):
                    return
                raise
            pairs.append((block, slot))
            self._note(False, evicted)

    async def _fill(
        self, transport: Transport, request: PutRequest, pairs: Sequence[tuple[BlockRef, Slot]]
    ) -> None:
        peer = await asyncio.to_thread(transport.connect, request.source)
        spans = [Span(block.offset_bytes, slot.offset, slot.size_bytes) for block, slot in pairs]
        await transfer(transport, peer, spans, READ_SECONDS, self._clock)
        if request.checksum_algorithm == CHECKSUM_XXH3:
            good = await asyncio.to_thread(self._matches, pairs)
            if not good:
                self._checksum_failures += 1
                raise Corrupt("what was read is not what was announced; nothing was kept")

    def _matches(self, pairs: Sequence[tuple[BlockRef, Slot]]) -> bool:
        view = self._memory.view
        return all(
            xxhash.xxh3_64_intdigest(view[slot.offset : slot.offset + slot.size_bytes])
            == block.checksum
            for block, slot in pairs
        )

    def _discard(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._shelf.discard(slot)

    def _recover_strays(self) -> None:
        """Frees the slots of reads that could not be ended, once they have ended."""
        under_way = []
        for transport, stray, slots in self._strays:
            if transport.release(stray):
                self._discard(slots)
            else:
                under_way.append((transport, stray, slots))
        self._strays = under_way

    def _note(self, added: bool, keys: list[BlockKey]) -> None:
        if not keys:
            return
        if self._changes.full():
            self._must_resync = True
        else:
            self._changes.put_nowait((added, keys))
