"""A job of an attached worker: one placement of a request, as one request at the server."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from attached_worker.server import RunningAnswer
from baton.core.ids import RequestId, TokenId
from baton.core.request import (
    CONTINUATION,
    NUMERIC,
    FinishReason,
    RequestOutput,
    RequestSpec,
    TokenLogprob,
)
from baton.core.task import Task
from baton.errors import BatonError
from baton.worker.job import failed_output, rerouted_output
from baton.worker.output_stream import OutputStream

OnTokens = Callable[["AttachedJob", bool], None]
"""Called with every arrival of tokens; the flag says whether they show that the prompt has been
computed."""

OnEnd = Callable[["AttachedJob"], None]


def continues(spec: RequestSpec, samples_by_position: bool) -> bool:
    """Whether a server that gets the prompt and the first tokens of an answer goes on with the
    tokens that it would have chosen alone, but for rounding."""
    return (spec.sampling.is_greedy or samples_by_position) and not must_be_held(spec)


def must_be_held(spec: RequestSpec) -> bool:
    """Whether no token of the answer may be shown before its end: a server that continued it would
    restart its grammar, and count none of its tokens towards presence and frequency penalties."""
    sampling = spec.sampling
    counts_answer = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    return sampling.grammar is not None or counts_answer


class AttachedJob:
    """Turns what a server sends into outputs. Implements
    :class:`attached_worker.server.AnswerReceiver`.

    ``num_earlier`` counts the tokens that another worker has generated in this placement.
    ``cached_tokens`` is reported with the first output, if it is known by then. ``is_alone`` says
    whether no other prompt was waiting when the job was sent."""

    def __init__(
        self,
        spec: RequestSpec,
        task: Task,
        stream: OutputStream,
        sent_at: float,
        on_tokens: OnTokens,
        on_end: OnEnd,
    ) -> None:
        self.spec = spec
        self.task = task
        self.stream = stream
        self.sent_at = sent_at
        self.received_at: float | None = None
        """When its last tokens came."""

        self.prompt_seconds: float | None = None
        """How long its prompt took, if it was the only one."""

        self.is_held = must_be_held(spec)
        self.continues = False
        """Whether servers that get its first tokens go on as one server would have."""

        self.is_alone = False
        self.is_exact = True
        """Whether the server's tokens are those that any other server would have generated."""

        self.is_finished = False
        self.error: BatonError | None = None
        """Why the server has ended the answer early."""

        self.has_prompt = task is Task.DECODE
        """Whether its prompt has been computed."""

        self.has_tokens = asyncio.Event()
        self.running: list[RunningAnswer] = []
        """What is aborted when the job ends."""

        self.num_earlier = 0
        self.num_new_tokens = 0
        self.cached_tokens: int | None = None
        self._is_confirmed = task is not Task.DECODE
        self._on_tokens = on_tokens
        self._on_end = on_end
        self._unsent: list[RequestOutput] = []
        """Outputs that wait: the last one until the server has also sent what it counted; all of a
        held answer for its end; all of an answer from another worker's KV until that is confirmed.
        """

        self._num_sent = 0
        self._has_ended = False

    @property
    def id(self) -> RequestId:
        return self.spec.request_id

    @property
    def num_known(self) -> int:
        return len(self.spec.token_ids) + self.num_earlier + self.num_new_tokens

    # -- AnswerReceiver ---------------------------------------------------------------------

    def receive(
        self,
        token_ids: Sequence[TokenId],
        logprobs: Sequence[TokenLogprob],
        prompt_logprobs: Sequence[TokenLogprob] = (),
        is_last: bool = False,
    ) -> None:
        is_first = self.num_new_tokens == 0
        output = self._output(self.num_new_tokens)
        output.token_ids, output.logprobs = tuple(token_ids), tuple(logprobs)
        output.prompt_logprobs = tuple(prompt_logprobs)
        output.cached_tokens = (self.cached_tokens or 0) if is_first else 0
        if output.first_index == self.spec.num_emitted_tokens > 0 and not self.is_exact:
            output.details = {CONTINUATION: NUMERIC}
        self.num_new_tokens += len(token_ids)
        self.has_tokens.set()
        self._unsent.append(output)
        if not is_last:
            self._send()
        self._note_tokens(is_first)

    def finish(self, reason: FinishReason, cached_tokens: int) -> None:
        if not self._unsent:
            self._unsent.append(self._output(self.num_new_tokens))
        self._unsent[-1].finish_reason = reason
        self._unsent[-1].cached_tokens = self.cached_tokens = cached_tokens
        self.is_finished = True
        self.has_tokens.set()
        self._send()

    def fail(self, error: BatonError) -> None:
        self.error = error
        self._end(failed_output(self.spec, error))

    # -- by the worker ----------------------------------------------------------------------

    def note_prompt(self) -> None:
        """Record that the prompt has been computed, without a token for the client."""
        self._note_tokens(is_first=True)

    def restart(self) -> None:
        """Forget the tokens that were received; none of them has been shown."""
        self._unsent.clear()
        self.num_new_tokens, self.is_finished = 0, False

    def confirm(self) -> None:
        """Show the answer: the KV on which it is based was right."""
        self._is_confirmed = True
        self._send()

    def reroute(self) -> None:
        """Cancel at the server, and have the router place the request elsewhere."""
        self._end(rerouted_output(self.spec))

    def cancel(self) -> None:
        self._end(None)

    def _note_tokens(self, is_first: bool) -> None:
        computed, self.has_prompt = is_first and not self.has_prompt, True
        self._on_tokens(self, computed)

    @property
    def _may_show(self) -> bool:
        return self._is_confirmed and (self.is_finished or not self.is_held)

    def _send(self) -> None:
        if self._has_ended or not self._may_show:
            return
        unsent, self._unsent = self._unsent, []
        for output in unsent:
            self._num_sent += len(output.token_ids)
            self.stream.put(output)
        if self.is_finished:
            self._end(None)

    def _end(self, output: RequestOutput | None) -> None:
        if self._has_ended:
            return
        if output is not None:
            self._send()
            index = self._output(self._num_sent).first_index
            self.stream.put(replace(output, first_index=index))
        self._has_ended = True
        for each in self.running:
            each.abort()
        self._on_end(self)

    def _output(self, num_before: int) -> RequestOutput:
        index = self.spec.num_emitted_tokens + self.num_earlier + num_before
        return RequestOutput(self.id, self.spec.epoch, index, ())
