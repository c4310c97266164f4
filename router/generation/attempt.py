"""One placement of one request: two submissions, one stream of outputs."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.core.ids import WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement
from baton.core.request import FinishReason, RequestOutput, RequestSpec
from baton.core.task import Task
from baton.errors import (
    BatonError,
    Corrupt,
    DeadlineExceeded,
    Overloaded,
    Unavailable,
    error_from_grpc_status,
)
from router.generation.output_merger import OutputMerger, coalesce_outputs
from router.generation.output_queue import (
    InlineConsumer,
    OutputDeliveryError,
    OutputQueue,
    QueuedOutput,
)
from router.generation.output_validation import (
    MAX_ERROR_CHARACTERS,
    UNKNOWN_VOCAB_SIZE,
    InvalidOutput,
    find_output_error,
)
from router.generation.worker_connection_pool import WorkerConnection, WorkerConnections

RETRYABLE_STATUSES = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "DATA_LOSS", "NOT_FOUND"})
"""What another placement may mend."""


MAX_RETRY_AFTER_SECONDS = 3600.0
"""A worker that says more is not believed."""


@dataclass(frozen=True, slots=True)
class TokenTimeouts:
    """Seconds. ``first_token`` includes the queue of the prefill worker, ``handoff`` the wait
    for room on the decode worker; dead peers are noticed by their links, much earlier."""

    first_token: float = 120.0
    handoff: float = 120.0
    token_gap: float = 60.0


class AttemptFailed(Exception):
    """Another placement may do. ``suspects`` are the workers that may have caused it."""

    def __init__(self, error: BatonError, suspects: Sequence[WorkerRef]) -> None:
        super().__init__(str(error))
        self.error = error
        self.suspects = tuple(suspects)


class AttemptDrained(Exception):
    """Its worker drains. With ``source``, the KV of all tokens but the last waits there."""

    def __init__(self, worker: WorkerRef, source: WorkerRef | None) -> None:
        super().__init__(f"worker {worker.id} drains")
        self.worker = worker
        self.source = source


class Attempt:
    """:meth:`open`, then :meth:`next_outputs` until one has a finish reason or it raises, then
    :meth:`close`, always.

    With ``goes_on``, the prefill worker of ``placement`` is one that had begun the answer: it holds
    the KV of the tokens of ``spec``, and the client has the token after them already. ``relay`` is
    offered what is plainly the next token while :meth:`next_outputs` waits for it.
    """

    def __init__(
        self,
        spec: RequestSpec,
        placement: Placement,
        links: WorkerConnections,
        deadlines: TokenTimeouts,
        *,
        goes_on: bool = False,
        relay: InlineConsumer | None = None,
        vocab_size: int = UNKNOWN_VOCAB_SIZE,
    ) -> None:
        two = placement.prefill is not None and placement.prefill.id != placement.decode.id
        alone = not two or (spec.max_new_tokens == 1 and not goes_on)
        self._goes_on = goes_on
        self._spec = replace(spec, store_hint=placement.store_hint)
        self._prefill = None if alone else placement.prefill
        self._decode = placement.decode
        self._links: dict[WorkerId, WorkerConnection] = {
            worker.id: links.link(worker)
            for worker in (self._prefill, self._decode)
            if worker is not None
        }
        self._inbox = OutputQueue()
        self._vocab_size = vocab_size
        self._max_tokens = spec.sampling.max_tokens
        self._relay = relay
        if relay is not None:
            self._inbox.relay = self._hand_on
        known = spec.num_emitted_tokens + (1 if goes_on else 0)
        self._merge = OutputMerger(spec.epoch, known, handed_over=not (alone or goes_on))
        self._deadlines = deadlines
        self._time = asyncio.get_running_loop().time
        self._deadline = 0.0
        self._waits_for = ""
        self._decoding = False
        self._finished = False
        self.refusal: RequestOutput | None = None
        """The output that a worker ended the request with."""
        self._failure: AttemptFailed | AttemptDrained | BatonError | None = None

    def open(self) -> None:
        if self._prefill is None:
            self._link(self._decode).submit(self._spec, Task.WHOLE, None, self._inbox)
        else:
            if not self._goes_on:
                self._link(self._prefill).submit(self._spec, Task.PREFILL, None, self._inbox)
            self._link(self._decode).submit(self._spec, Task.DECODE, self._prefill, self._inbox)
        self._expect("first token", self._deadlines.first_token)

    async def next_outputs(self) -> list[RequestOutput]:
        """At least one, in order. Raises AttemptFailed, AttemptLeft, or what no other placement
        can mend.

        Outputs that arrived before a failure are answered before it is raised.
        """
        while self._failure is None:
            outputs = self._sort(await self._take())
            if outputs:
                self._note(outputs[-1])
                return coalesce_outputs(outputs)
        raise self._failure

    def close(self) -> None:
        """Frees what is left at the workers. Idempotent."""
        for link in self._links.values():
            if self._finished:
                link.forget(self._spec.request_id, self._spec.epoch)
            else:
                link.cancel(self._spec.request_id, self._spec.epoch)
        self._links = {}
        self._inbox.relay = None

    # -- what comes ---------------------------------------------------------------------

    async def _take(self) -> Sequence[QueuedOutput]:
        try:
            return await self._inbox.take(self._deadline)
        except TimeoutError:
            if self._time() < self._deadline:
                return ()  # tokens were handed on meanwhile
            error = DeadlineExceeded(f"the {self._waits_for} did not come in time")
            self._failure = AttemptFailed(error, self._suspects())
            return ()

    def _hand_on(self, worker_id: WorkerId, output: RequestOutput) -> bool:
        """Whether it was the next token of the decode worker and nothing else, and taken."""
        merge = self._merge
        is_plain = output.finish_reason is None and not output.details
        is_next = output.first_index == merge.next_index and self._decoding
        if not (is_plain and is_next and worker_id == self._decode.id):
            return False
        tokens, index = output.token_ids, merge.next_index
        if len(tokens) != 1 or tokens[0] >= self._vocab_size or index >= self._max_tokens:
            return False  # who looks at it closely says what is wrong, if anything is
        if output.epoch != self._spec.epoch or self._relay is None or not self._relay(output):
            return False
        merge.next_index = index + 1
        self._expect("next token", self._deadlines.token_gap)
        return True

    def _sort(self, items: Sequence[QueuedOutput]) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        try:
            for worker_id, item in items:
                outputs.extend(self._accept(worker_id, item))
        except (AttemptFailed, AttemptDrained, BatonError) as failure:
            self._failure = failure
        return outputs

    def _accept(self, worker_id: WorkerId, item: RequestOutput | BatonError) -> list[RequestOutput]:
        if isinstance(item, BatonError):
            return self._lost(worker_id, item)
        if item.epoch != self._spec.epoch:
            return []
        flaw = find_output_error(item, self._spec, self._vocab_size)
        if flaw:
            liar = self._worker(worker_id)
            raise AttemptFailed(InvalidOutput(f"worker {worker_id} sent {flaw}"), [liar])
        if item.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            return self._refused(worker_id, item)
        if item.finish_reason in (FinishReason.MOVED, FinishReason.TURNED_AWAY):
            worker = self._worker(worker_id)
            moved = item.finish_reason is FinishReason.MOVED
            raise AttemptDrained(worker, worker if moved else None)
        if worker_id == self._decode.id:
            self._decoding = True
        try:
            return list(self._merge.add(item))
        except Corrupt as gap:
            raise AttemptFailed(gap, [self._decode]) from gap

    def _lost(self, worker_id: WorkerId, error: BatonError) -> list[RequestOutput]:
        """A link broke. A prefill worker that gave its token is the decode worker's concern:
        that has the blocks already, or will say that it can't get them."""
        if isinstance(error, OutputDeliveryError):
            raise error
        if self._is_spent(worker_id):
            return []
        raise AttemptFailed(error, [self._worker(worker_id)])

    def _refused(self, worker_id: WorkerId, output: RequestOutput) -> list[RequestOutput]:
        if self._is_spent(worker_id):
            return []
        self.refusal = output
        status = output.details.get("error_status", "")
        told = output.error[:MAX_ERROR_CHARACTERS] or f"worker {worker_id} gave up"
        error = error_from_grpc_status(status, told)
        if output.finish_reason is FinishReason.CANCELLED:
            error, status = Unavailable(f"worker {worker_id} cancelled"), "UNAVAILABLE"
        if isinstance(error, Overloaded):
            error.retry_after_seconds = _parse_retry_after(output)
            if self._merge.next_index:
                raise AttemptFailed(error, [self._worker(worker_id)])
        if status == "NOT_FOUND" and self._prefill is not None:
            # It was reborn since it was placed, or never got the request: nobody else's doing.
            raise AttemptFailed(error, [self._prefill])
        if status in RETRYABLE_STATUSES:
            raise AttemptFailed(error, self._suspects())
        raise error

    def _note(self, last: RequestOutput) -> None:
        """Progress: sets what to expect next, and until when."""
        if last.finish_reason is not None:
            # One that ends with the prefill worker's token leaves the decode worker waiting.
            self._finished = self._decoding
        elif self._decoding:
            self._expect("next token", self._deadlines.token_gap)
        else:
            self._expect("hand-off", self._deadlines.handoff)

    def _expect(self, what: str, seconds: float) -> None:
        self._waits_for = what
        self._deadline = self._time() + seconds

    # -- who ------------------------------------------------------------------------------

    def _worker(self, worker_id: WorkerId) -> WorkerRef:
        if self._prefill is not None and self._prefill.id == worker_id:
            return self._prefill
        return self._decode

    def _link(self, worker: WorkerRef) -> WorkerConnection:
        return self._links[worker.id]

    def _is_spent(self, worker_id: WorkerId) -> bool:
        """Whether it is the prefill worker, and has given its token."""
        has_first = self._merge.next_index > self._spec.num_emitted_tokens
        return self._prefill is not None and worker_id == self._prefill.id and has_first

    def _suspects(self) -> list[WorkerRef]:
        """During a hand-off, either may report what the other has done."""
        if self._prefill is None or self._decoding:
            return [self._decode]
        return [self._prefill, self._decode]


def _parse_retry_after(output: RequestOutput) -> float:
    try:
        seconds = float(output.details["retry_after_seconds"])
    except (KeyError, ValueError):
        return 1.0
    return seconds if 0 <= seconds <= MAX_RETRY_AFTER_SECONDS else 1.0
