"""In-memory twins of workers and placers: the journey's tests and simulations run over them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.ids import Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement
from baton.core.request import FinishReason, RequestOutput, RequestSpec, TokenLogprob
from baton.core.task import Task
from baton.errors import Unavailable
from router.generation.output_queue import OutputQueue
from router.generation.placement import PlacementQuery
from router.generation.worker_connection import NotConnected, WorkerLost

NextToken = Callable[[Sequence[TokenId], RequestSpec], TokenId]
"""The next token after all those before: a model without weights."""


@dataclass(slots=True, eq=False)
class FakeJob:
    """One submission, and how far its answer has come."""

    spec: RequestSpec
    task: Task
    source: WorkerRef | None
    inbox: OutputQueue
    tokens: list[TokenId]
    ended: bool = False


class FakeWorker:
    """Answers by :meth:`step`, or by itself with ``automatic``: a token of each job every turn
    of the event loop. ``eos`` ends an answer. ``kill`` breaks its link."""

    def __init__(
        self, name: str, answer: NextToken, *, eos: int | None = None, automatic: bool = True
    ) -> None:
        self.ref = WorkerRef(WorkerId(name), f"{name}:1", Incarnation(1))
        self.alive = True
        self.jobs: list[FakeJob] = []
        self.submitted: list[FakeJob] = []
        self.cancelled: list[tuple[RequestId, Epoch]] = []
        self.details: dict[str, str] = {}
        self.cached_tokens = 0
        self._answer = answer
        self._eos = eos
        self._automatic = automatic

    # -- WorkerLink -----------------------------------------------------------------------

    def submit(
        self, spec: RequestSpec, task: Task, source: WorkerRef | None, inbox: OutputQueue
    ) -> None:
        if not self.alive:
            inbox.put(self.ref.id, NotConnected(f"lost worker {self.ref.id}: it is dead"))
            return
        job = FakeJob(spec, task, source, inbox, list(spec.token_ids))
        if task is Task.DECODE:
            # The first token reaches the client from the prefill worker.
            job.tokens.append(self._answer(job.tokens, spec))
        self.submitted.append(job)
        self.jobs.append(job)
        if self._automatic:
            asyncio.get_running_loop().call_soon(self._turn, job)

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        self.cancelled.append((request_id, epoch))
        self.forget(request_id, epoch)

    def forget(self, request_id: RequestId, epoch: Epoch) -> None:
        for job in self.jobs:
            if (job.spec.request_id, job.spec.epoch) == (request_id, epoch):
                job.ended = True
        self.jobs = [job for job in self.jobs if not job.ended]

    # -- what a test does -------------------------------------------------------------------

    def step(self) -> None:
        """One token for every job."""
        for job in list(self.jobs):
            self._step(job)

    def fail(self, status: str, message: str = "made to fail", **details: str) -> None:
        """Ends every job with an error."""
        for job in self.jobs:
            job.ended = True
            output = RequestOutput(
                request_id=job.spec.request_id,
                epoch=job.spec.epoch,
                first_index=0,
                token_ids=(),
                finish_reason=FinishReason.ERROR,
                error=message,
                details={"error_status": status, **details},
            )
            job.inbox.put(self.ref.id, output)
        self.jobs = []

    def leave(self, reason: FinishReason) -> None:
        """Drains: ends every job with MOVED or TURNED_AWAY."""
        for job in self.jobs:
            job.ended = True
            output = RequestOutput(
                request_id=job.spec.request_id,
                epoch=job.spec.epoch,
                first_index=len(job.tokens) - job.spec.num_prompt_tokens,
                token_ids=(),
                finish_reason=reason,
            )
            job.inbox.put(self.ref.id, output)
        self.jobs = []

    def kill(self) -> None:
        """As when the process dies: every job learns that the link broke."""
        self.alive = False
        for job in self.jobs:
            job.ended = True
            job.inbox.put(self.ref.id, WorkerLost(f"lost worker {self.ref.id}: it was killed"))
        self.jobs = []

    def _turn(self, job: FakeJob) -> None:
        if not job.ended:
            self._step(job)
            asyncio.get_running_loop().call_soon(self._turn, job)

    def _step(self, job: FakeJob) -> None:
        spec = job.spec
        first = len(job.tokens) == len(spec.token_ids)
        token = self._answer(job.tokens, spec)
        index = len(job.tokens) - spec.num_prompt_tokens
        job.tokens.append(token)
        reason = self._reason(job, token)
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
            job.ended = True
            self.jobs.remove(job)
        job.inbox.put(self.ref.id, output)

    def _reason(self, job: FakeJob, token: TokenId) -> FinishReason | None:
        if token == self._eos and not job.spec.sampling.ignore_eos:
            return FinishReason.STOP
        if token in job.spec.sampling.stop_token_ids:
            return FinishReason.STOP
        if len(job.tokens) - job.spec.num_prompt_tokens >= job.spec.sampling.max_tokens:
            return FinishReason.LENGTH
        return None


class MemoryWorkerConnections:
    """Links to twins, by id."""

    def __init__(self, *workers: FakeWorker) -> None:
        self.workers = {worker.ref.id: worker for worker in workers}
        self.shuns: frozenset[WorkerId] = frozenset()

    def link(self, worker: WorkerRef) -> FakeWorker:
        return self.workers[worker.id]

    def is_alive(self, worker: WorkerRef) -> bool:
        known = self.workers[worker.id]
        return known.alive and known.ref == worker

    def shunned(self) -> frozenset[WorkerId]:
        return self.shuns


class MemoryPlacer:
    """The first worker of each pool that is not excluded; dead ones too, as a registry has them
    for a while. Remembers what it was asked."""

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
        return Placement(prefill[0] if prefill else None, decode[0], "memory")


def _logprobs(spec: RequestSpec, token: TokenId) -> tuple[TokenLogprob, ...]:
    if spec.sampling.logprobs is None:
        return ()
    return (_logprob(token, -0.5, spec.sampling.logprobs),)


def _prompt_logprobs(spec: RequestSpec) -> tuple[TokenLogprob, ...]:
    """The further behind in the prompt, the likelier: 1/2, 1/4, … below zero."""
    num_top = spec.sampling.prompt_logprobs
    if not spec.scores_prompt or num_top is None:
        return ()
    tokens = spec.token_ids[1 : spec.num_prompt_tokens]
    return tuple(_logprob(token, -(0.5**n), num_top) for n, token in enumerate(tokens, 1))


def _logprob(token: TokenId, value: float, num_top: int) -> TokenLogprob:
    others = [TokenId((token + step) % 256) for step in range(num_top)]
    return TokenLogprob(token, value, tuple((each, value - n) for n, each in enumerate(others)))
