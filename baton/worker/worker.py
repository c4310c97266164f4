"""A worker: takes requests from routers, runs them on its engine, and delivers their outputs.

Prefill, decode and mixed workers run the same code and differ only in the tasks that they are sent.
A mixed worker is sent whole requests. The others can serve a whole request, too, if the other pool
has no workers left.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import structlog

from baton.core.ids import Epoch, RequestId
from baton.core.kv_transfer import KvTransferOpen, WorkerInspection, WorkerRef
from baton.core.request import FinishReason, RequestOutput, RequestSpec
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.core.worker_load import WorkerLoad
from baton.engine.engine import Engine
from baton.engine.result import StepResult
from baton.errors import BatonError, Invalid, Overloaded, Unavailable
from baton.rpc.worker_service import KvExportStream
from baton.worker.constraint_opener import ConstraintOpener
from baton.worker.context import WorkerContext
from baton.worker.inspection import StagingInspection, inspect_engine
from baton.worker.job import (
    Job,
    JobOutcome,
    failed_output,
    migrated_output,
    placement_id,
    rerouted_output,
)
from baton.worker.job_lifecycle import JobLifecycle
from baton.worker.load_monitor import LoadMonitor
from baton.worker.output_stream import OutputStream
from baton.worker.role_state import RoleState
from baton.worker.sides import DecodeSide, Migration, PrefillSide

SWEEP_SECONDS = 0.25
"""Interval of the worker's periodic checks. The load in a heartbeat is at most this old, plus the
duration of one step."""

log = structlog.get_logger(__name__)


class Worker:
    """A worker without its sockets. All methods run in the event loop."""

    def __init__(
        self,
        context: WorkerContext,
        prefill: PrefillSide,
        decode: DecodeSide,
        role_state: RoleState,
        constraints: ConstraintOpener,
        has_other_ready_workers: Callable[[], bool] = lambda: True,
    ) -> None:
        self._id = context.id
        self._variant_id = context.variant.id
        self._config = context.config
        self._engine = context.engine
        self._clock = context.clock
        self._staging = context.staging
        self._telemetry = context.telemetry
        self._prefill = prefill
        self._exports = prefill.exports
        self._decode = decode
        self._role_state = role_state
        self._constraints = constraints
        self._has_other_ready_workers = has_other_ready_workers
        self._lifecycle = JobLifecycle(context, prefill.exports, decode)
        self._jobs = self._lifecycle.table
        self._load_monitor = LoadMonitor(context, prefill, decode)
        self._tasks: asyncio.TaskGroup | None = None
        self._final_publish_task: asyncio.Task[None] | None = None
        self._last_step_error = ""
        self._num_steps = 0
        self._announced_progress = (0, 0)

    # -- lifecycle ----------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. A bug outside of a single request's handling ends the worker."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._role_state.mark_ready()
            while True:
                await self._load_monitor.refresh(self._jobs)
                self._lifecycle.fail_unread_exports()
                self._decode.sweep()
                self._announce_progress()
                since = self._role_state.draining_since_seconds
                if since is not None and self._has_other_ready_workers():
                    await self._drain_jobs(since)
                if self.is_idle:
                    self._role_state.finish_role_change()
                    self._publish_remaining_blocks(tasks)
                await self._clock.sleep(SWEEP_SECONDS)

    def _announce_progress(self) -> None:
        """If the worker has computed or imported anything since the last call, tell this to the
        routers that have requests here: a request that waits for others has not failed."""
        progress = self._num_steps, self._decode.num_imported_blocks
        if progress != self._announced_progress:
            self._announced_progress = progress
            for stream in dict.fromkeys(job.stream for job in self._jobs):
                stream.announce_progress()

    def start_drain(self, permanent: bool = True) -> None:
        """Stop accepting requests. Idempotent.

        If other workers are ready, requests in the engine's queue are rerouted, and answers that
        don't end within the grace period are migrated. Then the blocks that only this worker has
        are published to the store. Unless the drain is permanent, calling :meth:`convert` with the
        current role ends it."""
        self._role_state.start_drain(self._clock.monotonic(), permanent)

    def convert(self, role: Role) -> None:
        """Drain, then become ready in ``role`` once no request is left: see
        :meth:`RoleState.convert`."""
        self._role_state.convert(role, self._clock.monotonic())

    @property
    def state(self) -> WorkerState:
        return self._role_state.state

    @property
    def role(self) -> Role:
        return self._role_state.role

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    @property
    def is_drained(self) -> bool:
        """Whether the worker is leaving the cluster, has no requests left, and has published its
        blocks."""
        handed_over = self._final_publish_task is not None and self._final_publish_task.done()
        return self._role_state.is_leaving and self.is_idle and handed_over

    @property
    def load(self) -> WorkerLoad:
        """The load as of the worker's last periodic check."""
        return self._load_monitor.load

    async def inspect(self) -> WorkerInspection:
        inspect = partial(
            inspect_engine,
            worker=self._id,
            state=self.state,
            drained=self.is_drained,
            staging=StagingInspection.of(self._staging),
        )
        return await self._engine.call(lambda engine: inspect(engine, num_jobs=len(self._jobs)))

    # -- requests -------------------------------------------------------------------------

    def open_stream(self) -> OutputStream:
        return OutputStream(self._submit, self._cancel, self._cancel_stream)

    def _submit(
        self, stream: OutputStream, spec: RequestSpec, task: Task, source: WorkerRef | None
    ) -> None:
        # Since the request was placed, the worker may have restarted with other weights.
        is_of_variant = spec.variant in ("", self._variant_id)
        try:
            self._admit(spec)
            if not is_of_variant:
                raise Unavailable(f"worker {self._id} serves another variant of the model")
            if task is Task.DECODE and source is None:
                raise Invalid("a decode task must name its source worker", param="source")
        except BatonError as error:
            is_rerouted = self.state is WorkerState.DRAINING or not is_of_variant
            stream.put(rerouted_output(spec) if is_rerouted else failed_output(spec, error))
            self._telemetry.record_rejected(spec.request_id, error)
            return
        job = Job(spec.request_id, replace(spec, request_id=placement_id(spec)), task, stream)
        self._lifecycle.start(job)
        if task is Task.DECODE:
            assert source is not None
            self._spawn(job, partial(self._start_decode, job, source))
            return
        if task is Task.PREFILL:
            self._lifecycle.open_export(job, len(spec.token_ids))
        self._spawn(job, partial(self._start_prefill, job))

    def _admit(self, spec: RequestSpec) -> None:
        """Raise an error if the request can't be accepted. If an older placement of the request is
        on this worker, end that placement."""
        if self.state is not WorkerState.READY:
            raise Unavailable(f"worker {self._id} accepts no requests: it is {self.state.value}")
        older = self._jobs.latest(spec.request_id)
        if older is not None and older.spec.epoch >= spec.epoch:
            raise Invalid(
                f"request {spec.request_id} is already on this worker in epoch {older.spec.epoch}; "
                "a new placement must have a later epoch"
            )
        if older is not None:
            self._lifecycle.end(older)
        if len(self._jobs) >= self._config.max_jobs:
            raise Overloaded(
                f"worker {self._id} already has {len(self._jobs)} requests, the maximum"
            )

    def _spawn(self, job: Job, work: Callable[[], Awaitable[None]]) -> None:
        assert self._tasks is not None, "run() must be called first"
        job.admission_task = self._tasks.create_task(self._lifecycle.run_guarded(job, work))

    async def _start_prefill(self, job: Job) -> None:
        constraint = await self._constraints.open(job.spec)
        await self._prefill.start_prefill(job, constraint)

    async def _start_decode(self, job: Job, source: WorkerRef) -> None:
        constraint = await self._constraints.open(job.spec)
        if not await self._decode.start_decode(job, source, constraint):
            self._lifecycle.end(job, JobOutcome.DONE)

    def _cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        job = self._jobs.latest(request_id)
        if job is not None and job.spec.epoch <= epoch:
            self._lifecycle.end(job)

    def _cancel_stream(self, stream: OutputStream) -> None:
        for job in self._jobs:
            if job.stream is stream:
                self._lifecycle.end(job)

    async def open_kv_export(self, opening: KvTransferOpen) -> KvExportStream:
        return await self._exports.attach_reader(opening)

    # -- draining ---------------------------------------------------------------------------

    def _publish_remaining_blocks(self, tasks: asyncio.TaskGroup) -> None:
        """If the worker is leaving the cluster, start to publish the blocks that only it has, once
        per drain."""
        if not self._role_state.is_leaving:
            self._final_publish_task = None
        elif self._final_publish_task is None:
            self._final_publish_task = tasks.create_task(self._prefill.publish_remaining())

    async def _drain_jobs(self, since: float) -> None:
        """Reroute the jobs that wait in the engine's queue and, after the grace period, migrate
        running answers. ``since`` is when the drain began. Jobs that are still being added to the
        engine are left until a later call."""
        in_grace_period = self._clock.monotonic() < since + self._config.drain_grace_seconds
        for job in self._jobs:
            request_id = job.spec.request_id
            if job.admission_task is not None:
                continue
            if await self._engine.call(partial(Engine.is_waiting, request_id=request_id)):
                self._lifecycle.reroute(job)
            elif job.task is not Task.PREFILL and not in_grace_period:
                await self._migrate(job)

    async def _migrate(self, job: Job) -> None:
        """Take a running answer out of the batch, and export the KV of its prompt and generated
        tokens in the same way as a prefilled prompt, for the worker of the request's next placement
        (epoch + 1). Does nothing if the answer can't be migrated now."""
        migration = await self._decode.begin_migration(job)
        if migration is None:
            return
        if job not in self._jobs:  # cancelled meanwhile
            exported_id = migration.spec.request_id
            self._engine.send(lambda engine: engine.abort(exported_id))
            return
        self._lifecycle.remove(job, JobOutcome.MIGRATED)
        num_tokens = self._export_answer(job, migration)
        job.stream.put(
            migrated_output(replace(job.spec, request_id=job.request_id), num_tokens + 1)
        )

    def _export_answer(self, job: Job, migration: Migration) -> int:
        """Add a job that exports the answer's KV; return the number of tokens that have KV."""
        sequence = migration.sequence
        num_tokens = sequence.progress.num_computed_tokens
        export_job = Job(job.request_id, migration.spec, Task.PREFILL, job.stream)
        self._lifecycle.start(export_job)
        self._lifecycle.open_export(export_job, num_tokens)
        self._exports.record_progress(sequence.progress)
        self._exports.finish_prefill(export_job, sequence.last_token_id, finished=False)
        self._prefill.record_step(StepResult(sealed_runs=sequence.sealed_runs))
        return num_tokens

    # -- steps ------------------------------------------------------------------------------

    def on_step(self, result: StepResult) -> None:
        """Handle a step's result; called in order for every step. A step covers many requests, so
        an exception while delivering one request's output fails only that request."""
        self._record_step(result)
        if result.work is not None:
            self._num_steps += 1
        for progress in result.progress:
            self._exports.record_progress(progress)
        for output in result.outputs:
            job = self._jobs.get(output.request_id)
            if job is None:
                continue
            try:
                self._deliver(job, output)
            except Exception as error:
                self._lifecycle.fail(job, error)
        self._decode.notify_blocks_freed()

    def _record_step(self, result: StepResult) -> None:
        """Update the prefill side, the load and the telemetry. A failure here must not fail any
        answer; the same exception is logged once, not with every step."""
        try:
            self._prefill.record_step(result)
            self._load_monitor.record_step(result)
            self._telemetry.record_step(result, self._jobs)
        except Exception as error:
            if repr(error) != self._last_step_error:
                log.exception("step_recording_crashed")
            self._last_step_error = repr(error)

    def _deliver(self, job: Job, output: RequestOutput) -> None:
        if job.prefix_fetch is not None:
            job.details.update(job.prefix_fetch.details(output.cached_tokens))
            self._telemetry.record_first_output(job, output, job.prefix_fetch)
            job.prefix_fetch = None  # reported once, with the first output
        if output.finish_reason is not None:
            self._load_monitor.record_answer(output.first_index + len(output.token_ids))
        output.request_id = job.request_id  # the engine uses the placement's id
        if job.details:
            output.details = {**output.details, **job.details}
            job.details = {}
        job.stream.put(output)
        if output.finish_reason is FinishReason.ERROR:
            self._telemetry.record_failed(job, Invalid(output.error))
            self._lifecycle.end(job, JobOutcome.FAILED)
        elif job.task is Task.PREFILL:
            job.is_answered = output.finish_reason is not None
            self._exports.finish_prefill(job, output.token_ids[-1], job.is_answered)
        elif output.finish_reason is not None:
            self._telemetry.record_answer_finished(job, output)
            self._lifecycle.remove(job, JobOutcome.DONE)
