"""A worker: takes requests from routers, runs them on its engine, and exports their KV.

Prefill and decode workers run the same code and differ only in the tasks they are sent. Either can
serve a whole request when the other pool is gone.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

import structlog
from prometheus_client import CollectorRegistry

from baton.clock import Clock
from baton.concurrency.fair_slots import FairSlots
from baton.concurrency.threads import run_in_thread
from baton.core.grammar import Grammar
from baton.core.ids import Epoch, Incarnation, RequestId, WorkerId
from baton.core.kv_transfer import KvTransferOpen, WorkerInspection, WorkerRef
from baton.core.request import FinishReason, RequestOutput, RequestSpec
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.core.worker_load import WorkerLoad
from baton.engine.constraint import Constraint, ConstraintFactory
from baton.engine.engine import Engine, StepResult
from baton.engine.key_chain import BlockKeyChain, BlockKeyHasher
from baton.errors import BatonError, Corrupt, Invalid, NotFound, Overloaded, Unavailable
from baton.transport.base import Transport
from baton.transport.link_meter import LinkMeter
from baton.transport.selection import LOCAL_ONLY, choose_transport
from baton.transport.unfinished_transfers import UnfinishedTransfers
from baton.worker.answer_lengths import AnswerLengthStats
from baton.worker.engine_thread import EngineHandle
from baton.worker.inspection import inspect_engine
from baton.worker.job import (
    Job,
    JobOutcome,
    failed_output,
    migrated_output,
    placement_id,
    rerouted_output,
)
from baton.worker.kv_export import KvExport, LocalKvExportStream
from baton.worker.kv_import import KvImport, KvImporter, KvTransferStats
from baton.worker.kv_layout import KvLayout
from baton.worker.load_report import IncomingRequest, measure_load
from baton.worker.output_stream import OutputStream
from baton.worker.prefix_fetch import PrefixFetch
from baton.worker.prefix_store import PrefixStore
from baton.worker.role_state import RoleState
from baton.worker.telemetry import WorkerTelemetry

SWEEP_SECONDS = 0.25
"""Interval of the worker's periodic checks. The load in a heartbeat is at most this old, plus one
step."""

MAX_CONCURRENT_GRAMMARS = 2
"""Threads that compile grammars; one tenant uses at most one, so that it cannot block others."""

MAX_WAITING_GRAMMARS = 1024

GrammarCheck = Callable[[Grammar, str], Awaitable[None]]
"""Tries to compile a tenant's grammar in a separate process: :mod:`baton.text.grammar.checker`."""

MAX_INLINE_HASH_TOKENS = 4096
"""The block keys of prompts up to this length are hashed in the event loop, which takes half a
millisecond; longer prompts are hashed in a thread."""

REMOTE_KV_IMPORTS = "imports"
"""The link meter's name for all links to workers on other hosts together."""


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """``max_jobs`` bounds the requests on this worker in any phase.

    ``export_timeout_seconds`` is how long a prefilled request waits for a decode worker to import
    its KV. ``arrival_timeout_seconds`` is how long an importing worker waits for the request to
    arrive here (the two messages race). ``drain_grace_seconds`` is how long answers may continue
    while the worker drains before they are migrated. ``reserve_ahead_tokens``: see
    :class:`KvExport`."""

    max_jobs: int = 4096
    export_timeout_seconds: float = 30.0
    drain_grace_seconds: float = 2.0
    arrival_timeout_seconds: float = 5.0
    reserve_ahead_tokens: int = 1024


