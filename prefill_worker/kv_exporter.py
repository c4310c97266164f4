"""The KV exports of this worker: one for each request whose KV another worker imports."""

import asyncio
from collections.abc import Callable

from baton.core.ids import RequestId, TokenId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import KvTransferOpen
from baton.engine.result import PrefillProgress
from baton.errors import Invalid, NotFound
from baton.transport.selection import LOCAL_ONLY, choose_transport
from baton.worker.block_encoder import BlockEncoder
from baton.worker.context import WorkerContext
from baton.worker.job import Job
from prefill_worker.export_encoder import ExportCodec, ExportEncoder
from prefill_worker.kv_export import KvExport, LocalKvExportStream


class KvExporter:
    """Implements :class:`baton.worker.sides.KvExports`."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._encoder = BlockEncoder(context.layout, context.staging, context.codecs)
        self._exports: dict[RequestId, tuple[Job, KvExport]] = {}  # by placement id
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._exports)

    def open(self, job: Job, num_tokens: int, on_close: Callable[[bool], None]) -> None:
        context = self._context
        kv_export = KvExport(
            context.layout,
            num_tokens,
            context.engine_config.window_of(job.spec.attention_window),
            context.config.reserve_ahead_tokens,
            on_close,
        )
        self._exports[job.spec.request_id] = (job, kv_export)
        self._added.set()

    def close(self, job: Job) -> None:
        entry = self._exports.pop(job.spec.request_id, None)
        if entry is not None:
            entry[1].close()

    def record_progress(self, progress: PrefillProgress) -> None:
        entry = self._exports.get(progress.request_id)
        if entry is not None:
            entry[1].record_progress(progress)

    def finish_prefill(self, job: Job, token_id: TokenId, finished: bool) -> None:
        job.prefilled_at = self._context.clock.monotonic()
        entry = self._exports.get(job.spec.request_id)
        if entry is not None:  # it may have been closed by the delivery of the first token
            entry[1].finish_prefill(token_id, finished)

    def unread_jobs(self) -> list[Job]:
        context = self._context
        oldest = context.clock.monotonic() - context.config.export_timeout_seconds
        return [
            job
            for job, kv_export in self._exports.values()
            if not kv_export.has_reader
            and job.prefilled_at is not None
            and job.prefilled_at < oldest
        ]

    async def attach_reader(self, opening: KvTransferOpen) -> LocalKvExportStream:
        self._check_compatible(opening)
        transports = self._context.transports
        name = choose_transport(
            tuple(transports), opening.transports, self._context.host == opening.host
        )
        job, kv_export = await self._wait_for_export(opening.request_id)
        encoder = None if name in LOCAL_ONLY else self._open_encoder(job, kv_export, opening)
        kv_export.attach_reader(transports[name].export(), encoder)
        return LocalKvExportStream(kv_export)

    def _open_encoder(
        self, job: Job, kv_export: KvExport, opening: KvTransferOpen
    ) -> ExportEncoder | None:
        """Return an encoder with the codec that the request should use. Return None if there is
        none, if one of the two workers does not have it, or if it is lossy and the request's KV
        must be exact."""
        context, wanted = self._context, job.spec.kv_codec
        usable = self._encoder.codecs.intersection(opening.codecs)
        if wanted not in usable or (job.spec.exact_kv and wanted.is_lossy):
            return None
        exact = KvCodecName.LOSSLESS if KvCodecName.LOSSLESS in usable else KvCodecName.NONE
        recent = max(0, kv_export.num_tokens - context.config.codec_recent_tokens)
        export_codec = ExportCodec(wanted, exact, recent // context.engine_config.block_tokens)
        return ExportEncoder(self._encoder, export_codec)

    def _check_compatible(self, opening: KvTransferOpen) -> None:
        context = self._context
        if opening.source_generation != context.generation:
            raise NotFound(f"worker {context.id} has restarted since the request was placed")
        if opening.model_digest != context.model_digest.hex():
            raise Invalid(
                "the prefill and the decode worker have different weights or different "
                "quantization; only equal workers may be placed together",
                param="model_digest",
            )
        if opening.kv_layout != context.layout.name:
            raise Invalid(
                f"the prefill worker has KV layout {context.layout.name}, the decode worker "
                f"{opening.kv_layout}; only workers with the same model, dtype, kv_dtype and "
                "block_tokens may be placed together",
                param="kv_layout",
            )

    async def _wait_for_export(self, placement: RequestId) -> tuple[Job, KvExport]:
        """Return the placement's job and export. Wait for it if necessary, since the importing
        worker may ask for it before the request has arrived."""
        try:
            async with asyncio.timeout(self._context.config.arrival_timeout_seconds):
                while True:
                    entry = self._exports.get(placement)
                    if entry is not None:
                        return entry
                    self._added.clear()
                    await self._added.wait()
        except TimeoutError as error:
            raise NotFound(f"request {placement} is not on this worker") from error
