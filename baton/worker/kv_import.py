"""The reader's side of a hand-off: reserve, read, verify, acknowledge, start."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from baton.clock import Clock
from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockId, TokenId
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
from baton.worker.engine_thread import EngineHandle
from baton.worker.kv_layout import KvLayout
from baton.worker.reservation_queue import ReservationQueue

READ_ATTEMPTS = 2
"""A read that failed or arrived damaged is repeated once; then the request moves on."""


@dataclass(slots=True)
class KvTransferStats:
    """What the hand-off of one request took. Seconds; ``exposed`` counts from the arrival of
    the last chunk, announced when the prompt was computed, to the start of decoding: what
    shipping adds to the wait for the second token. The prompt was nearly computed, there was room,
    and all had landed at ``scheduled_at``, ``reserved_at`` and ``landed_at``."""

    transport: str = ""
    size_bytes: int = 0
    reading_seconds: float = 0.0
    exposed_seconds: float = 0.0
    last_chunk_at: float = 0.0
    num_cached_blocks: int = 0
    scheduled_at: float | None = None
    reserved_at: float | None = None
    landed_at: float | None = None

    def details(self) -> dict[str, str]:
        return {
            "transport": self.transport,
            "bytes_shipped": str(self.size_bytes),
            "ship_seconds": f"{self.reading_seconds:.6f}",
            "ship_exposed_seconds": f"{self.exposed_seconds:.6f}",
            "decode_cached_blocks": str(self.num_cached_blocks),
        }


@dataclass(slots=True)
class KvImport:
    """One request's way in. ``strays`` are transfers that could not be ended: the reservation's
    blocks must be quarantined until they can."""

    reservation: Reservation | None = None
    transport: Transport | None = None
    peer: Peer | None = None
    num_read: int = 0
    strays: tuple[Transfer, ...] = ()
    shipment: KvTransferStats = field(default_factory=KvTransferStats)


@dataclass(frozen=True, slots=True)
class KvImportTimeouts:
    """Seconds. ``queue_seconds`` bounds the wait until the prompt is nearly computed,
    ``chunk_seconds`` for each later event (a prompt may pause for others), ``read_seconds`` one
    read, ``reserve_seconds`` the wait for room."""

    queue_seconds: float = 240.0
    chunk_seconds: float = 120.0
    read_seconds: float = 20.0
    reserve_seconds: float = 60.0


class KvImporter:
    """Brings requests in, side by side."""

    def __init__(
        self,
        engine: EngineHandle,
        peers: KvImportConnector,
        transports: dict[str, Transport],
        layout: KvLayout,
        model_digest: str,
        host: str,
        clock: Clock,
        config: KvImportTimeouts,
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._transports = transports
        self._layout = layout
        self._model_digest = model_digest
        self._host = host
        self._clock = clock
        self._config = config
        self._room = ReservationQueue()

    def notice_room(self) -> None:
        """Blocks may have become free: who waits asks again."""
        self._room.notice()

    async def bring_in(
        self, spec: RequestSpec, chain: BlockKeyChain, source: WorkerRef, landing: KvImport
    ) -> TokenId | None:
        """Runs one hand-off until all KV has landed; returns the token to start from, or None
        when the answer ended with it.

        What it holds is in ``landing``; the caller starts the request at the engine, or aborts
        it if this raises (Unavailable, DeadlineExceeded, Invalid, NotFound; Corrupt for what a
        sound source would not say, which another one may mend) or is cancelled.
        """
        async with self._peers.pull(source.address, self._opening(spec, source)) as reader:
            scheduled = await self._next(reader, self._config.queue_seconds)
            if not isinstance(scheduled, KvTransferScheduled):
                raise Corrupt(f"a hand-off begins with `scheduled`, not {type(scheduled).__name__}")
            await self._prepare(spec, chain, source, scheduled, landing)
            while not isinstance(
                event := await self._next(reader, self._config.chunk_seconds), KvTransferDone
            ):
                if not isinstance(event, KvTransferChunk):
                    raise Corrupt(f"unexpected {type(event).__name__} in a hand-off")
                await self._take_chunk(reader, event, landing)
            if event.finished:
                return None
            _check_whole(landing)
            shipment = landing.shipment
            shipment.landed_at = self._clock.monotonic()
            shipment.exposed_seconds = shipment.landed_at - shipment.last_chunk_at
            return event.token_id

    def _opening(self, spec: RequestSpec, source: WorkerRef) -> KvTransferOpen:
        return KvTransferOpen(
            request_id=spec.request_id,
            epoch=spec.epoch,
            source_generation=source.generation,
            model_digest=self._model_digest,
            kv_layout=self._layout.name,
            transports=tuple(self._transports),
            host=self._host,
        )

    async def _next(self, reader: KvImportStream, seconds: float) -> KvTransferEvent:
        async with _deadline(seconds, "the prefill worker was silent"):
            return await reader.next_event()

    async def _prepare(
        self,
        spec: RequestSpec,
        chain: BlockKeyChain,
        source: WorkerRef,
        scheduled: KvTransferScheduled,
        landing: KvImport,
    ) -> None:
        """Connects and reserves."""
        endpoint = scheduled.endpoint
        if scheduled.num_tokens != len(spec.token_ids):
            raise Corrupt(f"source has {scheduled.num_tokens} tokens, not {len(spec.token_ids)}")
        if scheduled.checksum_algorithm != self._layout.checksum_algorithm:
            raise Corrupt(f"unknown checksum algorithm {scheduled.checksum_algorithm!r}")
        if (endpoint.owner, endpoint.generation) != (source.id, source.generation):
            raise Corrupt(
                f"{source.id} of life {source.generation} offers the memory of {endpoint.owner!r} "
                f"of life {endpoint.generation}"
            )
        transport = self._transports.get(endpoint.transport)
        if transport is None:
            raise Corrupt(f"source chose {endpoint.transport!r}, which was not offered")
        landing.transport = transport
        landing.shipment.transport = transport.name
        landing.shipment.scheduled_at = self._clock.monotonic()
        landing.peer = await _connected(transport, endpoint)
        landing.reservation = await self._reserve(spec, chain)
        landing.shipment.reserved_at = self._clock.monotonic()
        landing.num_read = landing.reservation.num_cached_blocks
        landing.shipment.num_cached_blocks = landing.num_read

    async def _reserve(self, spec: RequestSpec, chain: BlockKeyChain) -> Reservation:
        async def ask() -> Reservation | None:
            return await self._engine.call(lambda engine: engine.reserve(spec, chain))

        async with _deadline(self._config.reserve_seconds, "no room on the decode worker"):
            if not self._room and (reservation := await ask()) is not None:
                return reservation
            tokens = await self._engine.call(lambda engine: engine.expected_tokens(spec))
            return await self._room.get(self._clock.monotonic(), tokens, ask, spec.priority)

    async def _take_chunk(
        self, reader: KvImportStream, chunk: KvTransferChunk, landing: KvImport
    ) -> None:
        """Reads what of the chunk is not here yet, and acknowledges."""
        assert landing.reservation is not None
        landing.shipment.last_chunk_at = self._clock.monotonic()
        end = chunk.first_block + len(chunk.blocks)
        fits = 0 <= chunk.first_block < end <= len(landing.reservation.block_ids)
        if not fits or chunk.first_block > landing.num_read:
            raise Corrupt(f"blocks [{chunk.first_block}, {end}) do not follow {landing.num_read}")
        if end > landing.num_read:
            blocks = chunk.blocks[landing.num_read - chunk.first_block :]
            block_ids = landing.reservation.block_ids[landing.num_read : end]
            await _read_while_exported(reader, self._read(blocks, block_ids, landing))
            landing.num_read = end
        await reader.acknowledge(end)

    async def _read(
        self, blocks: Sequence[BlockRef], block_ids: Sequence[BlockId], landing: KvImport
    ) -> None:
        """Raises Corrupt or Unavailable after the last attempt."""
        if any(block.size_bytes != self._layout.block_bytes for block in blocks):
            raise Corrupt(f"a block has {self._layout.block_bytes} bytes here")
        for attempt in range(READ_ATTEMPTS):
            try:
                if await self._read_once(blocks, block_ids, landing):
                    return
            except Unavailable:
                if attempt + 1 == READ_ATTEMPTS or landing.strays:
                    raise
        raise Corrupt(f"blocks arrived damaged over {landing.shipment.transport}")

    async def _read_once(
        self, blocks: Sequence[BlockRef], block_ids: Sequence[BlockId], landing: KvImport
    ) -> bool:
        """Whether all that arrived is what was announced."""
        assert landing.transport is not None and landing.peer is not None
        spans = self._layout.spans(blocks, block_ids)
        good = partial(self._layout.good, self._layout.checksum_algorithm, blocks, block_ids)
        try:
            result = await read_and_verify(
                landing.transport, landing.peer, spans, good, self._config.read_seconds, self._clock
            )
        except TransferFailed as error:
            landing.strays = error.strays
            raise
        except Invalid as error:  # blocks that lie outside of the source's memory
            raise Corrupt(f"source {landing.peer.endpoint.owner}: {error}") from error
        landing.shipment.size_bytes += result.size_bytes
        landing.shipment.reading_seconds += result.seconds
        return result.num_good == len(blocks)


def _check_whole(landing: KvImport) -> None:
    """Raises Corrupt unless every block of the reservation was shipped: what was never written must
    not be answered from."""
    assert landing.reservation is not None
    num_blocks = len(landing.reservation.block_ids)
    if landing.num_read < num_blocks:
        raise Corrupt(f"source shipped {landing.num_read} of {num_blocks} blocks and said it's all")


async def _connected(transport: Transport, endpoint: Endpoint) -> Peer:
    """Raises Corrupt for a descriptor that is none of the transport's."""
    try:
        return await run_in_thread(lambda: transport.connect(endpoint))
    except Invalid as error:
        raise Corrupt(f"source {endpoint.owner}: {error}") from error


async def _read_while_exported(reader: KvImportStream, reading: Coroutine[Any, Any, None]) -> None:
    """Ends the read with the stream: a source that stands still may never end it. Raises
    Unavailable then."""

    async def watch() -> None:
        await reader.ended()
        raise Unavailable("the prefill worker ended the hand-off early")

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
        raise DeadlineExceeded(f"{what} for {seconds:g} s") from error
