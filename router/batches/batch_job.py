"""Runs one batch: picks the requests to run next, and writes their results."""

import os
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from baton.core.ids import TenantId
from router.batches.batch import Batch, BatchStatus
from router.batches.batch_request import (
    BatchRequest,
    BatchResponse,
    InputLine,
    encode_output_line,
    parse_batch_request,
    parse_request_number,
)
from router.batches.batch_store import BatchStore
from router.batches.file_store import StoredFile
from router.batches.inflight_journal import InflightJournal
from router.errors import ApiError
from router.limits import MAX_BATCH_REQUESTS, MAX_ROUTER_DEATHS, MAX_VALUES

OUTPUT, ERROR = "output", "error"


class BatchJob:
    """Runs one batch. All methods access the disk, so call them off the event loop.

    Results are kept on disk: a job that is opened again runs only the requests without a result.
    Such a request is a *suspect* if it was in flight when a router died, since it may have killed
    the router. Suspects are run again too, but after the other requests, and the runner runs only
    one suspect at a time. If two routers have died while a request was in flight, it is not run
    again, but recorded as failed.

    Requests that are kept to be run later have no body: their lines are read again. So a job keeps
    no body in memory, however many of its requests are refused.
    """

    def __init__(
        self,
        store: BatchStore,
        batch: Batch,
        max_line_bytes: int,
        max_line_values: int = MAX_VALUES,
    ) -> None:
        self.batch = batch
        self._store = store
        self._max_line_bytes = max_line_bytes
        self._max_line_values = max_line_values
        self._retries: deque[BatchRequest] = deque()
        self._suspects: deque[BatchRequest] = deque()
        self._attempts = InflightJournal(store.path(batch, "attempts"))
        self._deaths: Counter[int] = Counter()
        self._custom_ids: set[str] = set()
        self._written: set[int] = set()
        self._requests: Iterator[BatchRequest] = iter(())
        self._parts: dict[str, BinaryIO] = {}
        self._input: BinaryIO | None = None
        self.num_running = 0
        self.paused_until = 0.0
        self.num_refusals = 0

    def open(self, now: float) -> None:
        """Start or continue the batch. The batch fails if its input file can't be read, or does not
        have 1 to :data:`MAX_BATCH_REQUESTS` lines."""
        if self.batch.status in (BatchStatus.FINALIZING, BatchStatus.CANCELLING):
            self._recover()
            return
        file_store = self._store.file_store(TenantId(self.batch.tenant))
        try:
            path = file_store.data_path(file_store.get(self.batch.input_file_id).id)
            total = _count_lines(path, self._max_line_bytes)
            if not 0 < total <= MAX_BATCH_REQUESTS:
                raise ApiError(
                    400, f"the file has {total} lines; it must have 1 to {MAX_BATCH_REQUESTS}"
                )
            self._input = path.open("rb")
        except (ApiError, OSError) as error:
            self.fail(str(error), now)
            return
        self._deaths = self._attempts.read_deaths()
        self.batch.completed = self.batch.failed = 0
        for kind, number in self._recover():
            self._written.add(number)
            self._count(kind == OUTPUT)
        self._requests = self._unwritten(self._input)
        self.batch.total = total
        if self.batch.status is BatchStatus.VALIDATING:
            self.batch.set_status(BatchStatus.IN_PROGRESS, now)
        self.save()

    def next_request(self, now: float, *, suspects: bool = True) -> BatchRequest | None:
        """Return the next request to run, with its body, or None if there is none. If ``suspects``
        is False, requests that may have killed a router are left for later. Invalid requests are
        recorded as failed."""
        self._check_cancelled_or_expired(now)
        while self.batch.status is BatchStatus.IN_PROGRESS:
            request = self._take_next(suspects)
            if request is None:
                return None
            try:
                request = self._with_body(request)
                if not request.error:
                    self._attempts.begin(request.number)
                    return request
                self._write(request, None, request.error_code, request.error)
            except OSError:
                self._requeue(request)
                raise
        return None

    def is_suspect(self, request: BatchRequest) -> bool:
        """Whether a router died while the request was in flight."""
        return self._deaths[request.number] > 0

    def put_back(self, request: BatchRequest) -> None:
        self.record_abandoned(request)
        self._requeue(request)

    def record_abandoned(self, request: BatchRequest) -> None:
        """Record that the request is not in flight any more, although it has no result."""
        if not self.batch.is_finished:
            self._attempts.end(request.number)

    def record_response(self, request: BatchRequest, response: BatchResponse) -> None:
        self._record(request, response)

    def record_crash(self, request: BatchRequest, why: str) -> None:
        """Record that the request raised an unexpected exception, which fails only this request."""
        self._record(request, None, "internal_error", why)

    def finish_if_done(self, now: float) -> bool:
        """Finish the batch if it has no request left to run. Return whether the batch is finished.
        Call this when none of its requests is in flight."""
        batch = self.batch
        if batch.is_finished:
            return True
        self._check_cancelled_or_expired(now)
        if self.num_running or (batch.status is BatchStatus.IN_PROGRESS and self._has_more()):
            return False
        if batch.status is BatchStatus.IN_PROGRESS:
            batch.set_status(BatchStatus.FINALIZING, now)
            self.save()
        self._publish_results(now)
        batch.set_status(batch.final_status, now)
        self.close()
        self.save()
        return True

    def save(self) -> None:
        self._store.save(self.batch)

    def close(self) -> None:
        self._attempts.close()
        for part in (*self._parts.values(), *([self._input] if self._input else [])):
            part.close()

    # -- the next request --------------------------------------------------------------------------

    def _unwritten(self, file: BinaryIO) -> Iterator[BatchRequest]:
        for line in _iter_lines(file, self._max_line_bytes):
            request = self._read(line)
            if request.custom_id is not None and request.custom_id in self._custom_ids:
                why = "custom_id was used by an earlier request"
                request = BatchRequest(request.line, request.custom_id, error=why)
            if request.custom_id is not None:
                self._custom_ids.add(request.custom_id)
            if line.number not in self._written:
                yield self._refuse_if_deadly(request)

    def _read(self, line: InputLine) -> BatchRequest:
        """Read and parse a line. Raises OSError."""
        assert self._input is not None
        data = os.pread(self._input.fileno(), line.size, line.offset)
        return parse_batch_request(line, data, self.batch.endpoint, self._max_line_values)

    def _with_body(self, request: BatchRequest) -> BatchRequest:
        """Return the request. If its body was dropped, read its line again. Raises OSError."""
        return request if request.error or request.body else self._read(request.line)

    def _refuse_if_deadly(self, request: BatchRequest) -> BatchRequest:
        """Return the request unchanged, unless too many routers died while it was in flight: then
        return it as invalid, so that it is recorded as failed."""
        deaths = self._deaths[request.number]
        if request.error or deaths < MAX_ROUTER_DEATHS:
            return request
        why = f"routers died {deaths} times while this request was in flight: it is not retried"
        return replace(request, body=b"", error=why, error_code="router_died")

    def _take_next(self, suspects: bool) -> BatchRequest | None:
        """Take the next request of the batch. Suspects come last, and only if ``suspects`` is True.
        Return None if there is no request to take."""
        if self._retries:
            return self._retries.popleft()
        for request in self._requests:
            if request.error or not self.is_suspect(request):
                return request
            self._requeue(request)
        return self._suspects.popleft() if suspects and self._suspects else None

    def _has_more(self) -> bool:
        if not self._retries and not self._suspects:
            request = next(self._requests, None)
            if request is None:
                return False
            self._requeue(request)
        return True

    def _check_cancelled_or_expired(self, now: float) -> None:
        batch = self.batch
        if batch.status is not BatchStatus.IN_PROGRESS:
            return
        if self._store.is_cancelled(batch):
            batch.set_status(BatchStatus.CANCELLING, now)
            self.save()
        elif now >= batch.expires_at and not self.num_running:
            self._expire(now)

    def _expire(self, now: float) -> None:
        message = "the batch's window of 24 h ended before this request was run"
        for request in (*self._retries, *self._suspects, *self._requests):
            self._write(request, None, "batch_expired", message)
        self.batch.times[BatchStatus.EXPIRED] = int(now)
        self.batch.set_status(BatchStatus.FINALIZING, now)
        self.save()

    def fail(self, why: str, now: float) -> None:
        """Mark the batch as failed for the reason ``why``. Its output files contain the results so
        far. Raises OSError if they can't be written."""
        self.batch.errors = [
            {"code": "invalid_file", "message": why, "param": "input_file_id", "line": None}
        ]
        self._publish_results(now)
        self.batch.set_status(BatchStatus.FAILED, now)
        self.close()
        self.save()

    def _requeue(self, request: BatchRequest) -> None:
        """Keep a request that was already taken from the batch, without its body, to run it
        later."""
        request.body = b""
        (self._suspects if self.is_suspect(request) else self._retries).append(request)

    # -- results ---------------------------------------------------------------------------------

    def _record(
        self, request: BatchRequest, response: BatchResponse | None, code: str = "", why: str = ""
    ) -> None:
        if self.batch.is_finished:  # the batch failed while the request was in flight
            return
        self._write(request, response, code, why)
        self._attempts.end(request.number)
        self.save()

    def _write(
        self, request: BatchRequest, response: BatchResponse | None, code: str = "", why: str = ""
    ) -> None:
        is_success = response is not None and response.status == 200
        part = self._result_file(OUTPUT if is_success else ERROR)
        part.write(encode_output_line(self.batch.id, request, response, code, why))
        part.flush()
        self._written.add(request.number)
        self._count(is_success)

    def _count(self, is_success: bool) -> None:
        self.batch.completed += is_success
        self.batch.failed += not is_success

    def _result_file(self, kind: str) -> BinaryIO:
        if kind not in self._parts:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            file = os.open(self._store.path(self.batch, kind), flags, 0o600)
            self._parts[kind] = os.fdopen(file, "ab")
        return self._parts[kind]

    def _recover(self) -> list[tuple[str, int]]:
        """Return the kind (output or error) and the request number of each result that an earlier
        run has written. Cut an incomplete last line off each result file."""
        recovered: list[tuple[str, int]] = []
        for kind in (OUTPUT, ERROR):
            path = self._store.path(self.batch, kind)
            if not path.exists():
                continue
            complete_bytes = 0
            with path.open("rb") as part:
                for data in part:
                    number = parse_request_number(data) if data.endswith(b"\n") else None
                    if number is None:
                        break
                    complete_bytes += len(data)
                    recovered.append((kind, number))
            os.truncate(path, complete_bytes)
        return recovered

    def _publish_results(self, now: float) -> None:
        """Turn the written results into files of the tenant. Idempotent."""
        batch, tenant = self.batch, TenantId(self.batch.tenant)
        batch_number = batch.id.removeprefix("batch_")
        for kind, suffix in ((OUTPUT, "0"), (ERROR, "1")):
            path, file_id = self._store.path(batch, kind), f"file-{batch_number}{suffix}"
            file_store = self._store.file_store(tenant)
            if not path.exists() and not file_store.data_path(file_id).exists():
                continue
            size = (path if path.exists() else file_store.data_path(file_id)).stat().st_size
            expires = None if batch.output_seconds is None else int(now) + batch.output_seconds
            filename = f"{batch.id}_{kind}.jsonl"
            record = StoredFile(file_id, size, int(now), filename, "batch_output", expires)
            file_store.add(record, path)
            if kind == OUTPUT:
                batch.output_file_id = file_id
            else:
                batch.error_file_id = file_id


def _iter_lines(file: BinaryIO, max_bytes: int) -> Iterator[InputLine]:
    """Yield the non-empty lines. A line that is too long is truncated, which makes its JSON
    invalid."""
    number = 0
    while True:
        offset = file.tell()
        size, is_empty = _skip_line(file, max_bytes)
        if size == 0:
            return
        if not is_empty:
            yield InputLine(number, offset, size)
            number += 1


def _skip_line(file: BinaryIO, max_bytes: int) -> tuple[int, bool]:
    """Read the next line. Return its length in bytes, or ``max_bytes`` if it is too long, and
    whether it is empty. At the end of the file, the length is 0."""
    data = rest = file.readline(max_bytes + 1)
    size = len(data)
    while not rest.endswith(b"\n") and (rest := file.readline(max_bytes + 1)):
        size = max_bytes
    return size, not data.strip()


def _count_lines(path: Path, max_bytes: int) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in _iter_lines(file, max_bytes))
