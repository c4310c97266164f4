"""One attempt to run a request on the workers of one placement. The attempt merges the outputs of
these workers into one stream."""

import asyncio
from collections.abc import Callable, Sequence
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
from router.generation.output_queue import OutputDeliveryError, OutputQueue, QueuedOutput
from router.generation.output_validation import UNKNOWN_VOCAB_SIZE, InvalidOutput, find_output_error
from router.generation.worker_connection_pool import WorkerConnection, WorkerConnections
from router.limits import MAX_ERROR_CHARACTERS, MAX_WORKER_RETRY_SECONDS

RETRYABLE_STATUSES = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "DATA_LOSS", "NOT_FOUND"})
"""gRPC statuses of failures that another placement may avoid."""


@dataclass(frozen=True, slots=True)
class TokenTimeouts:
    """How long the worker that has to send the next output may make no progress with any request.
    While it makes progress, the output is waited for: the request may be in a queue, or be a long
    prompt. ``kv_transfer_timeout_seconds`` includes the wait for free blocks on the decode worker.
    Dead workers are noticed much earlier, by their broken connections."""

    first_token_timeout_seconds: float = 120.0
    kv_transfer_timeout_seconds: float = 120.0
    next_token_timeout_seconds: float = 60.0


InlineConsumer = Callable[[RequestOutput], bool]
"""Fully handles an output at once and returns True, or does nothing and returns False."""


@dataclass(frozen=True, slots=True)
class InlineDelivery:
    """Delivers tokens to the client without waking the task that reads the attempt's outputs. The
    :class:`Attempt` calls ``consume`` with an output; if that returns True, the client has been
    served, and the attempt calls ``record`` with the same output."""

    consume: InlineConsumer
    record: Callable[[RequestOutput], None]


class AttemptFailed(Exception):
    """The attempt failed, and another placement may succeed. ``suspects`` are the workers that may
    have caused the failure."""

    def __init__(self, error: BatonError, suspects: Sequence[WorkerRef]) -> None:
        super().__init__(str(error))
        self.error = error
        self.suspects = tuple(suspects)


class AttemptDrained(Exception):
    """The worker that ran the request is draining, or has restarted with another variant of the
    model. ``kv_source`` is that worker if it still holds the KV of all tokens but the last; it is
    None if no KV can be transferred."""

    def __init__(self, worker: WorkerRef, kv_source: WorkerRef | None) -> None:
        super().__init__(f"worker {worker.id} is draining")
        self.worker = worker
        self.kv_source = kv_source


