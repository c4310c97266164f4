"""Starts and ends the jobs of a worker, and frees their resources."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import structlog

from baton.errors import BatonError, Unavailable
from baton.worker.context import WorkerContext
from baton.worker.job import Job, JobOutcome, failed_output, rerouted_output
from baton.worker.job_table import JobTable
from baton.worker.sides import DecodeSide, KvExports

log = structlog.get_logger(__name__)


class JobLifecycle:
    """Keeps ``table`` up to date. Every job that is started is removed exactly once: by
    :meth:`end`, :meth:`fail` or :meth:`reroute`, which also free its resources, or by
    :meth:`remove` if the engine has already freed them."""

    def __init__(self, context: WorkerContext, exports: KvExports, decode: DecodeSide) -> None:
        self.table = JobTable()
        self._engine = context.engine
        self._telemetry = context.telemetry
        self._exports = exports
        self._decode = decode

    def start(self, job: Job) -> None:
        self.table.add(job)
        self._telemetry.record_started(job)

    def open_export(self, job: Job, num_tokens: int) -> None:
        """Open an export of the KV of the job's first ``num_tokens`` tokens. The job ends when
        another worker has read the KV, or has given up."""
        self._exports.open(job, num_tokens, partial(self._on_export_closed, job))

    async def run_guarded(self, job: Job, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work``, the coroutine function that adds the job to the engine. If it fails or is
        cancelled, free the job's resources. An unexpected exception fails only this job."""
        try:
            await work()
        except Exception as error:
            job.admission_task = None
            self.fail(job, error)
            self._abort_in_engine(job)
        except asyncio.CancelledError:
            job.admission_task = None
            self._abort_in_engine(job)
            raise
        job.admission_task = None

    def end(self, job: Job, outcome: JobOutcome = JobOutcome.CANCELLED) -> None:
        """Remove the job and free its resources. If the job is still being added to the engine,
        cancel its admission task, which frees the resources once the transfers into the job's
        blocks have ended. A job whose answer is complete counts as done, even if it is cancelled
        before its KV transfer has ended."""
        if job not in self.table:
            return
        if outcome is JobOutcome.CANCELLED and job.is_answered:
            outcome = JobOutcome.DONE
        self.remove(job, outcome)
        self._exports.close(job)
        if job.admission_task is not None and job.admission_task is not asyncio.current_task():
            job.admission_task.cancel()
        else:
            self._abort_in_engine(job)

    def fail(self, job: Job, error: Exception) -> None:
        """End the job and report the error to the router. The details of an unexpected error are
        only logged."""
        reported = _to_baton_error(job, error)
        if job in self.table:
            job.stream.put(failed_output(replace(job.spec, request_id=job.request_id), reported))
            self._telemetry.record_failed(job, reported)
            self.end(job, JobOutcome.FAILED)

    def reroute(self, job: Job) -> None:
        """End a job that waits in the engine's queue, so that its router places it on another
        worker."""
        if job in self.table:
            job.stream.put(rerouted_output(replace(job.spec, request_id=job.request_id)))
            self.end(job, JobOutcome.REROUTED)

    def remove(self, job: Job, outcome: JobOutcome) -> None:
        """Remove a job that has no resources in the engine any more."""
        self.table.remove(job)
        self._telemetry.record_ended(job, outcome)

    def fail_unread_exports(self) -> None:
        """Fail the prefilled requests whose KV no worker has started to import in time."""
        for job in self._exports.unread_jobs():
            self.fail(job, Unavailable("no decode worker imported the request's KV in time"))

    def _on_export_closed(self, job: Job, complete: bool) -> None:
        """End the job, because the importing worker has read all KV (``complete``) or has ended the
        transfer early."""
        if job not in self.table:
            return
        if complete:
            self.end(job, JobOutcome.DONE)
        else:
            self.fail(job, Unavailable("the decode worker ended the KV transfer early"))

    def _abort_in_engine(self, job: Job) -> None:
        request_id = job.spec.request_id
        self._engine.send(lambda engine: engine.abort(request_id))
        self._decode.notify_blocks_freed()


def _to_baton_error(job: Job, error: Exception) -> BatonError:
    """Return the error to report to the router; log an unexpected one with its traceback."""
    if isinstance(error, BatonError):
        return error
    log.error("request_crashed", request_id=job.request_id, exc_info=error)
    return BatonError("internal error")
