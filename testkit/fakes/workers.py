"""In-memory fakes of workers and placers, for tests and simulations of generations."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.ids import Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement, PlacementQuery, ScoredCodec
from baton.core.request import FinishReason, RequestOutput, RequestSpec, TokenLogprob
from baton.core.task import Task
from baton.errors import Unavailable
from router.generation.output_queue import OutputReceiver
from router.generation.worker_connection import NotConnected, WorkerLost

NextToken = Callable[[Sequence[TokenId], RequestSpec], TokenId]
"""Stands in for the model: takes all tokens so far and returns the next one."""


@dataclass(slots=True, eq=False)
class FakeJob:
    """One submission. ``tokens`` contains the prompt and the tokens generated so far."""

    spec: RequestSpec
    task: Task
    source: WorkerRef | None
    receive: OutputReceiver
    tokens: list[TokenId]
    is_ended: bool = False


class FakeWorker:
    """A worker that generates tokens when :meth:`step` is called, or, if ``automatic`` is True, one
    token per job in each iteration of the event loop. The token ``eos`` ends an answer.
    :meth:`kill` breaks the connection to the worker."""

    def __init__(
        self, name: str, next_token: NextToken, *, eos: int | None = None, automatic: bool = True
    ) -> None:
        self.ref = WorkerRef(WorkerId(name), f"{name}:1", Incarnation(1))
        self.is_alive = True
        self.progressed_at = 0.0
        self.jobs: list[FakeJob] = []
        self.submitted: list[FakeJob] = []
        self.cancelled: list[tuple[RequestId, Epoch]] = []
        self.details: dict[str, str] = {}
        self.cached_tokens = 0
        self._next_token = next_token
        self._eos = eos
        self._automatic = automatic

    # -- WorkerConnection -----------------------------------------------------------------

    def submit(
        self, spec: RequestSpec, task: Task, source: WorkerRef | None, receive: OutputReceiver
    ) -> None:
        if not self.is_alive:
            receive(self.ref.id, NotConnected(f"lost worker {self.ref.id}: it is dead"))
            return
        job = FakeJob(spec, task, source, receive, list(spec.token_ids))
        if task is Task.DECODE:
            # The prefill worker sends the first token to the client, so this worker begins with the
            # second one.
            job.tokens.append(self._next_token(job.tokens, spec))
        self.submitted.append(job)
        self.jobs.append(job)
        if self._automatic:
            asyncio.get_running_loop().call_soon(self._step_until_end, job)

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        self.cancelled.append((request_id, epoch))
        self.stop_delivery(request_id, epoch)

    def stop_delivery(self, request_id: RequestId, epoch: Epoch) -> None:
        for job in self.jobs:
            if (job.spec.request_id, job.spec.epoch) == (request_id, epoch):
                job.is_ended = True
        self.jobs = [job for job in self.jobs if not job.is_ended]

    # -- controls for tests -----------------------------------------------------------------

    def step(self) -> None:
        """Generate one token for every job."""
        for job in list(self.jobs):
            self._step(job)

    def make_progress(self) -> None:
        """Announce progress, as if the worker computed other requests."""
        self.progressed_at = asyncio.get_running_loop().time()

    def fail_jobs(self, status: str, message: str = "made to fail", **details: str) -> None:
        """End every job with an error."""
        for job in self.jobs:
            job.is_ended = True
            output = RequestOutput(
                request_id=job.spec.request_id,
                epoch=job.spec.epoch,
                first_index=0,
                token_ids=(),
                finish_reason=FinishReason.ERROR,
                error=message,
                details={"error_status": status, **details},
            )
            job.receive(self.ref.id, output)
        self.jobs = []

    def drain(self, reason: FinishReason) -> None:
        """Simulate draining: end every job with ``reason`` (MIGRATED or REROUTED)."""
        for job in self.jobs:
            job.is_ended = True
            output = RequestOutput(
                request_id=job.spec.request_id,
                epoch=job.spec.epoch,
                first_index=len(job.tokens) - job.spec.num_prompt_tokens,
                token_ids=(),
                finish_reason=reason,
            )
            job.receive(self.ref.id, output)
        self.jobs = []

    def kill(self) -> None:
        """Simulate the death of the process: every job gets the error for a broken connection."""
        self.is_alive = False
        for job in self.jobs:
            job.is_ended = True
            job.receive(self.ref.id, WorkerLost(f"lost worker {self.ref.id}: it was killed"))
        self.jobs = []

    def _step_until_end(self, job: FakeJob) -> None:
        if not job.is_ended:
            self._step(job)
            asyncio.get_running_loop().call_soon(self._step_until_end, job)

    def _step(self, job: FakeJob) -> None:
        spec = job.spec
        first = len(job.tokens) == len(spec.token_ids)
        token = self._next_token(job.tokens, spec)
        index = len(job.tokens) - spec.num_prompt_tokens
        job.tokens.append(token)
        reason = self._finish_reason(job, token)
        output = RequestOutput(
            request_id=spec.request_id,
            epoch=spec.epoch,
            first_index=index,
            token_ids=(token,),
            logprobs=_logprobs(spec, token),
            finish_reason=reason,
            cached_tokens=self.cached_tokens if first else 0,
            details=dict(self.details),
            prompt_logprobs=_prompt_logprobs(spec) if first and job.task is not Task.DECODE else (),
        )
        if reason is not None or job.task is Task.PREFILL:
            job.is_ended = True
            self.jobs.remove(job)
        job.receive(self.ref.id, output)

    def _finish_reason(self, job: FakeJob, token: TokenId) -> FinishReason | None:
        if token == self._eos and not job.spec.sampling.ignore_eos:
            return FinishReason.STOP
        if token in job.spec.sampling.stop_token_ids:
            return FinishReason.STOP
        if len(job.tokens) - job.spec.num_prompt_tokens >= job.spec.sampling.max_tokens:
            return FinishReason.LENGTH
        return None


class MemoryWorkerConnections:
    """Connections to fake workers, by worker id."""

    def __init__(self, *workers: FakeWorker) -> None:
        self.workers = {worker.ref.id: worker for worker in workers}
        self.avoided: frozenset[WorkerId] = frozenset()

    def connect(self, worker: WorkerRef) -> FakeWorker:
        return self.workers[worker.id]

    def is_alive(self, worker: WorkerRef) -> bool:
        known = self.workers[worker.id]
        return known.is_alive and known.ref == worker

    def recently_broken(self) -> frozenset[WorkerId]:
        return self.avoided


class MemoryPlacer:
    """Places each request on the first worker of each pool that is not excluded, and records the
    queries. The chosen worker may be dead, since a real registry also lists dead workers for a
    while. If ``codecs`` are set, they are those of the placements, best first."""

    codecs: Sequence[ScoredCodec] = ()

    def __init__(self, prefill: Sequence[FakeWorker], decode: Sequence[FakeWorker]) -> None:
        self.prefill = list(prefill)
        self.decode = list(decode)
        self.queries: list[PlacementQuery] = []

    async def place(self, query: PlacementQuery) -> Placement:
        self.queries.append(query)
        prefill = [w.ref for w in self.prefill if w.ref.id not in query.excluded]
        decode = [w.ref for w in self.decode if w.ref.id not in query.excluded]
        if not decode:
            raise Unavailable("no decode worker is ready")
        return Placement(
            prefill[0] if prefill else None,
            decode[0],
            "memory",
            kv_codec=self.codecs[0].codec if self.codecs else KvCodecName.NONE,
            codec_alternatives=self.codecs,
        )


def _logprobs(spec: RequestSpec, token: TokenId) -> tuple[TokenLogprob, ...]:
    if spec.sampling.logprobs is None:
        return ()
    return (_logprob(token, -0.5, spec.sampling.logprobs),)


def _prompt_logprobs(spec: RequestSpec) -> tuple[TokenLogprob, ...]:
    """Return logprobs that rise towards the end of the prompt: -1/2, -1/4, …"""
    num_top = spec.sampling.prompt_logprobs
    if not spec.wants_prompt_logprobs or num_top is None:
        return ()
    tokens = spec.token_ids[1 : spec.num_prompt_tokens]
    return tuple(_logprob(token, -(0.5**n), num_top) for n, token in enumerate(tokens, 1))


def _logprob(token: TokenId, value: float, num_top: int) -> TokenLogprob:
    others = [TokenId((token + step) % 256) for step in range(num_top)]
    return TokenLogprob(token, value, tuple((each, value - n) for n, each in enumerate(others)))
