"""The receiving side of a KV transfer: it opens the transfer and reserves blocks for it."""

from dataclasses import dataclass

from baton.concurrency.threads import run_in_thread
from baton.core.ids import TokenId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import (
    Endpoint,
    KvTransferOpen,
    KvTransferScheduled,
    WorkerRef,
)
from baton.core.request import RequestSpec
from baton.engine.engine import Reservation
from baton.engine.key_chain import BlockKeyChain
from baton.errors import Corrupt, Invalid
from baton.rpc.worker_client import KvImportConnector
from baton.transport.base import Peer, Transport
from baton.worker.block_reader import BlockReader, BlockSource
from baton.worker.context import WorkerContext
from decode_worker.chunk_reader import ChunkReader
from decode_worker.import_state import KvImport
from decode_worker.reservation_queue import ReservationQueue


@dataclass(frozen=True, slots=True)
class KvImportTimeouts:
    """Time limits of an import. ``read_seconds`` bounds a single read, and ``staging_seconds`` the
    wait for space for encoded blocks. The waits for the prefill and for free blocks have no limits
    here: the router ends a request if the worker that it waits for makes no progress."""

    read_seconds: float = 20.0
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
        self._reader = BlockReader(
            context.layout, context.staging, context.codecs, context.clock, timeouts.staging_seconds
        )

    @property
    def num_imported_blocks(self) -> int:
        return self._reader.num_blocks_read

    def notify_blocks_freed(self) -> None:
        """Retry the waiting reservations: blocks may have become free."""
        self._reservation_queue.notify_blocks_freed()

    def sweep(self) -> None:
        """Free the staging space of abandoned reads that have ended. Called regularly."""
        self._reader.sweep()

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
        kv_import.accepted_codecs = self._reader.accepted(exact=spec.exact_kv)
        opening = self._build_open_message(spec, source, kv_import.accepted_codecs)
        async with self._connector.open_kv_import(source.address, opening) as stream:
            scheduled = await stream.next_event()
            if not isinstance(scheduled, KvTransferScheduled):
                raise Corrupt(
                    "a KV transfer must begin with KvTransferScheduled, not "
                    f"{type(scheduled).__name__}"
                )
            await self._connect_and_reserve(spec, chain, source, scheduled, kv_import)
            chunks = ChunkReader(kv_import, stream, self._reader, self._clock)
            event = await chunks.read_all()
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
        kv_import.stats.transport = transport.name
        kv_import.stats.scheduled_at = self._clock.monotonic()
        peer = await _connect(transport, endpoint)
        kv_import.source = BlockSource(transport, peer, self._timeouts.read_seconds)
        kv_import.reservation = await self._reserve(spec, chain)
        kv_import.stats.reserved_at = self._clock.monotonic()
        kv_import.num_read_blocks = kv_import.reservation.num_cached_blocks
        kv_import.stats.num_cached_blocks = kv_import.num_read_blocks

    async def _reserve(self, spec: RequestSpec, chain: BlockKeyChain) -> Reservation:
        async def try_reserve() -> Reservation | None:
            return await self._engine.call(lambda engine: engine.reserve_blocks(spec, chain))

        if not self._reservation_queue and (reservation := await try_reserve()) is not None:
            return reservation
        tokens = await self._engine.call(lambda engine: engine.predict_answer_tokens(spec))
        return await self._reservation_queue.reserve(
            self._clock.monotonic(), tokens, try_reserve, spec.priority
        )


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