class Worker:
    """A worker without its sockets. All methods run in the event loop."""

    def __init__(
        self,
        worker_id: WorkerId,
        generation: Incarnation,
        config: WorkerConfig,
        engine: EngineHandle,
        kv_importer: KvImporter,
        store: PrefixStore,
        layout: KvLayout,
        transports: dict[str, Transport],
        key_hasher: BlockKeyHasher,
        model_digest: str,
        host: str,
        clock: Clock,
        has_other_ready_workers: Callable[[], bool] = lambda: True,
        role: Role = Role.PREFILL,
        on_change: Callable[[], None] = lambda: None,
        constraint_factory: ConstraintFactory | None = None,
        telemetry: WorkerTelemetry | None = None,
        grammar_check: GrammarCheck | None = None,
    ) -> None:
        self._id = worker_id
        self._generation = generation
        self._config = config
        self._engine = engine
        self._kv_importer = kv_importer
        self._store = store
        self._layout = layout
        self._transports = transports
        self._key_hasher = key_hasher
        self._model_digest = model_digest
        self._host = host
        self._clock = clock
        self._has_other_ready_workers = has_other_ready_workers
        self._constraint_factory = constraint_factory
        self._telemetry = telemetry or WorkerTelemetry(worker_id, CollectorRegistry(), clock)
        self._grammar_check = grammar_check
        self._grammar_compile_slots = FairSlots(
            MAX_CONCURRENT_GRAMMARS, MAX_WAITING_GRAMMARS, "grammars"
        )
        self._role_state = RoleState(role, on_change)
        self._jobs: dict[RequestId, Job] = {}  # by placement id
        self._latest_jobs: dict[RequestId, Job] = {}  # by request id: the latest placement
        self._unfinished_transfers = UnfinishedTransfers()
        self._export_added = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._final_publish_task: asyncio.Task[None] | None = None
        self._last_step_error = ""
        self._load = WorkerLoad()
        self._answer_lengths = AnswerLengthStats()
        self._link_meter = LinkMeter()

    # -- lifecycle ----------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. A bug outside of a single request's handling ends the worker."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._role_state.mark_ready()
            while True:
                await self._refresh_load()
                self._fail_unread_exports()
                self._unfinished_transfers.sweep()
                since = self._role_state.draining_since_seconds
                if since is not None and self._has_other_ready_workers():
                    await self._drain_jobs(since)
                if self.is_idle:
                    self._role_state.finish_role_change()
                    self._publish_remaining_blocks(tasks)
                await self._clock.sleep(SWEEP_SECONDS)

    def start_drain(self, permanent: bool = True) -> None:
        """Stop accepting requests. Idempotent.

        While other workers are ready, requests that have not started are rerouted and answers that
        take longer are migrated. Then blocks that only this worker has are published to the store.
        Unless the drain is permanent, :meth:`convert` to the current role ends it."""
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
        """Whether the worker is leaving, has no requests, and has published its blocks."""
        handed_over = self._final_publish_task is not None and self._final_publish_task.done()
        return self._role_state.is_leaving and self.is_idle and handed_over

    @property
    def load(self) -> WorkerLoad:
        """The load as of the last step or sweep."""
        return self._load

    async def inspect(self) -> WorkerInspection:
        inspect = partial(
            inspect_engine, worker=self._id, state=self.state, drained=self.is_drained
        )
        return await self._engine.call(lambda engine: inspect(engine, num_jobs=len(self._jobs)))

    # -- requests -------------------------------------------------------------------------

    def open_stream(self) -> OutputStream:
        return OutputStream(self._submit, self._cancel, self._cancel_stream)

    def _submit(
        self, stream: OutputStream, spec: RequestSpec, task: Task, source: WorkerRef | None
    ) -> None:
        try:
            self._admit(spec)
            if task is Task.DECODE and source is None:
                raise Invalid("a decode task must name its source worker", param="source")
        except BatonError as error:
            draining = self.state is WorkerState.DRAINING
            stream.put(rerouted_output(spec) if draining else failed_output(spec, error))
            self._telemetry.record_rejected(spec.request_id, error)
            return
        job = Job(spec.request_id, replace(spec, request_id=placement_id(spec)), task, stream)
        self._jobs[job.spec.request_id] = job
        self._latest_jobs[job.request_id] = job
        self._telemetry.record_started(job)
        spec = job.spec
        if task is Task.PREFILL:
            job.kv_export = self._new_export(job, len(spec.token_ids))
            self._export_added.set()
        if task is Task.DECODE:
            assert source is not None
            self._spawn(job, partial(self._import_kv, job, source))
        else:
            self._spawn(job, partial(self._add_to_engine, job))

    def _new_export(self, job: Job, num_tokens: int) -> KvExport:
        return KvExport(
            self._layout,
            num_tokens,
            self._key_hasher.block_tokens,
            self._config.reserve_ahead_tokens,
            lambda complete: self._on_export_closed(job, complete),
        )

    def _admit(self, spec: RequestSpec) -> None:
        """Raise an error if the request can't be accepted; end its older placement, if any."""
        if self.state is not WorkerState.READY:
            raise Unavailable(f"worker {self._id} is {self.state.value}")
        older = self._latest_jobs.get(spec.request_id)
        if older is not None and older.spec.epoch >= spec.epoch:
            raise Invalid(f"request {spec.request_id} is already here in epoch {older.spec.epoch}")
        if older is not None:
            self._end_job(older)
        if len(self._jobs) >= self._config.max_jobs:
            raise Overloaded(f"worker {self._id} has {len(self._jobs)} requests, the maximum")

    def _spawn(self, job: Job, work: Callable[[], Awaitable[None]]) -> None:
        assert self._tasks is not None, "run() comes first"
        job.admission_task = self._tasks.create_task(self._run_guarded(job, work))

    async def _run_guarded(self, job: Job, work: Callable[[], Awaitable[None]]) -> None:
        """Run the coroutine that brings a job into the engine. If it fails or is cancelled, free
        the job's resources; an unexpected exception fails only this job."""
        try:
            await work()
        except Exception as error:
            job.admission_task = None
            self._fail_job(job, self._to_baton_error(job, error))
            self._abort_in_engine(job)
        except asyncio.CancelledError:
            job.admission_task = None
            self._abort_in_engine(job)
            raise
        job.admission_task = None

    async def _add_to_engine(self, job: Job) -> None:
        spec = job.spec
        constraint = await self._open_constraint(spec)
        if spec.wants_prompt_logprobs:
            job.prefix_fetch = PrefixFetch(spec.request_id)
            await self._engine.call(lambda engine: engine.add(spec, job.task, constraint))
            return
        chain = await self._hash_blocks(job)
        job.prefix_fetch = fetch = await self._store.find_prefix(spec, chain.keys)

        def add(engine: Engine) -> int | None:
            """Add the request to the engine and return None; or, if the store has more of the
            prefix than the device, only return the number of blocks cached on the device."""
            cached = engine.count_cached_blocks(chain.keys)
            if fetch.num_stored_blocks > cached and not fetch.is_fetched:
                return cached
            engine.add(spec, job.task, constraint, chain)
            return None

        cached = await self._engine.call(add)
        if cached is not None:
            await self._store.fetch_prefix(fetch, cached)
            fetch.is_fetched = True
            await self._engine.call(add)
            self._store.start_split_fetch(fetch)

    async def _hash_blocks(self, job: Job) -> BlockKeyChain:
        """Hash the job's block keys once, so that the engine does not hash between two steps."""
        spec = job.spec
        if len(spec.token_ids) > MAX_INLINE_HASH_TOKENS:
            chain = await run_in_thread(lambda: self._key_hasher.make_chain(spec))
        else:
            chain = self._key_hasher.make_chain(spec)
        job.keys = tuple(chain.keys)
        return chain

    async def _open_constraint(self, spec: RequestSpec) -> Constraint | None:
        """Return the answer's grammar constraint, or None if it has no grammar. Raises Invalid for
        a grammar that can't be enforced, Overloaded or Unavailable if it could not be compiled."""
        grammar, constraints = spec.sampling.grammar, self._constraint_factory
        if grammar is None or constraints is None:
            return None
        answered = spec.token_ids[spec.num_prompt_tokens :]
        owner = spec.owner
        if self._grammar_check is not None:
            await self._grammar_check(grammar, owner.hex())
        async with self._grammar_compile_slots.slot(owner.hex()):
            return await run_in_thread(lambda: constraints.create(grammar, answered, owner))

    async def _import_kv(self, job: Job, source: WorkerRef) -> None:
        constraint = await self._open_constraint(job.spec)
        chain = await self._hash_blocks(job)
        kv_import = KvImport()
        self._telemetry.record_import_started(job, kv_import.stats)
        try:
            token_id = await self._kv_importer.import_kv(job.spec, chain, source, kv_import)
        finally:
            if kv_import.unfinished_transfers:
                self._quarantine(job, kv_import)
        self._record_link_speed(kv_import.stats)
        self._telemetry.record_import_finished(kv_import.stats)
        job.details.update(kv_import.stats.details())
        if token_id is None:
            self._end_job(job, JobOutcome.DONE)
            return
        request_id = job.spec.request_id
        try:
            await self._engine.call(
                lambda engine: engine.start_decoding(request_id, token_id, constraint)
            )
        except Invalid as error:  # the request was validated before; only the token is new
            raise Corrupt(f"source {source.id} sent token {token_id}: {error}") from error

    def _record_link_speed(self, stats: KvTransferStats) -> None:
        """Record the link speed if the KV came from another host."""
        if stats.transport not in LOCAL_ONLY:
            self._link_meter.record(REMOTE_KV_IMPORTS, stats.size_bytes, stats.read_seconds)

    def _quarantine(self, job: Job, kv_import: KvImport) -> None:
        """Quarantine the blocks until the unfinished transfer has ended; a sweep releases them."""
        assert kv_import.transport is not None and kv_import.reservation is not None
        request_id, reservation = job.spec.request_id, kv_import.reservation
        blocks = reservation.block_ids[reservation.num_cached_blocks :]

        def quarantine(engine: Engine) -> None:
            assert engine.abort(request_id, quarantine=True), "only the import ends a reservation"

        self._engine.send(quarantine)
        release = partial(Engine.release_quarantine, block_ids=blocks)
        self._unfinished_transfers.add(
            kv_import.transport, kv_import.unfinished_transfers, lambda: self._engine.send(release)
        )

    def _cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        job = self._latest_jobs.get(request_id)
        if job is not None and job.spec.epoch <= epoch:
            self._end_job(job)

    def _cancel_stream(self, stream: OutputStream) -> None:
        for job in [job for job in self._jobs.values() if job.stream is stream]:
            self._end_job(job)

    def _fail_job(self, job: Job, error: BatonError) -> None:
        if job.spec.request_id in self._jobs:
            job.stream.put(failed_output(replace(job.spec, request_id=job.request_id), error))
            self._telemetry.record_failed(job, error)
            self._end_job(job, JobOutcome.FAILED)

    def _to_baton_error(self, job: Job, error: Exception) -> BatonError:
        """Return the error to report to the router; log an unexpected one with its traceback."""
        if isinstance(error, BatonError):
            return error
        log.error("request_crashed", request_id=job.request_id, exc_info=error)
        return BatonError("internal error")

    def _end_job(self, job: Job, outcome: JobOutcome = JobOutcome.CANCELLED) -> None:
        """Remove the job and free its resources. If the job is still on its way into the engine,
        cancel that task, which frees them once the transfers into its blocks have ended."""
        if job.spec.request_id not in self._jobs:
            return
        self._remove_job(job, outcome)
        if job.kv_export is not None:
            job.kv_export.close()
        if job.admission_task is not None and job.admission_task is not asyncio.current_task():
            job.admission_task.cancel()
        else:
            self._abort_in_engine(job)

    def _remove_job(self, job: Job, outcome: JobOutcome) -> None:
        del self._jobs[job.spec.request_id]
        if self._latest_jobs.get(job.request_id) is job:
            del self._latest_jobs[job.request_id]
        self._telemetry.record_ended(job, outcome)

    def _abort_in_engine(self, job: Job) -> None:
        request_id = job.spec.request_id
        self._engine.send(lambda engine: engine.abort(request_id))
        self._kv_importer.notify_blocks_freed()

    # -- draining ---------------------------------------------------------------------------

    def _publish_remaining_blocks(self, tasks: asyncio.TaskGroup) -> None:
        """Start to publish the remaining blocks when leaving, once per drain."""
        if not self._role_state.is_leaving:
            self._final_publish_task = None
        elif self._final_publish_task is None:
            self._final_publish_task = tasks.create_task(self._store.publish_remaining())

    async def _drain_jobs(self, since: float) -> None:
        """Reroute or migrate the jobs that can leave now. Jobs that are still on their way into the
        engine follow once they are there."""
        in_grace_period = self._clock.monotonic() < since + self._config.drain_grace_seconds
        for job in list(self._jobs.values()):
            request_id = job.spec.request_id
            if job.admission_task is not None:
                continue
            if await self._engine.call(partial(Engine.is_waiting, request_id=request_id)):
                self._reroute(job)
            elif job.kv_export is None and not in_grace_period:
                await self._migrate(job)

    def _reroute(self, job: Job) -> None:
        if job.spec.request_id in self._jobs:
            job.stream.put(rerouted_output(replace(job.spec, request_id=job.request_id)))
            self._end_job(job, JobOutcome.REROUTED)

    async def _migrate(self, job: Job) -> None:
        """Stop an answer and export its KV for the next epoch, as if it had been a prompt."""
        epoch = Epoch(job.spec.epoch + 1)
        next_spec = replace(job.spec, request_id=job.request_id, epoch=epoch)
        next_spec = replace(next_spec, request_id=placement_id(next_spec))
        old_id, new_id = job.spec.request_id, next_spec.request_id
        migrated = await self._engine.call(lambda engine: engine.begin_migration(old_id, new_id))
        if migrated is None:
            return
        if old_id not in self._jobs:  # cancelled meanwhile
            self._engine.send(lambda engine: engine.abort(new_id))
            return
        self._remove_job(job, JobOutcome.MIGRATED)
        export_job = Job(job.request_id, next_spec, Task.PREFILL, job.stream)
        num_tokens = migrated.progress.num_computed_tokens
        export_job.kv_export = self._new_export(export_job, num_tokens)
        export_job.prefilled_at = self._clock.monotonic()
        self._jobs[new_id] = self._latest_jobs[job.request_id] = export_job
        self._telemetry.record_started(export_job)
        export_job.kv_export.record_progress(migrated.progress)
        export_job.kv_export.finish_prefill(migrated.last_token_id, finished=False)
        self._store.record_step(StepResult(sealed_runs=migrated.sealed_runs))
        self._export_added.set()
        job.stream.put(
            migrated_output(replace(job.spec, request_id=job.request_id), num_tokens + 1)
        )

    # -- steps ------------------------------------------------------------------------------

    def on_step(self, result: StepResult) -> None:
        """Handle a step's result; called in order for every step. A step covers many requests, so
        an exception while delivering one request's output fails only that request."""
        self._record_step(result)
        for progress in result.progress:
            job = self._jobs.get(progress.request_id)
            if job is not None and job.kv_export is not None:
                job.kv_export.record_progress(progress)
        for output in result.outputs:
            job = self._jobs.get(output.request_id)
            if job is None:
                continue
            try:
                self._deliver(job, output)
            except Exception as error:
                self._fail_job(job, self._to_baton_error(job, error))
        self._kv_importer.notify_blocks_freed()

    def _record_step(self, result: StepResult) -> None:
        """Update the store and the metrics. A failure here must not fail any answer; the same
        exception is logged once, not with every step."""
        try:
            self._store.record_step(result)
            self._telemetry.record_step(result, self._jobs)
        except Exception as error:
            if repr(error) != self._last_step_error:
                log.exception("step_not_recorded")
            self._last_step_error = repr(error)

    def _deliver(self, job: Job, output: RequestOutput) -> None:
        if job.prefix_fetch is not None:
            job.details.update(job.prefix_fetch.details(output.cached_tokens))
            self._telemetry.record_first_output(job, output, job.prefix_fetch)
            job.prefix_fetch = None  # reported once, with the first output
        if output.finish_reason is not None:
            self._answer_lengths.record(output.first_index + len(output.token_ids))
        output.request_id = job.request_id  # the engine uses the placement's id
        if job.details:
            output.details = {**output.details, **job.details}
            job.details = {}
        job.stream.put(output)
        if output.finish_reason is FinishReason.ERROR:
            self._telemetry.record_failed(job, Invalid(output.error))
            self._end_job(job, JobOutcome.FAILED)
        elif job.kv_export is not None:
            job.prefilled_at = self._clock.monotonic()
            job.kv_export.finish_prefill(output.token_ids[-1], output.finish_reason is not None)
            if output.finish_reason is not None:
                self._end_job(job, JobOutcome.DONE)
        elif output.finish_reason is not None:
            self._telemetry.record_answer_finished(job, output)
            self._remove_job(job, JobOutcome.DONE)

    # -- KV transfer, source side ---------------------------------------------------------

    async def open_kv_export(self, opening: KvTransferOpen) -> LocalKvExportStream:
        if opening.source_generation != self._generation:
            raise NotFound(f"worker {self._id} has restarted since the request was placed")
        if opening.model_digest != self._model_digest:
            raise Invalid(
                "the prefill and the decode worker have different models, or different "
                "quantization: all workers of a cluster must have the same",
                param="model_digest",
            )
        if opening.kv_layout != self._layout.name:
            raise Invalid(
                f"the prefill worker has KV layout {self._layout.name}, the decode worker "
                f"{opening.kv_layout}: all workers of a cluster must have the same model, dtype, "
                "kv_dtype and block_tokens",
                param="kv_layout",
            )
        name = choose_transport(
            tuple(self._transports), opening.transports, self._host == opening.host
        )
        kv_export = await self._wait_for_export(opening.request_id)
        kv_export.attach_reader(self._transports[name].export())
        return LocalKvExportStream(kv_export)

    async def _wait_for_export(self, placement: RequestId) -> KvExport:
        """Return the placement's export. Waits for it, since the importing worker may ask before
        the request has arrived."""
        try:
            async with asyncio.timeout(self._config.arrival_timeout_seconds):
                while True:
                    job = self._jobs.get(placement)
                    if job is not None and job.kv_export is not None:
                        return job.kv_export
                    self._export_added.clear()
                    await self._export_added.wait()
        except TimeoutError as error:
            raise NotFound(f"request {placement} is not on this worker") from error

    def _on_export_closed(self, job: Job, complete: bool) -> None:
        """End the job: the importing worker has read everything, or disconnected."""
        if job.spec.request_id not in self._jobs:
            return
        if complete:
            self._end_job(job, JobOutcome.DONE)
        else:
            self._fail_job(job, Unavailable("the decode worker ended the KV transfer early"))

    def _fail_unread_exports(self) -> None:
        """Fail prefilled requests whose KV no worker has started to import in time."""
        oldest = self._clock.monotonic() - self._config.export_timeout_seconds
        for job in list(self._jobs.values()):
            is_unread = job.kv_export is not None and not job.kv_export.has_reader
            if is_unread and job.prefilled_at is not None and job.prefilled_at < oldest:
                self._fail_job(
                    job, Unavailable("no decode worker imported the request's KV in time")
                )

    async def _refresh_load(self) -> None:
        jobs = [job for job in self._jobs.values() if job.admission_task]
        incoming = [IncomingRequest(job.spec, job.task, job.keys) for job in jobs]
        answers, clock = self._answer_lengths, self._clock
        mean = answers.mean
        load, self._telemetry.gauges.stats = await self._engine.call(
            lambda engine: (measure_load(engine, incoming, clock, mean), engine.stats())
        )
        rate = self._store.bytes_per_second or self._link_meter.bytes_per_second(REMOTE_KV_IMPORTS)
        self._load = replace(
            load,
            answer_tokens=mean,
            short_answer_tokens=answers.short,
            link_bytes_per_second=rate,
        )
