"""The service behind the routes for files and batches; it also runs the batches."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from baton.concurrency.threads import FairThreadPool
from baton.core.ids import TenantId
from router.batches.batch import ENDPOINTS, Batch, BatchStatus
from router.batches.batch_request import BatchResponse
from router.batches.batch_runner import BatchRunner
from router.batches.batch_store import BatchStore
from router.batches.concurrency import RouterLoad, num_allowed_batch_requests
from router.batches.disk_quota import DiskQuota
from router.batches.file_limits import DownloadAdmission, FileLimits, UploadAdmission
from router.batches.file_store import FileStore, FileUpload, StoredFile
from router.errors import ApiError
from router.forwarding.forward import SERVER_ENDPOINTS
from router.http.json_limits import max_json_values
from router.limits import DISK_THREADS
from router.openai.endpoints import CHATS, COMPLETIONS
from router.responses.endpoints import responses_endpoint
from router.serving.context import RouterContext
from router.serving.request_handler import Endpoint, RequestHandler

EMBEDDINGS = SERVER_ENDPOINTS["/v1/embeddings"]
HANDLERS: dict[str, Endpoint] = dict(
    zip(ENDPOINTS, (CHATS, COMPLETIONS, responses_endpoint(), EMBEDDINGS), strict=True)
)
"""Endpoints by path. A batch's responses are written to its output file only: unlike other
responses, they are not kept for later requests."""

Result = TypeVar("Result")


class BatchService:
    """Serves the files and batches of all tenants. Methods access the disk and must be called
    through :meth:`run_in_thread`, unless their docstring says otherwise."""

    def __init__(
        self,
        context: RouterContext,
        store: BatchStore,
        *,
        requests_per_worker: int,
        max_file_bytes: int,
        folder_bytes: int,
        file_limits: FileLimits | None = None,
    ) -> None:
        self.max_file_bytes = max_file_bytes
        self._context = context
        self._store = store
        self._requests_per_worker = requests_per_worker
        self._disk_quota = DiskQuota(store, folder_bytes)
        self._file_limits = file_limits or FileLimits()
        self._uploads = UploadAdmission(
            context.clock, lambda: context.cluster.num_routers, context.tenants.usage_recorder
        )
        self._downloads = DownloadAdmission()
        self._threads = FairThreadPool(DISK_THREADS, "files")
        self._runner = BatchRunner(
            store,
            self._send_request,
            self._max_running,
            context.clock,
            context.config.max_body_bytes,
            folder_bytes,
            lambda: max_json_values(context.models.max_model_tokens),
        )

    def set_limits(self, file_limits: FileLimits, max_line_bytes: int) -> None:
        """Change the limits for uploads and batches that begin from now on."""
        self._file_limits = file_limits
        self._runner.max_line_bytes = max_line_bytes

    async def run(self) -> None:
        """Run batches until cancelled. Return at once if ``requests_per_worker`` is 0: then this
        router runs no batches."""
        if self._requests_per_worker:
            await self._runner.run()

    def admit_upload(self, tenant: TenantId) -> AbstractContextManager[None]:
        """Admit an upload for the duration of a ``with`` block; call on the event loop. Raises
        RateLimited."""
        return self._uploads.admit(tenant, self.file_limits(tenant))

    def begin_download(self, tenant: TenantId) -> Callable[[], None]:
        """Admit a download, and return a function that ends it; call both on the event loop. Raises
        Overloaded."""
        tenants = self._context.tenants
        weight = tenants.authenticator.directory.tenant(tenant).weight
        return self._downloads.begin(tenant, weight, shared=tenants.admission.is_shared)

    @property
    def num_downloads(self) -> int:
        return self._downloads.num_in_use

    def file_limits(self, tenant: TenantId) -> FileLimits:
        return self._file_limits.with_tenant_limits(
            self._context.tenants.authenticator.directory.tenant(tenant)
        )

    async def run_in_thread(
        self, tenant: TenantId, call: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Run ``call`` in a thread; tenants share the threads fairly. Raises ApiError (503) if the
        folder for files and batches can't be used, for example because the disk is full."""
        try:
            return await self._threads.run(tenant, partial(call, *arguments))
        except OSError as error:
            message = f"this router can't store files: {error.strerror}"
            raise ApiError(
                503, message, error_type="service_unavailable_error", code="no_folder"
            ) from error

    # -- files -----------------------------------------------------------------------------------

    def file_store(self, tenant: TenantId) -> FileStore:
        return self._store.file_store(tenant)

    def open_upload(self, tenant: TenantId, expected: int) -> FileUpload:
        """Begin an upload, and reserve space for ``expected`` bytes. Raises ApiError (413) if there
        is not enough space."""
        limits, name = self.file_limits(tenant), self._context.ids.new_id()

        def reserve(path: Path, least: int, wanted: int) -> int:
            return self._disk_quota.reserve(tenant, path, limits, least, wanted)

        return self.file_store(tenant).upload(name, self.max_file_bytes, expected, reserve)

    def add_file(
        self, tenant: TenantId, upload: FileUpload, filename: str, expires_seconds: int | None
    ) -> StoredFile:
        now = self.now
        expires = None if expires_seconds is None else now + expires_seconds
        file_id = f"file-{upload.path.stem}"
        record = StoredFile(file_id, upload.size_bytes, now, filename, "batch", expires)
        self.file_store(tenant).add(record, upload.path)
        return record

    def delete_file(self, tenant: TenantId, file_id: str) -> None:
        """Delete a file. Raises ApiError: 404 if there is no such file, 409 if an unfinished batch
        reads it."""
        for batch in self._store.list_batches(tenant):
            if batch.input_file_id == file_id and not batch.is_finished:
                raise ApiError(409, f"batch {batch.id} reads this file; cancel the batch first")
        self.file_store(tenant).delete(file_id)

    # -- batches ---------------------------------------------------------------------------------

    def create(
        self,
        tenant: TenantId,
        endpoint: str,
        input_file_id: str,
        metadata: dict[str, str] | None,
        output_seconds: int | None,
    ) -> Batch:
        """Create a batch. Raises ApiError: 404 if there is no such input file, 400 if the file has
        another purpose, 429 if the tenant has too many unfinished batches."""
        record = self.file_store(tenant).get(input_file_id)
        if record.purpose != "batch":
            message = f"{input_file_id} has purpose {record.purpose!r}; it must be 'batch'"
            raise ApiError(400, message, param="input_file_id", code="invalid_value")
        batch = Batch(
            f"batch_{self._context.ids.new_id()}", tenant, endpoint, input_file_id, self.now,
            metadata, output_seconds,
        )  # fmt: skip
        with self._store.lock():
            self._store.create(batch)
        return batch

    def get_batch(self, tenant: TenantId, batch_id: str) -> Batch:
        """Return a batch. Raises ApiError (404) if there is no such batch."""
        return self._store.get(tenant, batch_id)

    def list_batches(self, tenant: TenantId) -> list[Batch]:
        """Return the tenant's batches, newest first."""
        return list(self._store.list_batches(tenant))

    def cancel(self, tenant: TenantId, batch_id: str) -> Batch:
        """Cancel a batch. Raises ApiError: 404 if there is no such batch, 409 if it has ended or is
        finalizing."""
        batch = self.get_batch(tenant, batch_id)
        if batch.is_finished or batch.status is BatchStatus.FINALIZING:
            raise ApiError(409, f"batch {batch_id} can't be cancelled: it is {batch.status.value}")
        self._store.cancel(batch)
        return self.get_batch(tenant, batch_id)

    def notify_runner(self) -> None:
        """Tell the runner about new work; call on the event loop."""
        self._runner.check_now()

    @property
    def now(self) -> int:
        return self._context.clock.wall_nanoseconds() // 1_000_000_000

    # -- used by the runner ----------------------------------------------------------------------

    async def _send_request(
        self, tenant: TenantId, endpoint: str, take_body: Callable[[], bytes]
    ) -> BatchResponse:
        handler = RequestHandler(self._context, HANDLERS[endpoint])
        status, body = await handler.answer_batch_request(take_body, tenant)
        return BatchResponse(status, handler.request_id, body)

    def _max_running(self, running: int) -> int:
        context = self._context
        load = RouterLoad(
            num_requests=max(context.tenants.request_limiter.num_in_use - running, 0),
            limit=context.config.max_concurrent_requests,
            prefill=context.cluster.ready_workers(lambda kind: not kind.writes_answers),
            decode=context.cluster.ready_workers(lambda kind: kind.writes_answers),
            draining=context.draining,
        )
        return num_allowed_batch_requests(self._requests_per_worker, running, load)
