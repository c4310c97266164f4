"""A mock worker: a real one's protocol, states and reports; no model, no KV."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from baton.clock import Clock
from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import Epoch, Incarnation, RequestId, WorkerId
from baton.core.kv_transfer import WorkerInspection, WorkerRef
from baton.core.request import FinishReason, RequestSpec
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.core.worker_load import WorkerLoad
from baton.errors import BatonError, Invalid, NotFound, Overloaded, Unavailable
from baton.rpc.output_encoder import encode_output
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
    """``max_jobs`` bounds requests in whatever phase; ``finish_seconds`` is how long answers may go
    on while the worker drains. ``kv_tokens`` is its memory as it is reported; nothing waits for
    it."""

    prefill_cost: PrefillCost
    step_seconds: float
    block_tokens: int
    kv_tokens: int
    cache_tokens: int
    max_jobs: int = 4096
    finish_seconds: float = 2.0


@dataclass(slots=True)
class MockSharedState:
    """What the mock workers of one process share."""

    config: MockConfig
    lexicon: MockModel
    clock: Clock
    handovers: MockKvTransfers
    workers: dict[WorkerId, "MockWorker"]

    def has_heirs(self, worker: "MockWorker") -> bool:
        """Whether another one here could go on with what this one has."""
        others = (other for other in self.workers.values() if other is not worker)
        return any(other.state is WorkerState.READY for other in others)


class MockWorker:
    """Implements :class:`baton.rpc.encoded_worker_service.EncodedCore`. All in the event loop."""

    def __init__(
        self,
        worker_id: WorkerId,
        generation: Incarnation,
        role: Role,
        house: MockSharedState,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        config = house.config
        self.id = worker_id
        self.generation = generation
        self._house = house
        self._config = config
        self._duty = RoleState(role, on_change)
        self._reading = MockPrefillQueue(config.prefill_cost, self._cached, self._computed)
        self._writing = MockDecodeBatch(house.lexicon, config.step_seconds, self._answered)
        self._prefixes = MockPrefixCache(config.cache_tokens // config.block_tokens)
        self._answers = AnswerLengthStats()
        self._jobs: dict[RequestId, MockJob] = {}
        self._delays: dict[MockJob, asyncio.TimerHandle] = {}
        house.workers[worker_id] = self

    # -- life ------------------------------------------------------------------------------

    def begin(self) -> None:
        self._duty.begin()

    def start_drain(self, for_good: bool = True) -> None:
        self._duty.leave(self._now(), for_good)

    def convert(self, role: Role) -> None:
        self._duty.convert(role, self._now())

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
    def load(self) -> WorkerLoad:
        config, now = self._config, self._now()
        cost = DecodeCost(config.step_seconds, 0.0, 0.0)
        load = measure_mock_load(self._reading, cost, self._jobs.values(), self._answers, now)
        return replace(
            load,
            free_blocks=self._num_blocks - self._used_blocks(),
            num_blocks=self._num_blocks,
            at_seconds=self._house.clock.wall_nanoseconds() / 1e9,
        )

    async def inspect(self) -> WorkerInspection:
        used, late = self._used_blocks(), self._writing.num_late_steps
        return WorkerInspection(
            worker_id=self.id,
            state=self.state.value,
            num_blocks=self._num_blocks,
            free_blocks=self._num_blocks - used,
            filling_blocks=0,
            idle_blocks=0,
            referenced_blocks=used,
            quarantined_blocks=0,
            running_requests=len(self._writing.running) + self._reading.num_running,
            waiting_requests=len(self._reading.waiting),
            held_requests=len(self._jobs),
            violation="",
            description=f"mock: {len(self._prefixes)} cached blocks, {late} steps left out",
            drained=self._duty.leaves and self.idle,
        )

    def sweep(self) -> None:
        """Now and then: whoever drains parts from what can go, and settles when nothing is left."""
        since = self._duty.drains_since
        if since is not None and self._house.has_heirs(self):
            for job in self._reading.waiting:
                self._end(job, encode_output(rerouted_output(job.spec)))
            if self._now() >= since + self._config.finish_seconds:
                for job in self._writing.running:
                    self._move(job)
        if self.idle:
            self._duty.settle()

    def close(self) -> None:
        self._reading.close()
        self._writing.close()
        for timer in self._delays.values():
            timer.cancel()

    # -- requests --------------------------------------------------------------------------

    def open_stream(self) -> MockStream:
        pull = self._writing.pull if self._writing.pulled else None
        return MockStream(self._submit, self._cancel, self._cancel_stream, pull)

    def _submit(
        self, stream: MockStream, spec: RequestSpec, task: Task, source: WorkerRef | None
    ) -> None:
        try:
            self._admit(spec)
            if task is Task.DECODE:
                self._check(source)
        except BatonError as error:
            draining = self.state is WorkerState.DRAINING
            stream.put(
                encode_output(rerouted_output(spec) if draining else failed_output(spec, error))
            )
            return
        job = self._jobs[spec.request_id] = self._job(stream, spec, task, source)
        if job.source is not None:
            self._await(job, job.source)
        else:
            self._reading.add(job)

    def _admit(self, spec: RequestSpec) -> None:
        """Raises what forbids the request; ends its older placement if that is still here."""
        if self.state is not WorkerState.READY:
            raise Unavailable(f"worker {self.id} is {self.state.value}")
        if spec.sampling.grammar is not None or spec.sampling.prompt_logprobs is not None:
            raise Invalid("mock workers have no model: neither grammars nor logprobs of prompts")
        older = self._jobs.get(spec.request_id)
        if older is not None and older.spec.epoch >= spec.epoch:
            raise Invalid(f"request {spec.request_id} is here in epoch {older.spec.epoch}")
        if older is not None:
            self._end(older)
        if len(self._jobs) >= self._config.max_jobs:
            raise Overloaded(f"worker {self.id} has {len(self._jobs)} requests")

    def _check(self, source: WorkerRef | None) -> None:
        if source is None:
            raise Invalid("a decode task names its source", param="source")
        known = self._house.workers.get(source.id)
        if known is not None and known.generation != source.generation:
            raise NotFound(f"worker {source.id} was reborn since the request was placed")

    def _job(
        self, stream: MockStream, spec: RequestSpec, task: Task, source: WorkerRef | None
    ) -> MockJob:
        """Of a decode task, the first token is its source's."""
        decodes = task is Task.DECODE
        return MockJob(
            spec=spec,
            task=task,
            stream=stream,
            source=source.id if decodes and source is not None else None,
            key=self._house.lexicon.key(spec),
            next_index=spec.num_emitted_tokens + int(decodes),
            blocks=block_hashes(spec, self._config.block_tokens),
            arrived_at=self._now(),
        )

    def _await(self, job: MockJob, source: WorkerId) -> None:
        """Of a source in another process nobody hears: it takes what it would take here."""
        if source in self._house.workers:
            reader = partial(self._handed_over, job)
            self._house.handovers.expect(source, placement_id(job.spec), reader)
            return
        seconds = self._config.prefill_cost.seconds(len(job.spec.token_ids))
        loop = asyncio.get_running_loop()
        self._delays[job] = loop.call_later(seconds, self._handed_over, job, False)

    def _handed_over(self, job: MockJob, finished: bool) -> None:
        self._delays.pop(job, None)
        if finished:
            self._forget(job)
            return
        self._prefixes.keep(job.blocks)
        self._writing.join(job)

    def _cached(self, job: MockJob) -> int:
        """One token is always computed."""
        found = self._prefixes.held(job.blocks) * self._config.block_tokens
        return min(found, len(job.spec.token_ids) - 1)

    def _computed(self, job: MockJob) -> None:
        self._prefixes.keep(job.blocks)
        message, reason = job.say_first(self._house.lexicon)
        job.stream.put(message)
        if job.task is Task.PREFILL:
            self._forget(job)
            self._house.handovers.computed(self.id, placement_id(job.spec), reason is not None)
        elif reason is not None:
            self._answered(job, reason)
        else:
            self._writing.join(job)

    def _answered(self, job: MockJob, reason: FinishReason) -> None:
        self._answers.record(job.next_index)
        self._forget(job)

    def _move(self, job: MockJob) -> None:
        """Another worker goes on with its next epoch."""
        heir = replace(job.spec, epoch=Epoch(job.spec.epoch + 1))
        self._end(job, encode_output(migrated_output(job.spec, job.num_known)))
        self._house.handovers.computed(self.id, placement_id(heir), False)

    def _cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        job = self._jobs.get(request_id)
        if job is not None and job.spec.epoch <= epoch:
            self._end(job)

    def _cancel_stream(self, stream: MockStream) -> None:
        for job in [job for job in self._jobs.values() if job.stream is stream]:
            self._end(job)

    def _end(self, job: MockJob, message: bytes = b"") -> None:
        """Wherever it is now."""
        if message:
            job.stream.put(message)
        self._reading.remove(job)
        self._writing.leave(job)
        if job.source is not None:
            self._house.handovers.forget(job.source, placement_id(job.spec))
        timer = self._delays.pop(job, None)
        if timer is not None:
            timer.cancel()
        self._forget(job)

    def _forget(self, job: MockJob) -> None:
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
