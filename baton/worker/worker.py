"""A worker: takes requests from routers, runs them on its engine, hands their KV on.

Prefill and decode workers differ in what they are asked for, not in what they can do: either
may be asked for a whole request when the other pool is gone.
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
"""Also how old the load is at most, but for a step, that a heartbeat tells."""

MAX_CONCURRENT_GRAMMARS = 2
"""Threads that compile grammars, of one tenant one: others' requests need some, too."""

MAX_WAITING_GRAMMARS = 1024

GrammarCheck = Callable[[Grammar, str], Awaitable[None]]
"""Tries a grammar of a tenant where it can do no harm: :mod:`baton.text.grammar.checker`."""

MAX_INLINE_HASH_TOKENS = 4096
"""Tokens of a prompt whose keys are made in the event loop, in half a millisecond; those of a
longer one are made in a thread."""

REMOTE_KV_IMPORTS = "pulls"
"""The name of all links to other hosts' workers together."""


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """``max_jobs`` bounds requests in whatever phase. Seconds: ``hold_seconds`` is how long
    a computed prompt waits for its reader, ``arrival_seconds`` how long a reader waits for the
    request that it came for (the two messages race), ``finish_seconds`` how long answers may go on
    while the worker drains, before others go on with them. ``late_tokens``: see
    :class:`KvExport`."""

    max_jobs: int = 4096
    hold_seconds: float = 30.0
    finish_seconds: float = 2.0
    arrival_seconds: float = 5.0
    late_tokens: int = 1024


