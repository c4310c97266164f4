"""The decode side of a worker: imports KV, starts to decode, and lets answers migrate."""

from dataclasses import replace
from functools import partial

from baton.core.ids import Epoch
from baton.core.kv_transfer import WorkerRef
from baton.engine.constraint import Constraint
from baton.engine.engine import Engine
from baton.errors import Corrupt, Invalid
from baton.transport.link_meter import LinkMeter
from baton.transport.selection import LOCAL_ONLY
from baton.transport.unfinished_transfers import UnfinishedTransfers
from baton.worker.context import WorkerContext
from baton.worker.job import Job, placement_id
from baton.worker.kv_transfer_stats import KvTransferStats
from baton.worker.prompt_keys import hash_prompt
from baton.worker.sides import Migration
from decode_worker.import_state import KvImport
from decode_worker.kv_import import KvImporter

REMOTE_KV_IMPORTS = "pulls"
"""The name under which the link meter counts all links to workers on other hosts as one."""


class DecodeHandler:
    """Implements :class:`baton.worker.sides.DecodeSide`."""

    def __init__(self, context: WorkerContext, kv_importer: KvImporter) -> None:
        self._engine = context.engine
        self._key_hasher = context.key_hasher
        self._telemetry = context.telemetry
        self._kv_importer = kv_importer
        self._unfinished_transfers = UnfinishedTransfers()
        self._link_meter = LinkMeter()

    async def start_decode(
        self, job: Job, source: WorkerRef, constraint: Constraint | None
    ) -> bool:
        chain = await hash_prompt(job, self._key_hasher)
        kv_import = KvImport()
        self._telemetry.record_import_started(job, kv_import.stats)
        try:
            token_id = await self._kv_importer.import_kv(job.spec, chain, source, kv_import)
        finally:
            if kv_import.unfinished_transfers:
                self._quarantine(job, kv_import)
        self._record_link_speed(kv_import.stats)
        self._telemetry.record_import_finished(kv_import.stats)
        job.details.update(kv_import.stats.details())
        if token_id is None:
            return False
        request_id = job.spec.request_id
        try:
            await self._engine.call(
                lambda engine: engine.start_decoding(request_id, token_id, constraint)
            )
        except Invalid as error:  # the request was validated before; only the token is new
            raise Corrupt(f"source {source.id} sent invalid token {token_id}: {error}") from error
        return True

    def _record_link_speed(self, stats: KvTransferStats) -> None:
        """Record the link speed if the KV came from another host. Decoding doesn't count: it would
        make the link seem slow, so that the conductor would prefer even smaller encodings."""
        if stats.transport not in LOCAL_ONLY:
            self._link_meter.record(REMOTE_KV_IMPORTS, stats.size_bytes, stats.link_seconds)

    def _quarantine(self, job: Job, kv_import: KvImport) -> None:
        """Quarantine the blocks of a failed import until its unfinished transfers have ended. A
        later sweep releases them."""
        assert kv_import.source is not None and kv_import.reservation is not None
        request_id, reservation = job.spec.request_id, kv_import.reservation
        blocks = reservation.block_ids[reservation.num_cached_blocks :]

        def quarantine(engine: Engine) -> None:
            assert engine.abort(request_id, quarantine=True), "only the import ends a reservation"

        self._engine.send(quarantine)
        release = partial(Engine.release_quarantine, block_ids=blocks)
        self._unfinished_transfers.add(
            kv_import.source.transport,
            kv_import.unfinished_transfers,
            partial(self._engine.send, release),
        )

    async def begin_migration(self, job: Job) -> Migration | None:
        epoch = Epoch(job.spec.epoch + 1)
        next_spec = replace(job.spec, request_id=job.request_id, epoch=epoch)
        next_spec = replace(next_spec, request_id=placement_id(next_spec))
        old_id, new_id = job.spec.request_id, next_spec.request_id
        sequence = await self._engine.call(lambda engine: engine.begin_migration(old_id, new_id))
        return None if sequence is None else Migration(next_spec, sequence)

    def notify_blocks_freed(self) -> None:
        self._kv_importer.notify_blocks_freed()

    def sweep(self) -> None:
        self._unfinished_transfers.sweep()
        self._kv_importer.sweep()

    @property
    def num_imported_blocks(self) -> int:
        return self._kv_importer.num_imported_blocks

    @property
    def link_bytes_per_second(self) -> float | None:
        return self._link_meter.bytes_per_second(REMOTE_KV_IMPORTS)
