"""Files and batches as one router has them: what clients ask of them, and their runner."""

import orjson

from baton.core.ids import TenantId
from baton.core.states import Role
from router.batches.batch import ENDPOINTS, Batch, Status
from router.batches.library import Library
from router.batches.line import Reply
from router.batches.room import Business, lines_now
from router.batches.runner import Runner
from router.batches.shelf import MAX_FILES, FileRecord, Shelf, Upload
from router.exchange import AnswerExchange, ChatExchange, CompletionExchange
from router.problem import Problem
from router.service import Service

EXCHANGES: dict[str, type[AnswerExchange]] = dict(
    zip(ENDPOINTS, (ChatExchange, CompletionExchange), strict=True)
)


class Desk:
    """Its methods but :meth:`run` touch the disk: they are called off the event loop."""

    def __init__(
        self,
        service: Service,
        library: Library,
        *,
        lines_per_worker: int,
        max_file_bytes: int,
        folder_bytes: int,
    ) -> None:
        self.max_file_bytes = max_file_bytes
        self._service = service
        self._library = library
        self._lines_per_worker = lines_per_worker
        self._folder_bytes = folder_bytes
        self._runner = Runner(
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

    # -- files -----------------------------------------------------------------------------------

    def shelf(self, tenant: TenantId) -> Shelf:
        return self._library.shelf(tenant)

    def open_upload(self, tenant: TenantId) -> Upload:
        """Raises Problem when there is no room."""
        if len(self.shelf(tenant).list()) >= MAX_FILES:
            raise Problem(413, f"there are {MAX_FILES} files, and that is the limit")
        room = self._folder_bytes - self._library.used_bytes()
        if room <= 0:
            raise Problem(413, "there is no room for files: delete some", code="no_space")
        return self.shelf(tenant).upload(self._service.new_id(), min(self.max_file_bytes, room))

    def add_file(
        self, tenant: TenantId, upload: Upload, filename: str, expires_seconds: int | None
    ) -> FileRecord:
        now = self.now
        expires = None if expires_seconds is None else now + expires_seconds
        file_id = f"file-{upload.path.stem}"
        record = FileRecord(file_id, upload.size_bytes, now, filename, "batch", expires)
        self.shelf(tenant).add(record, upload.path)
        return record

    def delete_file(self, tenant: TenantId, file_id: str) -> None:
        """Raises Problem (404, 409)."""
        for batch in self._library.batches(tenant):
            if batch.input_file_id == file_id and not batch.is_over:
                raise Problem(409, f"batch {batch.id} reads this file; cancel it first")
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
            raise Problem(400, message, param="input_file_id", code="invalid_value")
        batch = Batch(
            f"batch_{self._service.new_id()}", tenant, endpoint, input_file_id, self.now,
            metadata, output_seconds,
        )  # fmt: skip
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
        if batch.is_over or batch.status is Status.FINALIZING:
            raise Problem(409, f"batch {batch_id} is {batch.status.value} already")
        self._library.cancel(batch)
        return self.batch(tenant, batch_id)

    def hurry(self) -> None:
        """Something is new; on the event loop."""
        self._runner.hurry()

    @property
    def now(self) -> int:
        return self._service.clock.wall_nanoseconds() // 1_000_000_000

    # -- what the runner asks --------------------------------------------------------------------

    async def _ask(self, tenant: TenantId, endpoint: str, data: bytes) -> Reply:
        exchange = EXCHANGES[endpoint](self._service)
        status, body = await exchange.answer_alone(data, tenant)
        return Reply(status, exchange.request_id, orjson.loads(body))

    def _room(self, running: int) -> int:
        service = self._service
        business = Business(
            inside=max(service.gate.inside - running, 0),
            limit=service.config.max_concurrent_requests,
            prefill=service.cluster.ready(Role.PREFILL),
            decode=service.cluster.ready(Role.DECODE),
            draining=service.draining,
        )
        return lines_now(self._lines_per_worker, running, business)