class Worker:
    """Everything but the sockets. All methods run in the event loop."""

    def __init__(
        self,
        worker_id: WorkerId,
        generation: Incarnation,
        config: WorkerConfig,
        engine: EngineHandle,
        intake: KvImporter,
        store: PrefixStore,
        layout: KvLayout,
        transports: dict[str, Transport],
        key_maker: BlockKeyHasher,
        model_digest: str,
        host: str,
        clock: Clock,
        has_heirs: Callable[[], bool] = lambda: True,
        role: Role = Role.PREFILL,
        on_change: Callable[[], None] = lambda: None,
        constraints: ConstraintFactory | None = None,
        witness: WorkerTelemetry | None = None,
        grammar_check: GrammarCheck | None = None,
    ) -> None:
        self._id = worker_id
        self._generation = generation
        self._config = config
        self._engine = engine
        self._intake = intake
        self._store = store
        self._layout = layout
        self._transports = transports
        self._key_maker = key_maker
        self._model_digest = model_digest
        self._host = host
        self._clock = clock
        self._has_heirs = has_heirs
        self._constraints = constraints
        self._witness = witness or WorkerTelemetry(worker_id, CollectorRegistry(), clock)
        self._grammar_check = grammar_check
        self._compiling = FairSlots(MAX_CONCURRENT_GRAMMARS, MAX_WAITING_GRAMMARS, "grammars")
        self._duty = RoleState(role, on_change)
        self._jobs: dict[RequestId, Job] = {}  # by placement
        self._current: dict[RequestId, Job] = {}  # by request: its latest placement
        self._strays = UnfinishedTransfers()
        self._arrived = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._handover: asyncio.Task[None] | None = None
        self._step_bug = ""
        self._load = WorkerLoad()
        self._answers = AnswerLengthStats()
        self._links = LinkMeter()

    # -- life ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Serves until cancelled. A bug in what all requests share ends it."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._duty.begin()
            while True:
                await self._refresh_load()
                self._drop_unread()
                self._strays.sweep()
                since = self._duty.drains_since
                if since is not None and self._has_heirs():
                    await self._part(since)
                if self.idle:
                    self._duty.settle()
                    self._hand_over(tasks)
                await self._clock.sleep(SWEEP_SECONDS)

    def start_drain(self, for_good: bool = True) -> None:
        """Takes nothing new. While there are others, what has not begun is turned away, and answers
        that take longer go on elsewhere. Then what only this worker holds is offered to the store.
        Idempotent. Unless it is ``for_good``, :meth:`convert` to its role ends it."""
        self._duty.leave(self._clock.monotonic(), for_good)

    def convert(self, role: Role) -> None:
        """Drains, and is ready again in that role once nothing is left:
        :meth:`RoleState.convert`."""
        self._duty.convert(role, self._clock.monotonic())

    @property
    def state(self) -> WorkerState:
        return self._duty.state

    @property
    def role(self) -> Role:
        return self._duty.role

    @property
    def idle(self) -> bool:
        return not self._jobs

    @property
    def drained(self) -> bool:
        """It leaves, and nothing is left that anybody could want of it."""
        handed_over = self._handover is not None and self._handover.done()
        return self._duty.leaves and self.idle and handed_over

    @property
    def load(self) -> WorkerLoad:
        """As of the last step or sweep."""
        return self._load

    async def inspect(self) -> WorkerInspection:
        look = partial(inspect_engine, worker=self._id, state=self.state, drained=self.drained)
        return await self._engine.call(lambda engine: look(engine, num_jobs=len(self._jobs)))

    # -- requests -------------------------------------------------------------------------

    def open_stream(self) -> OutputStream:
        return OutputStream(self._submit, self._cancel, self._cancel_stream)

    def _submit(
        self, stream: OutputStream, spec: RequestSpec, task: Task, source: WorkerRef | None
    ) -> None:
        try:
            self._admit(spec)
            if task is Task.DECODE and source is None:
                raise Invalid("a decode task names its source", param="source")
        except BatonError as error:
            draining = self.state is WorkerState.DRAINING
            stream.put(rerouted_output(spec) if draining else failed_output(spec, error))
            self._witness.refused(spec.request_id, error)
            return
        job = Job(spec.request_id, replace(spec, request_id=placement_id(spec)), task, stream)
        self._jobs[job.spec.request_id] = job
        self._current[job.request_id] = job
        self._witness.began(job)
        spec = job.spec
        if task is Task.PREFILL:
            job.hold = self._new_hold(job, len(spec.token_ids))
            self._arrived.set()
        if task is Task.DECODE:
            assert source is not None
            self._spawn(job, partial(self._receive, job, source))
        else:
            self._spawn(job, partial(self._compute, job))

    def _new_hold(self, job: Job, num_tokens: int) -> KvExport:
        return KvExport(
            self._layout,
            num_tokens,
            self._key_maker.block_tokens,
            self._config.late_tokens,
            lambda complete: self._hold_closed(job, complete),
        )

    def _admit(self, spec: RequestSpec) -> None:
        """Raises what forbids the request; ends its older placement if that is still here."""
        if self.state is not WorkerState.READY:
            raise Unavailable(f"worker {self._id} is {self.state.value}")
        older = self._current.get(spec.request_id)
        if older is not None and older.spec.epoch >= spec.epoch:
            raise Invalid(f"request {spec.request_id} is here in epoch {older.spec.epoch}")
        if older is not None:
            self._end(older)
        if len(self._jobs) >= self._config.max_jobs:
            raise Overloaded(f"worker {self._id} has {len(self._jobs)} requests")

    def _spawn(self, job: Job, work: Callable[[], Awaitable[None]]) -> None:
        assert self._tasks is not None, "run() comes first"
        job.runner = self._tasks.create_task(self._guard(job, work))

    async def _guard(self, job: Job, work: Callable[[], Awaitable[None]]) -> None:
        """Runs a job's way into the engine. Whatever ends it early frees what it holds; also a bug
        is the end of this job alone."""
        try:
            await work()
        except Exception as error:
            job.runner = None
            self._fail(job, self._own_error(job, error))
            self._abort_in_engine(job)
        except asyncio.CancelledError:
            job.runner = None
            self._abort_in_engine(job)
            raise
        job.runner = None

    async def _compute(self, job: Job) -> None:
        spec = job.spec
        constraint = await self._open_constraint(spec)
        if spec.scores_prompt:
            job.extension = PrefixFetch(spec.request_id)
            await self._engine.call(lambda engine: engine.add(spec, job.task, constraint))
            return
        chain = await self._hash(job)
        job.extension = extension = await self._store.find(spec, chain.keys)

        def add(engine: Engine) -> int | None:
            """None, or the cached blocks where the store holds more: it is fetched first."""
            cached = engine.num_cached_blocks(chain.keys)
            if extension.num_stored > cached and not extension.is_fetched:
                return cached
            engine.add(spec, job.task, constraint, chain)
            return None

        cached = await self._engine.call(add)
        if cached is not None:
            await self._store.extend(extension, cached)
            extension.is_fetched = True
            await self._engine.call(add)
            self._store.follow(extension)

    async def _hash(self, job: Job) -> BlockKeyChain:
        """The keys of its blocks, made once: nothing of it is hashed between two steps."""
        spec = job.spec
        if len(spec.token_ids) > MAX_INLINE_HASH_TOKENS:
            chain = await run_in_thread(lambda: self._key_maker.chain(spec))
        else:
            chain = self._key_maker.chain(spec)
        job.keys = tuple(chain.keys)
        return chain

    async def _open_constraint(self, spec: RequestSpec) -> Constraint | None:
        """Where the answer is in its grammar, if it has one. Raises Invalid for one that can't be
        followed, Overloaded or Unavailable when that can't be found out."""
        grammar, constraints = spec.sampling.grammar, self._constraints
        if grammar is None or constraints is None:
            return None
        answered = spec.token_ids[spec.num_prompt_tokens :]
        owner = spec.owner
        if self._grammar_check is not None:
            await self._grammar_check(grammar, owner.hex())
        async with self._compiling.turn(owner.hex()):
            return await run_in_thread(lambda: constraints.open(grammar, answered, owner))

    async def _receive(self, job: Job, source: WorkerRef) -> None:
        constraint = await self._open_constraint(job.spec)
        chain = await self._hash(job)
        landing = KvImport()
        self._witness.pulls(job, landing.shipment)
        try:
            token_id = await self._intake.bring_in(job.spec, chain, source, landing)
        finally:
            if landing.strays:
                self._quarantine(job, landing)
        self._note_pull(landing.shipment)
        self._witness.pulled(landing.shipment)
        job.details.update(landing.shipment.details())
        if token_id is None:
            self._end(job, JobOutcome.DONE)
            return
        request_id = job.spec.request_id
        try:
            await self._engine.call(lambda engine: engine.start(request_id, token_id, constraint))
        except Invalid as error:  # of a request that was taken, only the source's token is new
            raise Corrupt(f"source {source.id} ended with token {token_id}: {error}") from error

    def _note_pull(self, shipment: KvTransferStats) -> None:
        """Of what came from another host."""
        if shipment.transport not in LOCAL_ONLY:
            self._links.record(REMOTE_KV_IMPORTS, shipment.size_bytes, shipment.reading_seconds)

    def _quarantine(self, job: Job, landing: KvImport) -> None:
        """Nobody gets the blocks until the stray transfer has ended; the sweeper sees to it."""
        assert landing.transport is not None and landing.reservation is not None
        request_id, reservation = job.spec.request_id, landing.reservation
        blocks = reservation.block_ids[reservation.num_cached_blocks :]

        def quarantine(engine: Engine) -> None:
            assert engine.abort(request_id, quarantine=True), "only its way in ends a reservation"

        self._engine.send(quarantine)
        release = partial(Engine.release_quarantine, block_ids=blocks)
        self._strays.keep(landing.transport, landing.strays, lambda: self._engine.send(release))

    def _cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        job = self._current.get(request_id)
        if job is not None and job.spec.epoch <= epoch:
            self._end(job)

    def _cancel_stream(self, stream: OutputStream) -> None:
        for job in [job for job in self._jobs.values() if job.stream is stream]:
            self._end(job)

    def _fail(self, job: Job, error: BatonError) -> None:
        if job.spec.request_id in self._jobs:
            job.stream.put(failed_output(replace(job.spec, request_id=job.request_id), error))
            self._witness.failed(job, error)
            self._end(job, JobOutcome.FAILED)

    def _own_error(self, job: Job, error: Exception) -> BatonError:
        """What its router is told of ``error``; a bug is logged with its traceback."""
        if isinstance(error, BatonError):
            return error
        log.error("request_crashed", request_id=job.request_id, exc_info=error)
        return BatonError("internal error")

    def _end(self, job: Job, outcome: JobOutcome = JobOutcome.DROPPED) -> None:
        """Forgets the job and frees what it holds. While its way in is still running, that
        frees it, after the transfers that write to its blocks have ended."""
        if job.spec.request_id not in self._jobs:
            return
        self._forget(job, outcome)
        if job.hold is not None:
            job.hold.close()
        if job.runner is not None and job.runner is not asyncio.current_task():
            job.runner.cancel()
        else:
            self._abort_in_engine(job)

    def _forget(self, job: Job, outcome: JobOutcome) -> None:
        del self._jobs[job.spec.request_id]
        if self._current.get(job.request_id) is job:
            del self._current[job.request_id]
        self._witness.ended(job, outcome)

    def _abort_in_engine(self, job: Job) -> None:
        request_id = job.spec.request_id
        self._engine.send(lambda engine: engine.abort(request_id))
        self._intake.notice_room()

    # -- draining ---------------------------------------------------------------------------

    def _hand_over(self, tasks: asyncio.TaskGroup) -> None:
        """Once, when it leaves; again, if it was told to stay meanwhile."""
        if not self._duty.leaves:
            self._handover = None
        elif self._handover is None:
            self._handover = tasks.create_task(self._store.hand_over())

    async def _part(self, since: float) -> None:
        """From what can go now. What is on its way in is seen to once it is here."""
        patient = self._clock.monotonic() < since + self._config.finish_seconds
        for job in list(self._jobs.values()):
            request_id = job.spec.request_id
            if job.runner is not None:
                continue
            if await self._engine.call(partial(Engine.is_waiting, request_id=request_id)):
                self._turn_away(job)
            elif job.hold is None and not patient:
                await self._move(job)

    def _turn_away(self, job: Job) -> None:
        if job.spec.request_id in self._jobs:
            job.stream.put(rerouted_output(replace(job.spec, request_id=job.request_id)))
            self._end(job, JobOutcome.TURNED_AWAY)

    async def _move(self, job: Job) -> None:
        """An answer becomes a hold for its next epoch, as if it had been a prompt."""
        epoch = Epoch(job.spec.epoch + 1)
        heir = replace(job.spec, request_id=job.request_id, epoch=epoch)
        heir = replace(heir, request_id=placement_id(heir))
        ours, theirs = job.spec.request_id, heir.request_id
        passed = await self._engine.call(lambda engine: engine.pass_on(ours, theirs))
        if passed is None:
            return
        if ours not in self._jobs:  # cancelled meanwhile
            self._engine.send(lambda engine: engine.abort(theirs))
            return
        self._forget(job, JobOutcome.MOVED)
        held = Job(job.request_id, heir, Task.PREFILL, job.stream)
        num_tokens = passed.progress.num_computed_tokens
        held.hold = self._new_hold(held, num_tokens)
        held.prefilled_at = self._clock.monotonic()
        self._jobs[theirs] = self._current[job.request_id] = held
        self._witness.began(held)
        held.hold.advance(passed.progress)
        held.hold.finish(passed.token_id, finished=False)
        self._store.note_step(StepResult(sealed=passed.sealed))
        self._arrived.set()
        job.stream.put(
            migrated_output(replace(job.spec, request_id=job.request_id), num_tokens + 1)
        )

    # -- steps ------------------------------------------------------------------------------

    def on_step(self, result: StepResult) -> None:
        """Called with each step's result, in order. A step is many requests': an exception in what
        one of them gets ends that one."""
        self._note_step(result)
        for progress in result.progress:
            job = self._jobs.get(progress.request_id)
            if job is not None and job.hold is not None:
                job.hold.advance(progress)
        for output in result.outputs:
            job = self._jobs.get(output.request_id)
            if job is None:
                continue
            try:
                self._deliver(job, output)
            except Exception as error:
                self._fail(job, self._own_error(job, error))
        self._intake.notice_room()

    def _note_step(self, result: StepResult) -> None:
        """For metrics and the store, for want of which no answer fails. A bug is told once, not
        with every step."""
        try:
            self._store.note_step(result)
            self._witness.stepped(result, self._jobs)
        except Exception as error:
            if repr(error) != self._step_bug:
                log.exception("step_not_noted")
            self._step_bug = repr(error)

    def _deliver(self, job: Job, output: RequestOutput) -> None:
        if job.extension is not None:
            job.details.update(job.extension.details(output.cached_tokens))
            self._witness.answered(job, output, job.extension)
            job.extension = None  # told once, with the first output
        if output.finish_reason is not None:
            self._answers.record(output.first_index + len(output.token_ids))
        output.request_id = job.request_id  # the engine knows the placement's
        if job.details:
            output.details = {**output.details, **job.details}
            job.details = {}
        job.stream.put(output)
        if output.finish_reason is FinishReason.ERROR:
            self._witness.failed(job, Invalid(output.error))
            self._end(job, JobOutcome.FAILED)
        elif job.hold is not None:
            job.prefilled_at = self._clock.monotonic()
            job.hold.finish(output.token_ids[-1], output.finish_reason is not None)
            if output.finish_reason is not None:
                self._end(job, JobOutcome.DONE)
        elif output.finish_reason is not None:
            self._witness.finished(job, output)
            self._forget(job, JobOutcome.DONE)

    # -- hand-off, source side -----------------------------------------------------------

    async def open_pull(self, opening: KvTransferOpen) -> LocalKvExportStream:
        if opening.source_generation != self._generation:
            raise NotFound(f"worker {self._id} was reborn since the request was placed")
        if opening.model_digest != self._model_digest:
            raise Invalid(
                "reader and source have different models, or keep one in different formats "
                "(quantization): all workers of a cluster must have the same",
                param="model_digest",
            )
        if opening.kv_layout != self._layout.name:
            raise Invalid(
                f"source has layout {self._layout.name}, reader {opening.kv_layout}: all workers "
                "of a cluster must have the same model, dtype, kv_dtype and block_tokens",
                param="kv_layout",
            )
        name = choose_transport(
            tuple(self._transports), opening.transports, self._host == opening.host
        )
        hold = await self._hold_of(opening.request_id)
        hold.attach(self._transports[name].export())
        return LocalKvExportStream(hold)

    async def _hold_of(self, placement: RequestId) -> KvExport:
        """The reader may come before the request does."""
        try:
            async with asyncio.timeout(self._config.arrival_seconds):
                while True:
                    job = self._jobs.get(placement)
                    if job is not None and job.hold is not None:
                        return job.hold
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError as error:
            raise NotFound(f"request {placement} is not here") from error

    def _hold_closed(self, job: Job, complete: bool) -> None:
        """The reader has everything, or left."""
        if job.spec.request_id not in self._jobs:
            return
        if complete:
            self._end(job, JobOutcome.DONE)
        else:
            self._fail(job, Unavailable("the decode worker left the hand-off"))

    def _drop_unread(self) -> None:
        """Ends computed prompts that no reader came for in time."""
        oldest = self._clock.monotonic() - self._config.hold_seconds
        for job in list(self._jobs.values()):
            waits = job.hold is not None and not job.hold.has_reader
            if waits and job.prefilled_at is not None and job.prefilled_at < oldest:
                self._fail(job, Unavailable("no decode worker came for the request"))

    async def _refresh_load(self) -> None:
        jobs = [job for job in self._jobs.values() if job.runner]
        coming = [IncomingRequest(job.spec, job.task, job.keys) for job in jobs]
        answers, clock = self._answers, self._clock
        mean = answers.mean
        load, self._witness.gauges.stats = await self._engine.call(
            lambda engine: (measure_load(engine, coming, clock, mean), engine.stats())
        )
        rate = self._store.bytes_per_second or self._links.bytes_per_second(REMOTE_KV_IMPORTS)
        self._load = replace(
            load,
            answer_tokens=mean,
            short_answer_tokens=answers.short,
            link_bytes_per_second=rate,
        )
