"""The KV exports of this worker: one for each request whose KV another worker imports."""

import asyncio
from collections.abc import Callable

from baton.core.ids import RequestId, TokenId
from baton.core.kv_transfer import KvTransferOpen
from baton.engine.result import PrefillProgress
from baton.errors import Invalid, NotFound
from baton.transport.selection import choose_transport
from baton.worker.context import WorkerContext
from baton.worker.job import Job
from prefill_worker.kv_export import KvExport, LocalKvExportStream


class KvExporter:
    """Implements :class:`baton.worker.sides.KvExports`."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._exports: dict[RequestId, tuple[Job, KvExport]] = {}  # by placement id
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._exports)

    def open(self, job: Job, num_tokens: int, on_close: Callable[[bool], None]) -> None:
        context = self._context
        kv_export = KvExport(
            context.layout,
            num_tokens,
            context.engine_config.window,
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
        kv_export = await self._wait_for_export(opening.request_id)
        kv_export.attach_reader(transports[name].export())
        return LocalKvExportStream(kv_export)

    def _check_compatible(self, opening: KvTransferOpen) -> None:
        context = self._context
        if opening.source_generation != context.generation:
            raise NotFound(f"worker {context.id} has restarted since the request was placed")
        if opening.model_digest != context.model_digest.hex():
            raise Invalid(
                "the prefill and the decode worker have different models or different "
                "quantization; all workers of a cluster must have the same model and quantization",
                param="model_digest",
            )
        if opening.kv_layout != context.layout.name:
            raise Invalid(
                f"the prefill worker has KV layout {context.layout.name}, the decode worker "
                f"{opening.kv_layout}: all workers of a cluster must have the same model, dtype, "
                "kv_dtype and block_tokens",
                param="kv_layout",
            )

    async def _wait_for_export(self, placement: RequestId) -> KvExport:
        """Return the placement's export. Wait for it if necessary, since the importing worker may
        ask for it before the request has arrived."""
        try:
            async with asyncio.timeout(self._context.config.arrival_timeout_seconds):
                while True:
                    entry = self._exports.get(placement)
                    if entry is not None:
                        return entry[1]
                    self._added.clear()
                    await self._added.wait()
        except TimeoutError as error:
            raise NotFound(f"request {placement} is not on this worker") from error
