"""A mock worker. It has the protocol, the states and the load reports of a real worker, but no
model and no KV."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from baton.clock import Clock
from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import Epoch, Incarnation, RequestId, WorkerId
from baton.core.kv_transfer import KvTransferOpen, WorkerInspection, WorkerRef
from baton.core.request import FinishReason, RequestSpec
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.core.worker_load import WorkerLoad
from baton.errors import BatonError, Invalid, NotFound, Overloaded, Unavailable
from baton.rpc.output_encoder import encode_output
from baton.rpc.worker_service import KvExportStream
from baton.worker.answer_lengths import AnswerLengthStats
from baton.worker.job import failed_output, migrated_output, placement_id, rerouted_output
from baton.worker.mock.decode_batch import MockDecodeBatch
from baton.worker.mock.job import MockJob
from baton.worker.mock.kv_transfers import MockKvTransfers
from baton.worker.mock.load import measure_mock_load
from baton.worker.mock.model import MockModel
from baton.worker.mock.output_stream import MockStream
from baton.worker.mock.prefill_queue import MockPrefillQueue
from baton.worker.mock.prefix_cache import MockPrefixCache, block_hashes
from baton.worker.role_state import RoleState


@dataclass(frozen=True, slots=True)
class MockConfig:
    """Speed and limits of a mock worker. ``max_jobs`` bounds the number of its requests, in any
    phase. ``drain_grace_seconds`` is how long answers may continue while the worker drains.
    ``kv_tokens`` is the KV capacity that the worker reports but does not enforce."""

    prefill_cost: PrefillCost
    step_seconds: float
    block_tokens: int
    kv_tokens: int
    cache_tokens: int
    max_jobs: int = 4096
    drain_grace_seconds: float = 2.0


@dataclass(slots=True)
class MockSharedState:
    """The objects that the mock workers of one process share: configuration, mock model, clock and
    simulated KV transfers, and all of these workers by id."""

    config: MockConfig
    model: MockModel
    clock: Clock
    kv_transfers: MockKvTransfers
    workers: dict[WorkerId, "MockWorker"]

    def has_other_ready_workers(self, worker: "MockWorker") -> bool:
        """Whether another worker of this process is ready, so that requests can move to it."""
        others = (other for other in self.workers.values() if other is not worker)
        return any(other.state is WorkerState.READY for other in others)


class MockWorker:
    """Implements :class:`baton.rpc.worker_service.WorkerCore`. All methods run in the event
    loop."""

    def __init__(
        self,
        worker_id: WorkerId,
        generation: Incarnation,
        role: Role,
        shared: MockSharedState,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        config = shared.config
        self.id = worker_id
        self.generation = generation
        self._shared = shared
        self._config = config
        self._role_state = RoleState(role, on_change)
        self._prefill_queue = MockPrefillQueue(
            config.prefill_cost, self._count_cached_tokens, self._on_prefilled
        )
        self._decode_batch = MockDecodeBatch(
            shared.model, config.step_seconds, self._on_answer_finished
        )
        self._prefix_cache = MockPrefixCache(config.cache_tokens // config.block_tokens)
        self._answer_lengths = AnswerLengthStats()
        self._jobs: dict[RequestId, MockJob] = {}
        self._transfer_timers: dict[MockJob, asyncio.TimerHandle] = {}
        shared.workers[worker_id] = self

    # -- lifecycle -------------------------------------------------------------------------

    def mark_ready(self) -> None:
        self._role_state.mark_ready()

    def start_drain(self, permanent: bool = True) -> None:
        self._role_state.start_drain(self._now(), permanent)

    def convert(self, role: Role) -> None:
        self._role_state.convert(role, self._now())

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
    def load(self) -> WorkerLoad:
        config, now = self._config, self._now()
        cost = DecodeCost(config.step_seconds, 0.0, 0.0)
        load = measure_mock_load(
            self._prefill_queue, cost, self._jobs.values(), self._answer_lengths, now
        )
        return replace(
            load,
            free_blocks=self._num_blocks - self._used_blocks(),
            num_blocks=self._num_blocks,
            at_seconds=self._shared.clock.wall_nanoseconds() / 1e9,
        )

    async def open_kv_export(self, opening: KvTransferOpen) -> KvExportStream:
        raise NotFound("mock workers export no KV")

    async def inspect(self) -> WorkerInspection:
        used, late = self._used_blocks(), self._decode_batch.num_late_steps
        return WorkerInspection(
            worker_id=self.id,
            state=self.state.value,
            num_blocks=self._num_blocks,
            free_blocks=self._num_blocks - used,
            filling_blocks=0,
            idle_blocks=0,
            referenced_blocks=used,
            quarantined_blocks=0,
            running_requests=len(self._decode_batch.running) + self._prefill_queue.num_running,
            waiting_requests=len(self._prefill_queue.waiting),
            total_requests=len(self._jobs),
            violation="",
            description=f"mock: {len(self._prefix_cache)} cached blocks, {late} steps skipped",
            drained=self._role_state.is_leaving and self.is_idle,
        )

    def sweep(self) -> None:
        """Tell the routers that the worker makes progress. Reroute or migrate jobs while it drains,
        and finish a role change once it is idle. Called regularly."""
        for stream in dict.fromkeys(job.stream for job in self._jobs.values()):
            stream.announce_progress()
        since = self._role_state.draining_since_seconds
        if since is not None and self._shared.has_other_ready_workers(self):
            for job in self._prefill_queue.waiting:
                self._end_job(job, encode_output(rerouted_output(job.spec)))
            if self._now() >= since + self._config.drain_grace_seconds:
                for job in self._decode_batch.running:
                    self._migrate(job)
        if self.is_idle:
            self._role_state.finish_role_change()

    def close(self) -> None:
        self._prefill_queue.close()
        self._decode_batch.close()
        for timer in self._transfer_timers.values():
            timer.cancel()

    # -- requests --------------------------------------------------------------------------

    def open_stream(self) -> MockStream:
        pull = self._decode_batch.next_step if self._decode_batch.is_on_demand else None
        return MockStream(self._submit, self._cancel, self._cancel_stream, pull)

    def _submit(
        self, stream: MockStream, spec: RequestSpec, task: Task, source: WorkerRef | None
    ) -> None:
        try:
            self._admit(spec)
            if task is Task.DECODE:
                self._check_source(source)
        except BatonError as error:
            draining = self.state is WorkerState.DRAINING
            stream.put(
                encode_output(rerouted_output(spec) if draining else failed_output(spec, error))
            )
            return
        job = self._jobs[spec.request_id] = self._new_job(stream, spec, task, source)
        if job.source is not None:
            self._wait_for_source(job, job.source)
        else:
            self._prefill_queue.add(job)

    def _admit(self, spec: RequestSpec) -> None:
        """Raise an error if the request can't be accepted. If an older placement of the request is
        on this worker, end that placement."""
        if self.state is not WorkerState.READY:
            raise Unavailable(f"worker {self.id} accepts no requests: it is {self.state.value}")
        if spec.sampling.grammar is not None or spec.sampling.prompt_logprobs is not None:
            raise Invalid("mock workers support neither grammars nor prompt logprobs")
        older = self._jobs.get(spec.request_id)
        if older is not None and older.spec.epoch >= spec.epoch:
            raise Invalid(
                f"request {spec.request_id} is already on this worker in epoch {older.spec.epoch}; "
                "a new placement must have a later epoch"
            )
        if older is not None:
            self._end_job(older)
        if len(self._jobs) >= self._config.max_jobs:
            raise Overloaded(
                f"worker {self.id} already has {len(self._jobs)} requests, the maximum"
            )

    def _check_source(self, source: WorkerRef | None) -> None:
        if source is None:
            raise Invalid("a decode task must name its source worker", param="source")
        known = self._shared.workers.get(source.id)
        if known is not None and known.generation != source.generation:
            raise NotFound(f"worker {source.id} has restarted since the request was placed")

    def _new_job(
        self, stream: MockStream, spec: RequestSpec, task: Task, source: WorkerRef | None
    ) -> MockJob:
        """Create a job. A decode task starts with the answer's second token, because its source
        generates the first one."""
        is_decode = task is Task.DECODE
        return MockJob(
            spec=spec,
            task=task,
            stream=stream,
            source=source.id if is_decode and source is not None else None,
            answer_key=self._shared.model.answer_key(spec),
            next_index=spec.num_emitted_tokens + int(is_decode),
            block_hashes=block_hashes(spec, self._config.block_tokens),
            arrived_at=self._now(),
        )

    def _wait_for_source(self, job: MockJob, source: WorkerId) -> None:
        """Wait until the source has prefilled the prompt. A source in another process can't notify
        this process, so for such a source, wait as long as this worker would take to prefill."""
        if source in self._shared.workers:
            on_prefilled = partial(self._on_kv_ready, job)
            self._shared.kv_transfers.wait_for(source, placement_id(job.spec), on_prefilled)
            return
        seconds = self._config.prefill_cost.seconds(len(job.spec.token_ids))
        loop = asyncio.get_running_loop()
        self._transfer_timers[job] = loop.call_later(seconds, self._on_kv_ready, job, False)

    def _on_kv_ready(self, job: MockJob, finished: bool) -> None:
        self._transfer_timers.pop(job, None)
        if finished:
            self._remove_job(job)
            return
        self._prefix_cache.add(job.block_hashes)
        self._decode_batch.add(job)

    def _count_cached_tokens(self, job: MockJob) -> int:
        """Return how many of the prompt's tokens are cached, but never all of them: at least one
        token must be computed."""
        cached = self._prefix_cache.num_leading_cached(job.block_hashes) * self._config.block_tokens
        return min(cached, len(job.spec.token_ids) - 1)

    def _on_prefilled(self, job: MockJob) -> None:
        self._prefix_cache.add(job.block_hashes)
        message, reason = job.encode_first_token(self._shared.model)
        job.stream.put(message)
        if job.task is Task.PREFILL:
            self._remove_job(job)
            self._shared.kv_transfers.mark_prefilled(
                self.id, placement_id(job.spec), reason is not None
            )
        elif reason is not None:
            self._on_answer_finished(job, reason)
        else:
            self._decode_batch.add(job)

    def _on_answer_finished(self, job: MockJob, reason: FinishReason) -> None:
        self._answer_lengths.record(job.next_index)
        self._remove_job(job)

    def _migrate(self, job: MockJob) -> None:
        """End the job so that another worker continues its answer in the next epoch."""
        next_spec = replace(job.spec, epoch=Epoch(job.spec.epoch + 1))
        self._end_job(job, encode_output(migrated_output(job.spec, job.num_known)))
        self._shared.kv_transfers.mark_prefilled(self.id, placement_id(next_spec), False)

    def _cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        job = self._jobs.get(request_id)
        if job is not None and job.spec.epoch <= epoch:
            self._end_job(job)

    def _cancel_stream(self, stream: MockStream) -> None:
        for job in [job for job in self._jobs.values() if job.stream is stream]:
            self._end_job(job)

    def _end_job(self, job: MockJob, message: bytes = b"") -> None:
        """End the job in any phase. Send ``message`` to its router unless it is empty."""
        if message:
            job.stream.put(message)
        self._prefill_queue.remove(job)
        self._decode_batch.remove(job)
        if job.source is not None:
            self._shared.kv_transfers.cancel_wait(job.source, placement_id(job.spec))
        timer = self._transfer_timers.pop(job, None)
        if timer is not None:
            timer.cancel()
        self._remove_job(job)

    def _remove_job(self, job: MockJob) -> None:
        if self._jobs.get(job.id) is job:
            del self._jobs[job.id]

    # -- blocks ----------------------------------------------------------------------------

    @property
    def _num_blocks(self) -> int:
        return self._config.kv_tokens // self._config.block_tokens

    def _used_blocks(self) -> int:
        size = self._config.block_tokens
        used = sum(-(-job.num_known // size) for job in self._jobs.values())
        return min(used, self._num_blocks)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
