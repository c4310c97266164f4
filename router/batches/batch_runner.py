"""Runs the requests of all batches, a few at a time, while the cluster has idle capacity."""

import asyncio
import errno
import fcntl
import math
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import BinaryIO, TypeVar

import structlog

from baton.clock import Clock
from baton.core.ids import TenantId
from router.batches.batch_job import BatchJob
from router.batches.batch_request import BatchRequest, BatchResponse
from router.batches.batch_store import BatchStore
from router.batches.json_files import make_folder
from router.limits import MAX_BACKOFF_SECONDS, MAX_VALUES

POLL_SECONDS = 1.0
"""How often the folder is checked: another router may have added a batch, or may have exited, so
that this router has to run the batches."""

SWEEP_SECONDS = 60.0
"""How often expired files are deleted."""

RETRYABLE_HTTP_STATUSES = frozenset({429, 502, 503, 504})
"""A request whose response has one of these statuses is retried later."""

HOST_WIDE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)
"""Errors that concern the whole disk or process, not one batch. All batches wait until the cause is
gone; none fails."""

Result = TypeVar("Result")

log = structlog.get_logger(__name__)

SendRequest = Callable[[TenantId, str, Callable[[], bytes]], Awaitable[BatchResponse]]
"""Sends a tenant's request to an endpoint and returns the response. The function that it is given
returns the request's body, once, so that only the sender holds the body while the request runs."""