class Attempt:
    """Submits a request to the workers of one placement and yields its outputs.

    Call :meth:`submit`, then :meth:`next_outputs` until an output has a finish reason or the call
    raises, then always :meth:`close`.

    If ``is_continuation`` is True, the attempt continues an answer that a draining worker had
    begun. That worker is then the prefill worker of ``placement``: it holds the KV of the tokens in
    ``spec``, and the client already has the token after them.

    While :meth:`next_outputs` waits, each output that only adds the next token is first offered to
    ``inline_delivery``."""

    def __init__(
        self,
        spec: RequestSpec,
        placement: Placement,
        connections: WorkerConnections,
        timeouts: TokenTimeouts,
        *,
        is_continuation: bool = False,
        inline_delivery: InlineDelivery | None = None,
        vocab_size: int = UNKNOWN_VOCAB_SIZE,
    ) -> None:
        is_local = len(placement.workers) == 1
        self._is_continuation = is_continuation
        self._spec = replace(spec, store_hint=placement.store_hint, kv_codec=placement.kv_codec)
        self._prefill = None if is_local else placement.prefill
        self._decode = placement.decode
        self._connections: dict[WorkerId, WorkerConnection] = {
            worker.id: connections.connect(worker)
            for worker in (self._prefill, self._decode)
            if worker is not None
        }
        self._output_queue = OutputQueue()
        self._vocab_size = vocab_size
        self._max_tokens = spec.sampling.max_tokens
        self._inline_delivery = inline_delivery
        known = spec.num_emitted_tokens + (1 if is_continuation else 0)
        self._merger = OutputMerger(spec.epoch, known, is_split=not (is_local or is_continuation))
        self._timeouts = timeouts
        self._now = asyncio.get_running_loop().time
        self._deadline = 0.0
        self._timeout_seconds = 0.0
        self._awaited = ""
        self._is_decoding = False
        self._is_finished = False
        self.error_output: RequestOutput | None = None
        """The output with which a worker ended the request early (an error, or a cancellation)."""
        self._failure: AttemptFailed | AttemptDrained | BatonError | None = None

    def submit(self) -> None:
        """Submit the request to the workers."""
        if self._prefill is None:
            self._connection(self._decode).submit(
                self._spec, Task.PREFILL_AND_DECODE, None, self.receive
            )
        else:
            if not self._is_continuation:
                self._connection(self._prefill).submit(self._spec, Task.PREFILL, None, self.receive)
            self._connection(self._decode).submit(
                self._spec, Task.DECODE, self._prefill, self.receive
            )
        self._set_deadline("first token", self._timeouts.first_token_timeout_seconds)

    async def next_outputs(self) -> list[RequestOutput]:
        """Wait for outputs and return at least one, in the order of the answer. Raises
        AttemptFailed, AttemptDrained, or a BatonError that no other placement can avoid.

        Outputs that arrived before a failure are returned before it is raised.
        """
        while self._failure is None:
            outputs = self._process(await self._receive_outputs())
            if outputs:
                self._record_progress(outputs[-1])
                return coalesce_outputs(outputs)
        raise self._failure

    def close(self) -> None:
        """Release the request on all workers. Idempotent."""
        for link in self._connections.values():
            if self._is_finished:
                link.stop_delivery(self._spec.request_id, self._spec.epoch)
            else:
                link.cancel(self._spec.request_id, self._spec.epoch)
        self._connections = {}
        self._inline_delivery = None
        self._output_queue.clear()  # an exception that refers to this attempt may be kept for long

    # -- incoming outputs -----------------------------------------------------------------

    def receive(self, worker_id: WorkerId, item: RequestOutput | BatonError) -> None:
        """Accept an output, or the error that ended a worker's outputs. If :meth:`next_outputs` is
        waiting and the output only adds the next token, ``inline_delivery`` may accept it at once;
        anything else is queued for :meth:`next_outputs`."""
        inline = self._inline_delivery
        if (
            inline is not None
            and self._output_queue.has_waiting_reader
            and not isinstance(item, BatonError)
            and self._is_next_token(worker_id, item)
            and inline.consume(item)
        ):
            inline.record(item)
            self._merger.next_index += 1
            self._set_deadline("next token", self._timeouts.next_token_timeout_seconds)
        else:
            self._output_queue.put(worker_id, item)

    def _is_next_token(self, worker_id: WorkerId, output: RequestOutput) -> bool:
        """Whether an output is valid and contains exactly the decode worker's next token. Other
        outputs are validated, merged and reported by :meth:`_process`."""
        tokens, index = output.token_ids, self._merger.next_index
        return (
            self._is_decoding
            and output.first_index == index < self._max_tokens
            and output.finish_reason is None
            and len(tokens) == 1
            and tokens[0] < self._vocab_size
            and not output.details
            and output.epoch == self._spec.epoch
            and worker_id == self._decode.id
        )

    async def _receive_outputs(self) -> Sequence[QueuedOutput]:
        try:
            return await self._output_queue.get_batch(self._deadline)
        except TimeoutError:
            worker = self._awaited_worker()
            progressed_at = self._connection(worker).progressed_at
            self._deadline = max(self._deadline, progressed_at + self._timeout_seconds)
            if self._now() < self._deadline:
                return ()  # the worker has made progress, or tokens were delivered inline
            error = DeadlineExceeded(
                f"the {self._awaited} did not arrive: worker {worker.id} has made no progress for "
                f"{self._timeout_seconds:g} s"
            )
            suspects = [worker] if worker is self._prefill else self._suspects()
            self._failure = AttemptFailed(error, suspects)
            return ()

    def _process(self, queued: Sequence[QueuedOutput]) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        try:
            for worker_id, item in queued:
                outputs.extend(self._process_one(worker_id, item))
        except (AttemptFailed, AttemptDrained, BatonError) as failure:
            self._failure = failure
        return outputs

    def _process_one(
        self, worker_id: WorkerId, item: RequestOutput | BatonError
    ) -> list[RequestOutput]:
        if isinstance(item, BatonError):
            return self._on_connection_lost(worker_id, item)
        if item.epoch != self._spec.epoch:
            return []
        output_error = find_output_error(item, self._spec, self._vocab_size)
        if output_error:
            sender = self._worker(worker_id)
            raise AttemptFailed(InvalidOutput(f"worker {worker_id} sent {output_error}"), [sender])
        if item.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            return self._on_error_output(worker_id, item)
        if item.finish_reason in (FinishReason.MIGRATED, FinishReason.REROUTED):
            worker = self._worker(worker_id)
            is_migration = item.finish_reason is FinishReason.MIGRATED
            raise AttemptDrained(worker, worker if is_migration else None)
        if worker_id == self._decode.id:
            self._is_decoding = True
        try:
            return list(self._merger.add(item))
        except Corrupt as error:
            raise AttemptFailed(error, [self._decode]) from error

    def _on_connection_lost(self, worker_id: WorkerId, error: BatonError) -> list[RequestOutput]:
        """Handle a broken connection. The loss of a prefill worker that has already delivered its
        token is ignored: either the decode worker has imported the KV, or it will report that it
        can't."""
        if isinstance(error, OutputDeliveryError):
            raise error
        if self._has_finished_prefill(worker_id):
            return []
        raise AttemptFailed(error, [self._worker(worker_id)])

    def _on_error_output(self, worker_id: WorkerId, output: RequestOutput) -> list[RequestOutput]:
        if self._has_finished_prefill(worker_id):
            return []
        self.error_output = output
        status = output.details.get("error_status", "")
        message = output.error[:MAX_ERROR_CHARACTERS] or f"worker {worker_id} failed"
        error = error_from_grpc_status(status, message)
        if output.finish_reason is FinishReason.CANCELLED:
            error, status = Unavailable(f"worker {worker_id} cancelled the request"), "UNAVAILABLE"
        if isinstance(error, Overloaded):
            error.retry_after_seconds = _parse_retry_after(output)
            if self._merger.next_index:
                raise AttemptFailed(error, [self._worker(worker_id)])
        if status == "NOT_FOUND" and self._prefill is not None:
            # The decode worker asked the prefill worker for the KV, but the latter has restarted
            # since the placement, or never got the request.
            raise AttemptFailed(error, [self._prefill])
        if status in RETRYABLE_STATUSES:
            raise AttemptFailed(error, self._suspects())
        raise error

    def _record_progress(self, last_output: RequestOutput) -> None:
        """After ``last_output``, record what the attempt waits for next and until when, or that it
        has finished."""
        if last_output.finish_reason is not None:
            # If the answer ends with the prefill worker's token, the decode worker still waits for
            # the KV, so the request must be cancelled there.
            self._is_finished = self._is_decoding
        elif self._is_decoding:
            self._set_deadline("next token", self._timeouts.next_token_timeout_seconds)
        else:
            self._set_deadline(
                "decode worker's first token", self._timeouts.kv_transfer_timeout_seconds
            )

    def _set_deadline(self, awaited: str, seconds: float) -> None:
        self._awaited = awaited
        self._timeout_seconds = seconds
        self._deadline = self._now() + seconds

    # -- workers --------------------------------------------------------------------------

    def _worker(self, worker_id: WorkerId) -> WorkerRef:
        if self._prefill is not None and self._prefill.id == worker_id:
            return self._prefill
        return self._decode

    def _awaited_worker(self) -> WorkerRef:
        """Return the worker that has to send the next output."""
        prefill = self._prefill
        if prefill is None or self._is_decoding or self._has_finished_prefill(prefill.id):
            return self._decode
        return prefill

    def _connection(self, worker: WorkerRef) -> WorkerConnection:
        return self._connections[worker.id]

    def _has_finished_prefill(self, worker_id: WorkerId) -> bool:
        """Whether ``worker_id`` is the prefill worker, and has already delivered its token."""
        has_first = self._merger.next_index > self._spec.num_emitted_tokens
        return self._prefill is not None and worker_id == self._prefill.id and has_first

    def _suspects(self) -> list[WorkerRef]:
        """Return the workers that may have caused a failure: both workers until the decode worker
        has sent an output, since each may report a failure of the other; then only the decode
        worker."""
        if self._prefill is None or self._is_decoding:
            return [self._decode]
        return [self._prefill, self._decode]


def _parse_retry_after(output: RequestOutput) -> float:
    try:
        seconds = float(output.details["retry_after_seconds"])
    except (KeyError, ValueError):
        return 1.0
    return seconds if 0 <= seconds <= MAX_WORKER_RETRY_SECONDS else 1.0
