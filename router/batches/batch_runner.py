"""Answers the lines of all batches, a few at a time, while nobody else waits."""

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
from router.batches.batch_request import BatchRequest, BatchResponse, encode_request_body
from router.batches.batch_store import BatchStore
from router.batches.json_files import make_folder

POLL_SECONDS = 1.0
"""Between two looks at the folder: another router may have taken a batch in, or ended."""

SWEEP_SECONDS = 60.0
"""Between two looks for files whose time is over."""

RETRYABLE_HTTP_STATUSES = frozenset({429, 502, 503, 504})
"""A line that meets them is asked again later."""

MAX_BACKOFF_SECONDS = 60.0
"""After refusals, from one second on, doubling."""

HOST_WIDE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)
"""Errors of the disk or the process: all batches wait for their end, and none fails of them."""

Result = TypeVar("Result")

log = structlog.get_logger(__name__)

Ask = Callable[[TenantId, str, bytes], Awaitable[BatchResponse]]
"""What a tenant asks of an endpoint."""


class BatchRunner:
    """:meth:`run` until cancelled. Of several routers with one folder one runs the batches, and
    another when that has ended. ``room`` is how many lines may run, of how many that do.

    What goes wrong in a line ends that line, and what goes wrong in a batch's files that batch.
    """

    def __init__(
        self,
        library: BatchStore,
        ask: Ask,
        room: Callable[[int], int],
        clock: Clock,
        max_line_bytes: int,
        max_folder_bytes: int,
    ) -> None:
        self._library = library
        self._ask = ask
        self._room = room
        self._clock = clock
        self._max_line_bytes = max_line_bytes
        self._max_folder_bytes = max_folder_bytes
        self._is_full = False
        self._trouble = ""
        self._jobs: dict[str, BatchJob] = {}
        self._turns: list[str] = []
        self._lock: BinaryIO | None = None
        self._looked_at = self._swept_at = float("-inf")
        self._changed = asyncio.Event()
        self._hurried = False
        self._thread = ThreadPoolExecutor(1, "batches")
        """All of the disk's: jobs are used by nobody else."""
        self.num_running = 0
        self._tries_suspect = False
        """One line at a time that a router may have died of, so that no other is taken for it."""

    def hurry(self) -> None:
        """There is something new to do."""
        self._hurried = True
        self._changed.set()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._changed.clear()  # before: what changes from now on is looked at again
                    try:
                        await self._begin(tasks)
                        self._trouble = ""
                    except OSError as error:
                        self._note_trouble(str(error))
                    except Exception as error:
                        log.exception("batches_crashed")
                        self._note_trouble(repr(error))
                    await self._wait()
        finally:
            self._thread.shutdown()
            for job in self._jobs.values():
                job.close()
            if self._lock is not None:
                self._lock.close()

    def _note_trouble(self, error: str) -> None:
        """Once, however often it is tried again."""
        if error != self._trouble:
            log.error("batches_stand_still", error=error)
        self._trouble = error

    async def _begin(self, tasks: asyncio.TaskGroup) -> None:
        """Everything that may begin now. Raises OSError."""
        if not await self._in_thread(self._take_lock):
            return
        await self._in_thread(self._look)
        while not self._is_full and self.num_running < self._room(self.num_running):
            found = await self._in_thread(self._next)
            if found is None:
                break
            self.num_running += 1
            tasks.create_task(self._answer(*found))
        await self._in_thread(self._close_finished)

    async def _answer(self, job: BatchJob, line: BatchRequest) -> None:
        """Never raises but when cancelled."""
        try:
            try:
                reply = await self._ask(
                    TenantId(job.batch.tenant), job.batch.endpoint, encode_request_body(line)
                )
                note = partial(self._note, job, line, reply)
            except Exception as error:
                log.exception("batch_line_crashed", batch=job.batch.id, line=line.number)
                note = partial(job.note_crash, line, f"{type(error).__name__} in the router")
            await self._in_thread(partial(self._note_or_put_back, job, line, note))
        except asyncio.CancelledError:
            job.give_up(line)
            raise
        finally:
            self.num_running -= 1
            job.num_running -= 1
            if job.is_suspect(line):
                self._tries_suspect = False
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

    # -- on the disk, in the thread --------------------------------------------------------------

    def _take_lock(self) -> bool:
        """Held until the process ends, however it does."""
        if self._lock is not None:
            return True
        path = make_folder(self._library.root) / "runner.lock"
        lock = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return False
        self._lock = lock
        return True

    def _look(self) -> None:
        """New batches, each tenant's oldest; files whose time is over; whether there is room."""
        now = self._now()
        if not self._hurried and now < self._looked_at + POLL_SECONDS:
            return
        self._looked_at, self._hurried = now, False
        busy = {job.batch.tenant for job in self._jobs.values()}
        for batch in self._library.unfinished():
            if batch.tenant in busy or batch.id in self._jobs:
                continue
            busy.add(batch.tenant)
            job = BatchJob(self._library, batch, self._max_line_bytes)
            self._fenced(job, partial(job.open, now))
            log.info("batch_begins", batch=batch.id, lines=batch.total, done=batch.completed)
            self._jobs[batch.id] = job
            self._turns.append(batch.id)
        self._is_full = self._library.used_bytes() >= self._max_folder_bytes
        if self._is_full and self._jobs:
            log.warning("batches_wait_for_room", limit_bytes=self._max_folder_bytes)
        if now >= self._swept_at + SWEEP_SECONDS:
            self._swept_at = now
            self._library.expire(now)

    def _next(self) -> tuple[BatchJob, BatchRequest] | None:
        """Batches take turns."""
        for _ in range(len(self._turns)):
            self._turns.append(self._turns.pop(0))
            job = self._jobs[self._turns[-1]]
            if job.not_before > self._clock.monotonic():
                continue
            suspects = not self._tries_suspect
            line = self._fenced(job, partial(job.next_line, self._now(), suspects=suspects))
            if line is not None:
                job.num_running += 1
                self._tries_suspect |= job.is_suspect(line)
                return job, line
        return None

    def _note(self, job: BatchJob, line: BatchRequest, reply: BatchResponse) -> None:
        if reply.status in RETRYABLE_HTTP_STATUSES:
            self._put_back(job, line)
        else:
            job.num_refusals = 0
            job.note_reply(line, reply)

    def _note_or_put_back(
        self, job: BatchJob, line: BatchRequest, note: Callable[[], None]
    ) -> None:
        """Never raises: what can't be written is asked again later."""
        try:
            note()
        except OSError as error:
            log.error("batch_line_not_written", batch=job.batch.id, error=str(error))
            self._put_back(job, line)
        except Exception as error:
            log.exception("batch_line_crashed", batch=job.batch.id, line=line.number)
            self._fence(job, error)

    def _fenced(self, job: BatchJob, call: Callable[[], Result]) -> Result | None:
        """What ``call`` returns; None where the batch failed of it. Raises OSError for what is
        everybody's."""
        try:
            return call()
        except Exception as error:
            if isinstance(error, OSError) and error.errno in HOST_WIDE_ERRNOS:
                raise
            log.exception("batch_failed", batch=job.batch.id)
            self._fence(job, error)
            return None

    def _fence(self, job: BatchJob, error: Exception) -> None:
        """Ends the batch with a reason, or, where even that can't be written, at least here."""
        if job.batch.is_over:
            return
        try:
            job.fail(f"the batch can't go on: {error or type(error).__name__}", self._now())
        except Exception:
            log.exception("batch_not_failed", batch=job.batch.id)
            job.not_before = math.inf

    def _put_back(self, job: BatchJob, line: BatchRequest) -> None:
        job.num_refusals += 1
        pause = min(2.0 ** (job.num_refusals - 1), MAX_BACKOFF_SECONDS)
        job.not_before = self._clock.monotonic() + pause
        job.put_back(line)

    def _close_finished(self) -> None:
        for job in list(self._jobs.values()):
            if job.not_before == math.inf:
                continue
            finish = partial(job.finish_if_done, self._now())
            if job.num_running == 0 and (self._fenced(job, finish) or job.batch.is_over):
                log.info("batch_ends", batch=job.batch.id, status=job.batch.status.value)
                del self._jobs[job.batch.id]
                self._turns.remove(job.batch.id)
                self._hurried = True

    def _now(self) -> float:
        return self._clock.wall_nanoseconds() / 1e9
