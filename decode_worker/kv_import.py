"""The receiving side of a KV transfer: it reserves blocks, reads and verifies them, and
acknowledges them to the source."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockId, TokenId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import (
    BlockRef,
    Endpoint,
    KvTransferChunk,
    KvTransferDone,
    KvTransferEvent,
    KvTransferOpen,
    KvTransferScheduled,
    WorkerRef,
)
from baton.core.request import RequestSpec
from baton.engine.engine import Reservation
from baton.engine.key_chain import BlockKeyChain
from baton.errors import BatonError, Corrupt, DeadlineExceeded, Invalid, Unavailable
from baton.rpc.worker_client import KvImportConnector, KvImportStream
from baton.transport.base import Peer, Transfer, Transport
from baton.transport.reads import TransferFailed, read_and_verify
from baton.worker.context import WorkerContext
from baton.worker.kv_transfer_stats import KvTransferStats
from baton.worker.staging_area import StagingRange
from decode_worker.block_decoder import BlockDecoder, DecodedRead, UnfinishedStagedRead
from decode_worker.reservation_queue import ReservationQueue

READ_ATTEMPTS = 2
"""Maximum number of attempts to read a chunk. If the last attempt fails or its data is damaged, the
import fails and the request is placed again."""


@dataclass(slots=True)
class KvImport:
    """The state of one request's import. ``unfinished_transfers`` are the transfers that could not
    be stopped. Until they have ended, the reservation's blocks must be quarantined, and the ranges
    ``unfinished_staging`` of the staging area must not be freed. ``accepted_codecs`` are those that
    the source may use."""

    reservation: Reservation | None = None
    transport: Transport | None = None
    peer: Peer | None = None
    num_read_blocks: int = 0
    unfinished_transfers: tuple[Transfer, ...] = ()
    unfinished_staging: tuple[StagingRange, ...] = ()
    accepted_codecs: tuple[KvCodecName, ...] = ()
    stats: KvTransferStats = field(default_factory=KvTransferStats)


@dataclass(frozen=True, slots=True)
class KvImportTimeouts:
    """Time limits of an import. ``queue_seconds`` bounds the wait until the prompt is nearly
    prefilled, ``chunk_seconds`` the wait for each later event (a prefill may be paused for other
    prompts), ``read_seconds`` a single read, and ``reserve_seconds`` the wait for free blocks,
    and ``staging_seconds`` the wait for space for encoded blocks."""

    queue_seconds: float = 240.0
    chunk_seconds: float = 120.0
    read_seconds: float = 20.0
    reserve_seconds: float = 60.0
    staging_seconds: float = 20.0


class KvImporter:
    """Imports the KV of requests from other workers; any number of imports run concurrently."""

    def __init__(
        self,
        context: WorkerContext,
        connector: KvImportConnector,
        timeouts: KvImportTimeouts,
    ) -> None:
        self._engine = context.engine
        self._connector = connector
        self._transports = context.transports
        self._layout = context.layout
        self._model_digest = context.model_digest.hex()
        self._host = context.host
        self._clock = context.clock
        self._timeouts = timeouts
        self._reservation_queue = ReservationQueue()
        self._decoder = BlockDecoder(
            context.layout, context.staging, context.codecs, context.clock, timeouts.staging_seconds
        )

    def notify_blocks_freed(self) -> None:
        """Retry the waiting reservations: blocks may have become free."""
        self._reservation_queue.notify_blocks_freed()

    async def import_kv(
        self, spec: RequestSpec, chain: BlockKeyChain, source: WorkerRef, kv_import: KvImport
    ) -> TokenId | None:
        """Import a request's KV from ``source``. Return the answer's next token (the first one,
        unless the answer migrates), or None if the answer ended with that token.

        The resources that the import takes are recorded in ``kv_import``. The caller starts the
        request in the engine, or aborts it if this raises or is cancelled. Raises Corrupt if the
        source violates the protocol; another source may succeed then. Raises Unavailable,
        DeadlineExceeded, Invalid or NotFound if the import fails for another reason.
        """
        kv_import.accepted_codecs = self._decoder.accepted(exact=spec.exact_kv)
        opening = self._build_open_message(spec, source, kv_import.accepted_codecs)
        async with self._connector.open_kv_import(source.address, opening) as reader:
            scheduled = await self._next_event(reader, self._timeouts.queue_seconds)
            if not isinstance(scheduled, KvTransferScheduled):
                raise Corrupt(
                    "a KV transfer must begin with KvTransferScheduled, not "
                    f"{type(scheduled).__name__}"
                )
            await self._connect_and_reserve(spec, chain, source, scheduled, kv_import)
            while not isinstance(
                event := await self._next_event(reader, self._timeouts.chunk_seconds),
                KvTransferDone,
            ):
                if not isinstance(event, KvTransferChunk):
                    raise Corrupt(
                        f"the source sent an unexpected {type(event).__name__} in a KV transfer"
                    )
                await self._read_chunk(reader, event, kv_import)
            if event.is_finished:
                return None
            _check_complete(kv_import)
            stats = kv_import.stats
            stats.completed_at = self._clock.monotonic()
            stats.exposed_seconds = stats.completed_at - stats.last_chunk_at
            return event.token_id

    def _build_open_message(
        self, spec: RequestSpec, source: WorkerRef, codecs: tuple[KvCodecName, ...]
    ) -> KvTransferOpen:
        return KvTransferOpen(
            request_id=spec.request_id,
            epoch=spec.epoch,
            source_generation=source.generation,
            model_digest=self._model_digest,
            kv_layout=self._layout.name,
            transports=tuple(self._transports),
            host=self._host,
            codecs=codecs,
        )

    async def _next_event(self, reader: KvImportStream, seconds: float) -> KvTransferEvent:
        async with _deadline(seconds, "the prefill worker sent no event"):
            return await reader.next_event()

    async def _connect_and_reserve(
        self,
        spec: RequestSpec,
        chain: BlockKeyChain,
        source: WorkerRef,
        scheduled: KvTransferScheduled,
        kv_import: KvImport,
    ) -> None:
        """Check the source's offer, connect to the source's memory, and reserve blocks."""
        endpoint = scheduled.endpoint
        if scheduled.num_tokens != len(spec.token_ids):
            raise Corrupt(
                f"the source offers KV of {scheduled.num_tokens} tokens, but the request has "
                f"{len(spec.token_ids)}"
            )
        if scheduled.checksum_algorithm != self._layout.checksum_algorithm:
            raise Corrupt(
                f"the source uses checksum algorithm {scheduled.checksum_algorithm!r}, but this "
                f"worker uses {self._layout.checksum_algorithm!r}"
            )
        if (endpoint.owner, endpoint.generation) != (source.id, source.generation):
            raise Corrupt(
                f"{source.id} (generation {source.generation}) must offer its own memory, "
                "but offers the memory of "
                f"{endpoint.owner!r} (generation {endpoint.generation})"
            )
        transport = self._transports.get(endpoint.transport)
        if transport is None:
            raise Corrupt(
                f"the source chose transport {endpoint.transport!r}, which this worker did not "
                "offer"
            )
        kv_import.transport = transport
        kv_import.stats.transport = transport.name
        kv_import.stats.scheduled_at = self._clock.monotonic()
        kv_import.peer = await _connect(transport, endpoint)
        kv_import.reservation = await self._reserve(spec, chain)
        kv_import.stats.reserved_at = self._clock.monotonic()
        kv_import.num_read_blocks = kv_import.reservation.num_cached_blocks
        kv_import.stats.num_cached_blocks = kv_import.num_read_blocks

    async def _reserve(self, spec: RequestSpec, chain: BlockKeyChain) -> Reservation:
        async def try_reserve() -> Reservation | None:
            return await self._engine.call(lambda engine: engine.reserve_blocks(spec, chain))

        async with _deadline(self._timeouts.reserve_seconds, "no free blocks on the decode worker"):
            if not self._reservation_queue and (reservation := await try_reserve()) is not None:
                return reservation
            tokens = await self._engine.call(lambda engine: engine.predict_answer_tokens(spec))
            return await self._reservation_queue.reserve(
                self._clock.monotonic(), tokens, try_reserve, spec.priority
            )

    async def _read_chunk(
        self, reader: KvImportStream, chunk: KvTransferChunk, kv_import: KvImport
    ) -> None:
        """Read the blocks of the chunk that this worker does not have yet, then acknowledge the
        chunk."""
        assert kv_import.reservation is not None
        kv_import.stats.last_chunk_at = self._clock.monotonic()
        end = chunk.first_block + len(chunk.blocks)
        fits = 0 <= chunk.first_block < end <= len(kv_import.reservation.block_ids)
        if not fits or chunk.first_block > kv_import.num_read_blocks:
            raise Corrupt(
                f"the source announced blocks [{chunk.first_block}, {end}); they must follow the "
                f"first {kv_import.num_read_blocks} and be within the request's "
                f"{len(kv_import.reservation.block_ids)} blocks"
            )
        if end > kv_import.num_read_blocks:
            blocks = chunk.blocks[kv_import.num_read_blocks - chunk.first_block :]
            block_ids = kv_import.reservation.block_ids[kv_import.num_read_blocks : end]
            await _read_while_exported(reader, self._read_blocks(blocks, block_ids, kv_import))
            kv_import.num_read_blocks = end
        await reader.acknowledge(end)

    async def _read_blocks(
        self, blocks: Sequence[BlockRef], block_ids: Sequence[BlockId], kv_import: KvImport
    ) -> None:
        """Read and verify blocks. Raises Corrupt or Unavailable after the last attempt."""
        self._decoder.check(blocks, kv_import.accepted_codecs)
        for attempt in range(READ_ATTEMPTS):
            try:
                bad = await self._read_once(blocks, block_ids, kv_import)
                if not bad:
                    return
                blocks = [blocks[index] for index in bad]
                block_ids = [block_ids[index] for index in bad]
            except Unavailable:
                if attempt + 1 == READ_ATTEMPTS or kv_import.unfinished_transfers:
                    raise
        raise Corrupt(f"blocks arrived damaged over transport {kv_import.stats.transport}")

    async def _read_once(
        self, blocks: Sequence[BlockRef], block_ids: Sequence[BlockId], kv_import: KvImport
    ) -> tuple[int, ...]:
        """Read the blocks once. Return the indexes of those that must be read again, because they
        or blocks before them do not match the checksums that the source announced."""
        assert kv_import.transport is not None and kv_import.peer is not None
        try:
            if all(block.codec is KvCodecName.NONE for block in blocks):
                result = await self._read_raw(blocks, block_ids, kv_import)
            else:
                result = await self._decoder.read(
                    kv_import.transport,
                    kv_import.peer,
                    blocks,
                    block_ids,
                    self._timeouts.read_seconds,
                )
        except TransferFailed as error:
            kv_import.unfinished_transfers = error.unfinished_transfers
            if isinstance(error, UnfinishedStagedRead):
                kv_import.unfinished_staging = error.staged
            raise
        except Invalid as error:  # the source announced blocks outside of its memory
            raise Corrupt(
                f"source {kv_import.peer.endpoint.owner} announced invalid blocks: {error}"
            ) from error
        raw_bytes = len(blocks) * self._layout.block_bytes
        kv_import.stats.record_read(blocks, result.size_bytes, raw_bytes, result.seconds)
        kv_import.stats.link_seconds += result.link_seconds
        return result.bad

    async def _read_raw(
        self, blocks: Sequence[BlockRef], block_ids: Sequence[BlockId], kv_import: KvImport
    ) -> DecodedRead:
        """Read blocks that are not encoded directly into the pool."""
        assert kv_import.transport is not None and kv_import.peer is not None
        result = await read_and_verify(
            kv_import.transport,
            kv_import.peer,
            self._layout.transfer_ranges(blocks, block_ids),
            partial(self._layout.verify_blocks, self._layout.checksum_algorithm, blocks, block_ids),
            self._timeouts.read_seconds,
            self._clock,
        )
        bad = tuple(range(result.num_verified, len(blocks)))
        return DecodedRead(result.size_bytes, result.seconds, bad, result.link_seconds)


def _check_complete(kv_import: KvImport) -> None:
    """Raise Corrupt unless every reserved block was transferred: a request must not be decoded from
    blocks that were never written."""
    assert kv_import.reservation is not None
    num_blocks = len(kv_import.reservation.block_ids)
    if kv_import.num_read_blocks < num_blocks:
        raise Corrupt(
            f"the source ended the transfer after {kv_import.num_read_blocks} of {num_blocks} "
            "blocks"
        )


async def _connect(transport: Transport, endpoint: Endpoint) -> Peer:
    """Connect to the source's memory. Raises Corrupt for an invalid endpoint descriptor."""
    try:
        return await run_in_thread(lambda: transport.connect(endpoint))
    except Invalid as error:
        raise Corrupt(f"source {endpoint.owner} sent an invalid endpoint: {error}") from error


async def _read_while_exported(reader: KvImportStream, reading: Coroutine[Any, Any, None]) -> None:
    """Run ``reading``. If the source ends its event stream meanwhile, cancel ``reading`` and raise
    Unavailable: a read from a source that is gone might otherwise last until its timeout."""

    async def watch() -> None:
        await reader.ended()
        raise Unavailable("the prefill worker ended the KV transfer early")

    failure: BatonError | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            await reading
            watching.cancel()
    except* BatonError as group:
        failure = group.exceptions[0]  # type: ignore[assignment]
    if failure is not None:
        raise failure


@asynccontextmanager
async def _deadline(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"the KV transfer timed out after {seconds:g} s: {what}") from error
