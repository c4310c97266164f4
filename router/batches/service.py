"""Files and batches as one router has them: what clients ask of them, and their runner."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson

from baton.core.ids import TenantId
from baton.core.states import Role
from router.batches.batch import ENDPOINTS, Batch, BatchStatus
from router.batches.batch_request import BatchResponse
from router.batches.batch_runner import BatchRunner
from router.batches.batch_store import BatchStore
from router.batches.concurrency import RouterLoad, num_allowed_batch_requests
from router.batches.disk_quota import DiskQuota
from router.batches.file_limits import FileLimits, UploadAdmission
from router.batches.file_store import FileStore, FileUpload, StoredFile
from router.errors import ApiError
from router.openai.context import RouterContext
from router.openai.request_handler import ChatHandler, CompletionHandler, GenerationHandler
from router.tenants.fair_thread_pool import FairThreadPool

HANDLERS: dict[str, type[GenerationHandler]] = dict(
    zip(ENDPOINTS, (ChatHandler, CompletionHandler), strict=True)
)


DISK_THREADS = 4
"""For what clients ask of files and batches; a disk may be slow."""

Result = TypeVar("Result")


class BatchService:
    """Methods that touch the disk are called by :meth:`on_disk`; those that don't say so."""

    def __init__(
        self,
        service: RouterContext,
        library: BatchStore,
        *,
        lines_per_worker: int,
        max_file_bytes: int,
        folder_bytes: int,
        file_limits: FileLimits | None = None,
    ) -> None:
        self.max_file_bytes = max_file_bytes
        self._service = service
        self._library = library
        self._lines_per_worker = lines_per_worker
        self._space = DiskQuota(library, folder_bytes)
        self._file_limits = file_limits or FileLimits()
        self._uploads = UploadAdmission(
            service.clock, lambda: service.cluster.num_routers, service.ledger
        )
        self._threads = FairThreadPool(DISK_THREADS, "files")
        self._runner = BatchRunner(
            library,
            self._ask,
            self._room,
            service.clock,
            service.config.max_body_bytes,
            folder_bytes,
        )

    async def run(self) -> None:
        """Answers batches until cancelled."""
        if self._lines_per_worker:
            await self._runner.run()

    def upload_turn(self, tenant: TenantId) -> AbstractContextManager[None]:
        """As long as an upload is under way; on the event loop. It raises RateLimited."""
        return self._uploads.enter(tenant, self.file_limits(tenant))

    def file_limits(self, tenant: TenantId) -> FileLimits:
        return self._file_limits.of(self._service.doorkeeper.roll.tenant(tenant))

    async def on_disk(
        self, tenant: TenantId, call: Callable[..., Result], *arguments: Any
    ) -> Result:
        """In a thread, in the tenant's turn. Raises Problem (503) where the operator's folder is
        full, or none."""
        try:
            return await self._threads.run(tenant, partial(call, *arguments))
        except OSError as error:
            message = f"files can't be kept by this router: {error.strerror}"
            raise ApiError(
                503, message, kind="service_unavailable_error", code="no_folder"
            ) from error

    # -- files -----------------------------------------------------------------------------------

    def shelf(self, tenant: TenantId) -> FileStore:
        return self._library.shelf(tenant)

    def open_upload(self, tenant: TenantId, expected: int) -> FileUpload:
        """Room for ``expected`` bytes is its own. Raises Problem (413) when there is none."""
        limits, name = self.file_limits(tenant), self._service.new_id()

        def reserve(path: Path, least: int, wanted: int) -> int:
            return self._space.reserve(tenant, path, limits, least, wanted)

        return self.shelf(tenant).upload(name, self.max_file_bytes, expected, reserve)

    def add_file(
        self, tenant: TenantId, upload: FileUpload, filename: str, expires_seconds: int | None
    ) -> StoredFile:
        now = self.now
        expires = None if expires_seconds is None else now + expires_seconds
        file_id = f"file-{upload.path.stem}"
        record = StoredFile(file_id, upload.size_bytes, now, filename, "batch", expires)
        self.shelf(tenant).add(record, upload.path)
        return record

    def delete_file(self, tenant: TenantId, file_id: str) -> None:
        """Raises Problem (404, 409)."""
        for batch in self._library.batches(tenant):
            if batch.input_file_id == file_id and not batch.is_over:
                raise ApiError(409, f"batch {batch.id} reads this file; cancel it first")
        self.shelf(tenant).delete(file_id)

    # -- batches ---------------------------------------------------------------------------------

    def create(
        self,
        tenant: TenantId,
        endpoint: str,
        input_file_id: str,
        metadata: dict[str, str] | None,
        output_seconds: int | None,
    ) -> Batch:
        """Raises Problem (400, 404, 429)."""
        record = self.shelf(tenant).get(input_file_id)
        if record.purpose != "batch":
            message = f"{input_file_id} has purpose {record.purpose!r}, and must have 'batch'"
            raise ApiError(400, message, param="input_file_id", code="invalid_value")
        batch = Batch(
            f"batch_{self._service.new_id()}", tenant, endpoint, input_file_id, self.now,
            metadata, output_seconds,
        )  # fmt: skip
        with self._space.locked():
            self._library.create(batch)
        return batch

    def batch(self, tenant: TenantId, batch_id: str) -> Batch:
        """Raises Problem (404)."""
        return self._library.get(tenant, batch_id)

    def batches(self, tenant: TenantId) -> list[Batch]:
        """Newest first."""
        return list(self._library.batches(tenant))

    def cancel(self, tenant: TenantId, batch_id: str) -> Batch:
        """Raises Problem (404, 409)."""
        batch = self.batch(tenant, batch_id)
        if batch.is_over or batch.status is BatchStatus.FINALIZING:
            raise ApiError(409, f"batch {batch_id} is {batch.status.value} already")
        self._library.cancel(batch)
        return self.batch(tenant, batch_id)

    def hurry(self) -> None:
        """Something is new; on the event loop."""
        self._runner.hurry()

    @property
    def now(self) -> int:
        return self._service.clock.wall_nanoseconds() // 1_000_000_000

    # -- what the runner asks --------------------------------------------------------------------

    async def _ask(self, tenant: TenantId, endpoint: str, data: bytes) -> BatchResponse:
        exchange = HANDLERS[endpoint](self._service)
        status, body = await exchange.answer_alone(data, tenant)
        return BatchResponse(status, exchange.request_id, orjson.loads(body))

    def _room(self, running: int) -> int:
        service = self._service
        business = RouterLoad(
            inside=max(service.gate.inside - running, 0),
            limit=service.config.max_concurrent_requests,
            prefill=service.cluster.ready(Role.PREFILL),
            decode=service.cluster.ready(Role.DECODE),
            draining=service.draining,
        )
        return num_allowed_batch_requests(self._lines_per_worker, running, business)