class BatchRunner:
    """Runs batches while :meth:`run` runs. If several routers share a folder, one of them runs the
    batches, and another takes over when that one exits. ``max_running`` is a function: given the
    number of batch requests that run now, it returns how many may run in all. ``max_line_values``
    is a function that returns the maximum number of JSON values in a line of batches that begin
    now. Both are called on the event loop.

    An error in a request fails only that request; an error in a batch's files fails only that
    batch.
    """

    def __init__(
        self,
        store: BatchStore,
        send_request: SendRequest,
        max_running: Callable[[int], int],
        clock: Clock,
        max_line_bytes: int,
        max_folder_bytes: int,
        max_line_values: Callable[[], int] = lambda: MAX_VALUES,
    ) -> None:
        self._store = store
        self._send_request = send_request
        self._max_running = max_running
        self._clock = clock
        self.max_line_bytes = max_line_bytes
        """Maximum length of a line. Batches that begin later use a new value."""
        self._max_line_values = max_line_values
        self._max_folder_bytes = max_folder_bytes
        self._is_full = False
        self._last_error = ""
        self._jobs: dict[str, BatchJob] = {}
        self._job_order: list[str] = []
        self._lock: BinaryIO | None = None
        self._checked_at = self._swept_at = float("-inf")
        self._changed = asyncio.Event()
        self._must_check = False
        self._thread = ThreadPoolExecutor(1, "batches")
        """The only thread in which the jobs access the disk while :meth:`run` runs."""
        self.num_running = 0
        self._is_suspect_running = False
        """Whether a suspect (see :class:`BatchJob`) is running. Only one runs at a time, so that no
        other suspect is blamed if it kills the router."""

    def check_now(self) -> None:
        """Make :meth:`run` look for new batches and requests at once, without waiting for the next
        check after ``POLL_SECONDS``."""
        self._must_check = True
        self._changed.set()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._changed.clear()  # a change during the work ends the next wait at once
                    try:
                        await self._start_requests(tasks)
                        self._last_error = ""
                    except OSError as error:
                        self._log_error_once(str(error))
                    except Exception as error:
                        log.exception("batches_crashed")
                        self._log_error_once(repr(error))
                    await self._wait()
        finally:
            self._thread.shutdown()
            for job in self._jobs.values():
                job.close()
            if self._lock is not None:
                self._lock.close()

    def _log_error_once(self, error: str) -> None:
        """Log an error, unless the previous attempt failed with the same error."""
        if error != self._last_error:
            log.error("batches_stalled", error=error)
        self._last_error = error

    async def _start_requests(self, tasks: asyncio.TaskGroup) -> None:
        """Start all requests that may run now. Raises OSError if the folder can't be used."""
        if not await self._in_thread(self._take_lock):
            return
        await self._in_thread(partial(self._check_folder, self._max_line_values()))
        while not self._is_full and self.num_running < self._max_running(self.num_running):
            job_and_request = await self._in_thread(self._next_request)
            if job_and_request is None:
                break
            self.num_running += 1
            tasks.create_task(self._run_request(*job_and_request))
        await self._in_thread(self._close_finished)

    async def _run_request(self, job: BatchJob, request: BatchRequest) -> None:
        """Run one request and record its result. Raises only when cancelled."""
        try:
            try:
                response = await self._send_request(
                    TenantId(job.batch.tenant), job.batch.endpoint, request.take_body
                )
                record = partial(self._record_response, job, request, response)
            except Exception as error:
                log.exception("batch_line_crashed", batch=job.batch.id, line=request.number)
                record = partial(job.record_crash, request, f"{type(error).__name__} in the router")
            await self._in_thread(partial(self._record_or_retry, job, request, record))
        except asyncio.CancelledError:
            job.record_abandoned(request)
            raise
        finally:
            self.num_running -= 1
            job.num_running -= 1
            if job.is_suspect(request):
                self._is_suspect_running = False
            self._changed.set()

    async def _wait(self) -> None:
        sleep = asyncio.ensure_future(self._clock.sleep(POLL_SECONDS))
        change = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((sleep, change), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            change.cancel()

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # -- disk access, in the thread ----------------------------------------------------------------

    def _take_lock(self) -> bool:
        """Take the lock of the folder, which is then held until :meth:`run` ends. Return False if
        another router holds it."""
        if self._lock is not None:
            return True
        path = make_folder(self._store.root) / "runner.lock"
        lock = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return False
        self._lock = lock
        return True

    def _check_folder(self, max_line_values: int) -> None:
        """Look into the folder of files and batches: begin the oldest unfinished batch of each
        tenant that has no batch running, check whether the folder is full, and delete expired
        files."""
        now = self._now()
        if not self._must_check and now < self._checked_at + POLL_SECONDS:
            return
        self._checked_at, self._must_check = now, False
        busy = {job.batch.tenant for job in self._jobs.values()}
        for batch in self._store.list_unfinished():
            if batch.tenant in busy or batch.id in self._jobs:
                continue
            busy.add(batch.tenant)
            job = BatchJob(self._store, batch, self.max_line_bytes, max_line_values)
            self._call_or_fail_batch(job, partial(job.open, now))
            log.info("batch_begins", batch=batch.id, lines=batch.total, done=batch.completed)
            self._jobs[batch.id] = job
            self._job_order.append(batch.id)
        self._is_full = self._store.used_bytes() >= self._max_folder_bytes
        if self._is_full and self._jobs:
            log.warning("batch_folder_full", limit_bytes=self._max_folder_bytes)
        if now >= self._swept_at + SWEEP_SECONDS:
            self._swept_at = now
            self._store.delete_expired(now)

    def _next_request(self) -> tuple[BatchJob, BatchRequest] | None:
        """Return the next request to run, with its job, or None if there is none. Batches take
        turns."""
        for _ in range(len(self._job_order)):
            self._job_order.append(self._job_order.pop(0))
            job = self._jobs[self._job_order[-1]]
            if job.paused_until > self._clock.monotonic():
                continue
            suspects = not self._is_suspect_running
            request = self._call_or_fail_batch(
                job, partial(job.next_request, self._now(), suspects=suspects)
            )
            if request is not None:
                job.num_running += 1
                self._is_suspect_running |= job.is_suspect(request)
                return job, request
        return None

    def _record_response(
        self, job: BatchJob, request: BatchRequest, response: BatchResponse
    ) -> None:
        if response.status in RETRYABLE_HTTP_STATUSES:
            self._put_back(job, request)
        else:
            job.num_refusals = 0
            job.record_response(request, response)

    def _record_or_retry(
        self, job: BatchJob, request: BatchRequest, record: Callable[[], None]
    ) -> None:
        """Record a result by calling ``record``. Never raises: a request whose result can't be
        written is retried later, and any other error fails the batch."""
        try:
            record()
        except OSError as error:
            log.error("batch_line_not_written", batch=job.batch.id, error=str(error))
            self._put_back(job, request)
        except Exception as error:
            log.exception("batch_result_not_recorded", batch=job.batch.id, line=request.number)
            self._fail_batch(job, error)

    def _call_or_fail_batch(self, job: BatchJob, call: Callable[[], Result]) -> Result | None:
        """Return what ``call`` returns. If it raises an error, fail the batch and return None; but
        an OSError that concerns all batches (:data:`HOST_WIDE_ERRNOS`) is raised again."""
        try:
            return call()
        except Exception as error:
            if isinstance(error, OSError) and error.errno in HOST_WIDE_ERRNOS:
                raise
            log.exception("batch_failed", batch=job.batch.id)
            self._fail_batch(job, error)
            return None

    def _fail_batch(self, job: BatchJob, error: Exception) -> None:
        """Mark the batch as failed because of ``error``. If that can't be written to disk, stop
        running the batch in this process."""
        if job.batch.is_finished:
            return
        try:
            job.fail(f"the batch can't continue: {error or type(error).__name__}", self._now())
        except Exception:
            log.exception("batch_failure_not_recorded", batch=job.batch.id)
            job.paused_until = math.inf

    def _put_back(self, job: BatchJob, request: BatchRequest) -> None:
        job.num_refusals += 1
        pause = min(2.0 ** (job.num_refusals - 1), MAX_BACKOFF_SECONDS)
        job.paused_until = self._clock.monotonic() + pause
        job.put_back(request)

    def _close_finished(self) -> None:
        for job in list(self._jobs.values()):
            if job.paused_until == math.inf:
                continue
            finish = partial(job.finish_if_done, self._now())
            if job.num_running == 0 and (
                self._call_or_fail_batch(job, finish) or job.batch.is_finished
            ):
                log.info("batch_ends", batch=job.batch.id, status=job.batch.status.value)
                del self._jobs[job.batch.id]
                self._job_order.remove(job.batch.id)
                self._must_check = True

    def _now(self) -> float:
        return self._clock.wall_nanoseconds() / 1e9
