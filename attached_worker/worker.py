"""The worker without its sockets: takes requests from routers, and has the server serve them."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

import structlog

from attached_worker.forwards import ForwardedRequests
from attached_worker.handover import PromptExports, Steps, answer_prompt, compute_prompt
from attached_worker.job import AttachedJob, continues
from attached_worker.server import ModelServer, ServerFacts, ServerLoad
from attached_worker.timing import ServerTiming
from baton.clock import Clock
from baton.core.ids import Epoch, Incarnation, RequestId, WorkerId
from baton.core.kv_transfer import KvTransferOpen, WorkerInspection, WorkerRef
from baton.core.request import RequestSpec
from baton.core.server_api import ForwardedHead, ForwardRequest
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.core.variant import Variant
from baton.core.worker_load import QueuedWork, WorkerLoad
from baton.errors import BatonError, Invalid, NotFound, Overloaded, Unavailable
from baton.rpc.worker_client import KvImportConnector
from baton.rpc.worker_service import KvExportStream
from baton.worker.answer_lengths import UNKNOWN_ANSWER_TOKENS, AnswerLengthStats
from baton.worker.context import WorkerConfig
from baton.worker.job import failed_output, placement_id, rerouted_output
from baton.worker.output_stream import OutputStream
from baton.worker.role_state import RoleState

SWEEP_SECONDS = 0.25
QUIET_SECONDS = 0.75
"""A server that has sent nothing for this time is probed."""

IDLE_PROBE_SECONDS = 2.0
LATE_SECONDS = 15.0
"""A probe that is answered within this time shows a slow server, not a frozen one."""

FORWARD_SECONDS = 5.0
"""How long a server may compute nothing else while a forwarded request has no answer: nobody knows
what an image or a hundred texts cost it."""

LOAD_SECONDS = 1.0
"""Interval at which the server is asked for its load."""

log = structlog.get_logger(__name__)


class AttachedWorker:
    """Implements :class:`baton.rpc.worker_service.WorkerCore` and
    :class:`baton.rpc.worker_service.Forwarder`. All methods run in the event loop.

    The worker accepts requests only while the server makes progress: while tokens come, or a probe
    of one token is answered in time. Otherwise its requests go elsewhere with the tokens that they
    have, and the worker drains until a probe is answered again."""

    def __init__(
        self,
        worker_id: WorkerId,
        role: Role,
        server: ModelServer,
        facts: ServerFacts,
        clock: Clock,
        connector: KvImportConnector,
        generation: Incarnation = Incarnation(0),
        variant: Variant = Variant(),
        on_change: Callable[[], None] = lambda: None,
        has_other_ready_workers: Callable[[], bool] = lambda: True,
        config: WorkerConfig | None = None,
        is_float32: bool = False,
    ) -> None:
        """``is_float32`` says that the server computes in FP32, where greedy answers don't depend
        on the shapes of its steps."""
        self._id = worker_id
        self._server = server
        self._facts = facts
        self._clock = clock
        self._connector = connector
        self._generation = generation
        self._variant = variant
        self._config = config or WorkerConfig()
        self._is_float32 = is_float32
        self._exports = PromptExports(clock, self._config.arrival_timeout_seconds)
        self._role_state = RoleState(role, on_change)
        self._has_other_ready_workers = has_other_ready_workers
        self._timing = ServerTiming()
        self._answer_lengths = AnswerLengthStats()
        self._jobs: dict[RequestId, AttachedJob] = {}
        self._forwards = ForwardedRequests(server, self._record_progress, self._doubt_server)
        self._server_load = ServerLoad(0, 0, 0.0)
        self._progress_at = clock.monotonic()
        self._has_progress = False
        self._swept_at = (self._progress_at, self._progress_at)
        """When the last two sweeps were."""

        self._failure = ""
        self._is_paused = False
        """Whether the worker drains only because its server is lost."""

        self._is_doubted = False
        """Whether the server has broken off an answer since the last probe."""

        self._was_stopped = False
        """Whether this process was stopped for so long that the server may be another one by now,
        and was not asked since."""

    # -- lifecycle -------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. Raises Unavailable when the server has come back as another."""
        await self._probe()
        self._role_state.mark_ready()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_progress())
            tasks.create_task(self._watch_load())
            while True:
                self._sweep()
                await self._clock.sleep(SWEEP_SECONDS)

    def _sweep(self) -> None:
        now = self._clock.monotonic()
        self._was_stopped |= now > self._swept_at[1] + IDLE_PROBE_SECONDS
        self._swept_at = (self._swept_at[1], now)
        if self._has_progress:
            self._has_progress = False
            self._timing.record_progress(SWEEP_SECONDS / IDLE_PROBE_SECONDS)
            for stream in dict.fromkeys(job.stream for job in self._jobs.values()):
                stream.announce_progress()
        since = self._role_state.draining_since_seconds
        if since is not None and self._has_other_ready_workers():
            in_grace = now < since + self._config.drain_grace_seconds
            for job in list(self._jobs.values()):
                if not job.has_prompt or not in_grace:
                    job.reroute()
        if self.is_idle:
            self._role_state.finish_role_change()

    def start_drain(self, permanent: bool = True) -> None:
        self._is_paused = False
        self._role_state.start_drain(self._clock.monotonic(), permanent)

    def convert(self, role: Role) -> None:
        if role is not self.role:
            raise Invalid(
                f"a worker keeps the role for which its server is attached: {self.role.value}",
                param="role",
            )
        self._role_state.convert(role, self._clock.monotonic())

    @property
    def state(self) -> WorkerState:
        return self._role_state.state

    @property
    def role(self) -> Role:
        return self._role_state.role

    @property
    def is_idle(self) -> bool:
        return not (self._jobs or self._forwards)

    @property
    def is_drained(self) -> bool:
        return self._role_state.is_leaving and self.is_idle

    # -- the server ------------------------------------------------------------------------

    async def _watch_progress(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            quiet = self._clock.monotonic() - self._progress_at
            is_quiet = quiet >= (IDLE_PROBE_SECONDS if self.is_idle else QUIET_SECONDS)
            if not (is_quiet or self._is_doubted or self._was_stopped):
                continue
            self._is_doubted = False
            await self._probe()

    async def _probe(self) -> None:
        """Have the server compute the least that it can: one token. It is lost if that takes longer
        than a server of its speed may need; if the token comes later, it is faster to wait for it
        from then on."""
        was_lost, asked_at = bool(self._failure), self._clock.monotonic()
        probe = asyncio.create_task(self._server.probe(LATE_SECONDS))
        try:
            patience = await self._wait_for_probe(probe, asked_at)
            if not probe.done() and self.state is not WorkerState.JOINING:
                self._lose_server(Unavailable(f"it has computed nothing for {patience:.1f} s"))
            await probe
        except Unavailable as error:
            self._lose_server(error)
            return
        finally:
            probe.cancel()
        if not was_lost:  # else it tells when the server came back, and not how fast it is
            self._timing.record_probe(self._clock.monotonic() - asked_at)
        self._record_progress()
        if self._failure or self._was_stopped:
            await self._regain_server()

    async def _wait_for_probe(self, probe: "asyncio.Task[None]", asked_at: float) -> float:
        """Wait for the token, as long as a server of its speed may need; return that time. While
        nobody else could serve, the server is waited for."""
        waiting = sum(len(job.spec.token_ids) for job in self._waiting_jobs)
        while True:
            patience = self._timing.stall_seconds(waiting)
            if self._forwards.waiting:
                patience = max(patience, FORWARD_SECONDS)
            if not self._has_other_ready_workers():
                patience = max(patience, LATE_SECONDS)
            left = asked_at + patience - self._clock.monotonic()
            if probe.done() or left <= 0.0:
                return patience
            await asyncio.wait([probe], timeout=min(left, SWEEP_SECONDS))

    def _lose_server(self, error: Unavailable) -> None:
        """Have all requests placed elsewhere, and accept no more of them."""
        if not self._failure:
            requests = len(self._jobs) + len(self._forwards)
            log.warning("server_lost", error=str(error), requests=requests)
            self._is_paused = self.state is not WorkerState.DRAINING
            self._role_state.start_drain(self._clock.monotonic(), permanent=False)
        self._failure = str(error)
        lost = Unavailable(f"the server of worker {self._id} is lost: {error}")
        for job in list(self._jobs.values()):
            job.fail(lost)
        self._forwards.fail(lost)

    async def _regain_server(self) -> None:
        """Accept requests again. Raises Unavailable if this is not the same server as before."""
        try:
            facts = await self._server.describe()
        except BatonError:
            return
        if facts != self._facts:
            raise Unavailable(f"the server was {self._facts}, and came back as {facts}")
        self._was_stopped = False
        if not self._failure:
            return
        log.warning("server_regained", after=self._failure)
        self._failure = ""
        if self._is_paused:
            try:
                self._role_state.convert(self.role, self._clock.monotonic())
            except Unavailable:
                pass  # the worker is shutting down

    async def _watch_load(self) -> None:
        while True:
            try:
                self._server_load = await self._server.load()
            except BatonError:
                pass  # the probes tell whether the server is there
            await self._clock.sleep(LOAD_SECONDS)

    def _record_progress(self) -> None:
        self._progress_at, self._has_progress = self._clock.monotonic(), True

    def _doubt_server(self) -> None:
        self._is_doubted = True

    # -- requests --------------------------------------------------------------------------

    def open_stream(self) -> OutputStream:
        return OutputStream(self._submit, self._cancel, self._cancel_stream)

    async def open_kv_export(self, opening: KvTransferOpen) -> KvExportStream:
        if opening.source_generation != self._generation:
            raise NotFound(f"worker {self._id} has restarted since the request was placed")
        own = (self._variant.model_digest, self._variant.kv_layout)
        if (opening.model_digest, opening.kv_layout) != own:
            raise Invalid(
                f"the server of worker {self._id} has KV of the form {self._variant.kv_layout!r}, "
                f"and the reader's {opening.kv_layout!r}, or they have loaded different weights; "
                "only equal servers may be placed together",
                param="kv_layout",
            )
        return await self._exports.attach_reader(opening)

    def _submit(
        self, stream: OutputStream, spec: RequestSpec, task: Task, source: WorkerRef | None
    ) -> None:
        try:
            self._admit(spec, task, source)
        except BatonError as error:
            draining = self.state is WorkerState.DRAINING
            stream.put(rerouted_output(spec) if draining else failed_output(spec, error))
            return
        job = AttachedJob(
            spec, task, stream, self._clock.monotonic(), self._on_tokens, self._on_job_ended
        )
        job.is_alone = not self._waiting_jobs
        job.continues = continues(spec, self._facts.samples_by_position)
        job.is_exact = self._is_float32 and job.continues
        self._jobs[spec.request_id] = job
        if task is Task.PREFILL_AND_DECODE:
            job.running.append(self._server.start(spec, job))
        elif task is Task.PREFILL:
            export = self._exports.open(placement_id(spec), job.cancel)
            steps = partial(compute_prompt, self._server, job, export, lambda: self._swept_at[0])
            job.running.append(Steps(job, steps))
        elif source is not None:
            job.running.append(Steps(job, partial(self._import_and_answer, job, source)))

    async def _import_and_answer(self, job: AttachedJob, source: WorkerRef) -> None:
        opening = KvTransferOpen(
            request_id=placement_id(job.spec),
            epoch=job.spec.epoch,
            source_generation=source.generation,
            model_digest=self._variant.model_digest,
            kv_layout=self._variant.kv_layout,
            transports=(),
            host="",
        )
        async with self._connector.open_kv_import(source.address, opening) as stream:
            await answer_prompt(self._server, job, stream)

    async def forward(self, request: ForwardRequest) -> AsyncGenerator[ForwardedHead | bytes]:
        if self.state is not WorkerState.READY or request.path not in self._facts.paths:
            raise NotFound(f"worker {self._id} does not serve {request.path} now")
        self._check_room()
        async with aclosing(self._forwards.relay(request)) as parts:
            async for part in parts:
                yield part

    def _admit(self, spec: RequestSpec, task: Task, source: WorkerRef | None) -> None:
        self._check_room()
        if not self._facts.api.generates:
            raise Unavailable(f"the server of worker {self._id} generates no tokens")
        if task is not Task.PREFILL_AND_DECODE and not self._facts.lends_kv:
            raise Unavailable(f"worker {self._id} serves whole requests only")
        if task is Task.DECODE and source is None:
            raise Invalid("a decode task must name its source worker", param="source")
        older = self._jobs.get(spec.request_id)
        if older is not None and older.spec.epoch >= spec.epoch:
            raise Invalid(
                f"request {spec.request_id} is already on this worker in epoch {older.spec.epoch}; "
                "a new placement must have a later epoch"
            )
        if older is not None:
            older.cancel()

    def _check_room(self) -> None:
        """Raise Unavailable or Overloaded if no more requests are accepted now."""
        if self.state is not WorkerState.READY:
            raise Unavailable(f"worker {self._id} accepts no requests: it is {self.state.value}")
        num_requests = len(self._jobs) + len(self._forwards)
        if num_requests >= self._config.max_jobs:
            raise Overloaded(f"worker {self._id} already has {num_requests} requests, the maximum")

    def _cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        job = self._jobs.get(request_id)
        if job is not None and job.spec.epoch <= epoch:
            job.cancel()

    def _cancel_stream(self, stream: OutputStream) -> None:
        for job in [job for job in self._jobs.values() if job.stream is stream]:
            job.cancel()

    def _on_tokens(self, job: AttachedJob, is_prompt: bool) -> None:
        now = self._clock.monotonic()
        if not is_prompt and job.received_at is not None:
            self._timing.record_step(now - job.received_at)
        elif is_prompt and job.is_alone and not job.spec.wants_prompt_logprobs:
            job.prompt_seconds = now - job.sent_at
        job.received_at = now
        self._record_progress()

    def _on_job_ended(self, job: AttachedJob) -> None:
        if job.prompt_seconds is not None and job.cached_tokens is not None:
            num_computed = len(job.spec.token_ids) - job.cached_tokens
            self._timing.record_prompt(num_computed, job.prompt_seconds)
        if self._jobs.get(job.id) is job:
            del self._jobs[job.id]
        self._is_doubted |= isinstance(job.error, Unavailable)
        self._exports.close(placement_id(job.spec), is_answered=job.is_finished)
        if job.is_finished:
            self._answer_lengths.record(job.spec.num_emitted_tokens + job.num_new_tokens)

    # -- load ------------------------------------------------------------------------------

    @property
    def _waiting_jobs(self) -> list[AttachedJob]:
        return [job for job in self._jobs.values() if not job.has_prompt]

    @property
    def load(self) -> WorkerLoad:
        waiting, blocks = self._waiting_jobs, self._facts.num_blocks
        forwards = self._forwards.waiting
        queued = sum(len(job.spec.token_ids) for job in waiting) + sum(forwards)
        cost = self._timing.prefill_cost
        answer_tokens = self._answer_lengths.mean
        expected = int(answer_tokens or UNKNOWN_ANSWER_TOKENS)
        promised = [
            max(job.num_known, len(job.spec.token_ids) + min(expected, job.spec.max_new_tokens))
            for job in self._jobs.values()
        ]
        work = QueuedWork(None, cost.seconds(queued)) if cost is not None and queued else None
        return WorkerLoad(
            running=len(self._jobs) - len(waiting) + len(self._forwards) - len(forwards),
            waiting=len(waiting) + len(forwards),
            queued_tokens=queued,
            free_blocks=blocks - int(blocks * self._server_load.kv_usage),
            num_blocks=blocks,
            at_seconds=self._clock.wall_nanoseconds() / 1e9,
            queue=() if work is None else (work,),
            prefill_cost=cost,
            decode_requests=len(self._jobs),
            context_tokens=sum(job.num_known for job in self._jobs.values()),
            promised_tokens=sum(promised),
            decode_cost=self._timing.decode_cost,
            answer_tokens=answer_tokens,
            short_answer_tokens=self._answer_lengths.short,
        )

    async def inspect(self) -> WorkerInspection:
        load = self.load
        used = load.num_blocks - load.free_blocks
        return WorkerInspection(
            worker_id=self._id,
            state=self.state.value,
            num_blocks=load.num_blocks,
            free_blocks=load.free_blocks,
            filling_blocks=0,
            idle_blocks=0,
            referenced_blocks=used,
            quarantined_blocks=0,
            running_requests=load.running,
            waiting_requests=load.waiting,
            total_requests=len(self._jobs) + len(self._forwards),
            violation="",
            description=describe_server(self._facts, self._server_load, self._failure),
            drained=self.is_drained,
        )


def describe_server(facts: ServerFacts, load: ServerLoad, failure: str) -> str:
    """Describe the server in a line."""
    state = f"lost: {failure}" if failure else f"{load.running} running, {load.waiting} waiting"
    return f"{facts.software} {facts.version}, {facts.model} from {facts.weights}: {state}"
