"""One answer as its client sees it: tokens are decoded to text, stop strings end the answer, and
reasoning and tool calls are separated from the text."""

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from baton.core.ids import TokenId
from baton.core.request import FinishReason, RequestOutput, TokenLogprob
from baton.text.detokenizer import IncrementalDetokenizer
from baton.text.stop_strings import StopStrings
from baton.text.tokenizer import Tokenizer
from router.generation.generation import Generation
from router.generation.record import GenerationRecord
from router.serving.parsers.output_parser import OutputParser
from router.serving.parsers.output_parts import OutputPart

MIN_LOGPROB = -9999.0
"""The value that stands for minus infinity, as in OpenAI's API: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token and its logprobs. ``offset`` is the position of its text, in characters of the text
    that the client gets."""

    logprob: TokenLogprob
    offset: int

    @property
    def is_first(self) -> bool:
        """Whether this is the first token of a prompt. It has no logprob, since nothing precedes
        it."""
        return math.isnan(self.logprob.logprob)


def build_prompt_token_entries(
    token_ids: Sequence[TokenId], tokenizer: Tokenizer, scores: Sequence[TokenLogprob]
) -> tuple[TokenEntry, ...]:
    """Build one entry per prompt token. The first entry has no logprob, since nothing precedes its
    token. Returns an empty tuple if the worker sent logprobs for a different number of tokens."""
    if len(scores) + 1 != len(token_ids):
        return ()
    detokenizer, offset = tokenizer.make_detokenizer(), 0
    entries: list[TokenEntry] = []
    for score in (TokenLogprob(token_ids[0], math.nan), *scores):
        entries.append(TokenEntry(score, offset))
        offset += len(detokenizer.push((score.token_id,)))
    return tuple(entries)


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The new part of one answer. ``token_entries`` are empty unless logprobs were requested. If
    the answer is parsed for reasoning or tool calls, the delta has ``parts``, and ``text`` is
    empty. The first delta has ``prompt_token_entries`` if prompt logprobs were requested. The last
    delta has the ``stop_string`` that ended the answer, if a stop string ended it, and in
    ``cut_calls`` the indexes of tool calls that are not complete, and must not be run."""

    index: int
    text: str
    token_ids: tuple[TokenId, ...]
    token_entries: tuple[TokenEntry, ...]
    finish_reason: str | None
    parts: tuple[OutputPart, ...] = ()
    prompt_token_entries: tuple[TokenEntry, ...] = ()
    stop_string: str | None = None
    cut_calls: tuple[int, ...] = ()


DeltaHandler = Callable[[ChoiceDelta], Awaitable[None]]


class InlineSink(Protocol):
    """A destination of outputs that never waits: it refuses outputs if the client is too slow."""

    def write_output(self, choice: "ChoiceStream", output: RequestOutput) -> bool:
        """Deliver the text of an output (:meth:`ChoiceStream.take_text`) and return True. If the
        client does not keep up, do nothing and return False."""
        ...


PromptLogprobsBuilder = Callable[[Sequence[TokenLogprob]], tuple[TokenEntry, ...]]

FINISH_REASON_TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that ends with tool calls."""


class ChoiceStream:
    """Turns the outputs of one generation into deltas (:meth:`run`); the last delta has a finish
    reason.

    If ``emit_every_step`` is True, a delta is emitted for each step, even while its text is held
    back (an incomplete character, a possible stop string); otherwise such a step is merged into the
    next one. If ``parser`` is None, the whole answer is text. If ``include_stop`` is True, the
    answer includes the stop string or the token that ends it. ``offset`` is the number of
    characters of an echoed prompt, which precede the answer. If ``prompt_only`` is True, the client
    wants only the prompt or its logprobs, and no tokens of the answer are shown. If
    ``shows_logprobs`` is False, the deltas have no token entries, even if workers send logprobs
    because ``best_of`` ranks answers by them."""

    def __init__(
        self,
        index: int,
        generation: Generation,
        detokenizer: IncrementalDetokenizer,
        stop_strings: Sequence[str],
        *,
        emit_every_step: bool,
        parser: OutputParser | None = None,
        include_stop: bool = False,
        build_prompt_logprobs: PromptLogprobsBuilder | None = None,
        offset: int = 0,
        prompt_only: bool = False,
        shows_logprobs: bool = True,
    ) -> None:
        self.index = index
        self.splits_outputs = False
        """Whether each token is a step of its own, even if a worker sends several at a time: then
        the deltas depend on nothing but the tokens."""
        self._generation = generation
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stop_strings)
        self._parser = parser
        self._include_stop = include_stop
        self._emit_every_step = emit_every_step
        self._build_prompt_logprobs = build_prompt_logprobs
        self._prompt_only = prompt_only
        self._shows_logprobs = shows_logprobs
        self._num_characters = offset
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.logprob_sum = 0.0
        self._token_ids: list[TokenId] = []
        self._entries: list[TokenEntry] = []
        self._prompt_entries: tuple[TokenEntry, ...] = ()

    @property
    def generation(self) -> Generation:
        return self._generation

    @property
    def record(self) -> GenerationRecord:
        return self._generation.record

    @property
    def mean_logprob(self) -> float:
        """The mean logprob of the answer's tokens. Only meaningful if logprobs were requested."""
        return self.logprob_sum / max(self.num_tokens, 1)

    async def run(self, emit: DeltaHandler, sink: InlineSink | None = None) -> str:
        """Run to the end and return the finish reason. Raises BatonError when the generation fails.

        If the client gets only text and there are no stop strings, outputs go directly to ``sink``
        as long as it accepts them, without waking this task."""
        inline_consumer = (
            partial(sink.write_output, self) if sink is not None and self._is_plain else None
        )
        async with aclosing(self._generation.outputs(inline_consumer)) as outputs:
            async for output in outputs:
                if (
                    self._build_prompt_logprobs is not None
                ):  # the first output has the prompt's logprobs
                    self._prompt_entries = self._build_prompt_logprobs(output.prompt_logprobs)
                    self._build_prompt_logprobs = None
                if self._prompt_only:
                    await emit(self._make_delta("", (), FinishReason.LENGTH))
                    return FinishReason.LENGTH
                for step in _split_output(output) if self.splits_outputs else (output,):
                    reason = await self._take_step(step, emit)
                    if reason is not None:
                        return reason
        raise AssertionError("the generation ended without a finish reason and without an error")

    async def _take_step(self, output: RequestOutput, emit: DeltaHandler) -> str | None:
        """Emit what an output adds, if it can be shown now. Return the finish reason if the answer
        ends here."""
        text, reason = self._to_text(output)
        pieces: list[OutputPart] = []
        if self._parser is not None:
            pieces, reason = self._parse(self._parser, output, text, reason)
            text = ""
        if text or pieces or reason is not None or self._emit_every_step:
            await emit(self._make_delta(text, pieces, reason))
        return reason

    @property
    def _is_plain(self) -> bool:
        special = self._prompt_only or self._build_prompt_logprobs is not None
        return not (
            self._emit_every_step or self._parser or self._stop_strings.has_stops or special
        )

    def take_text(self, output: RequestOutput) -> str:
        """Add the tokens of an output to the answer's token count, and return their text, which is
        empty while a character is incomplete. Called by :meth:`InlineSink.write_output`."""
        self.num_tokens += len(output.token_ids)
        text = self._detokenizer.push(output.token_ids)
        self._num_characters += len(text)
        return text

    def _to_text(self, output: RequestOutput) -> tuple[str, str | None]:
        """Return the text that can be shown now, and the finish reason if the answer ends here."""
        stopped = output.finish_reason is FinishReason.STOP
        last = len(output.token_ids) - 1
        pieces: list[str] = []
        for position, token_id in enumerate(output.token_ids):
            self._record_token(output, position, token_id)
            if stopped and position == last and not self._include_stop:
                break  # an EOS token, or another one that only ends the answer, has no text
            pieces.append(self._match_stop_strings(self._detokenizer.push((token_id,))))
            if self._stop_strings.matched is not None:
                return "".join(pieces) + self._stop_text(), FinishReason.STOP
        if output.finish_reason is None:
            return "".join(pieces), None
        pieces.append(self._match_stop_strings(self._detokenizer.flush()))
        pieces.append(self._stop_strings.flush())
        if self._stop_strings.matched is None:
            return "".join(pieces), output.finish_reason
        return "".join(pieces) + self._stop_text(), FinishReason.STOP

    def _stop_text(self) -> str:
        return (self._stop_strings.matched or "") if self._include_stop else ""

    def _parse(
        self, reader: OutputParser, output: RequestOutput, text: str, reason: str | None
    ) -> tuple[list[OutputPart], str | None]:
        """Parse the text into parts. The finish reason becomes ``tool_calls`` if an answer with
        tool calls ends with ``stop``, or if a call beyond the allowed number begins."""
        was_thinking = reader.is_in_reasoning
        pieces = reader.push(text)
        if was_thinking or reader.is_in_reasoning:
            self.num_reasoning_tokens += len(output.token_ids)
        if reason is not None:
            pieces += reader.flush()
        if reader.has_enough_calls or (reader.has_tool_calls and reason == FinishReason.STOP):
            reason = FINISH_REASON_TOOL_CALLS
        return pieces, reason

    def _match_stop_strings(self, text: str) -> str:
        self._num_characters += len(text)
        return self._stop_strings.push(text)

    def _record_token(self, output: RequestOutput, position: int, token_id: TokenId) -> None:
        self._token_ids.append(token_id)
        self.num_tokens += 1
        if output.logprobs:
            if self._shows_logprobs:
                self._entries.append(TokenEntry(output.logprobs[position], self._num_characters))
            self.logprob_sum += output.logprobs[position].logprob

    def _make_delta(
        self, text: str, pieces: Sequence[OutputPart], reason: str | None
    ) -> ChoiceDelta:
        ids, entries = tuple(self._token_ids), tuple(self._entries)
        prompt, self._prompt_entries = self._prompt_entries, ()
        stop = self._stop_strings.matched
        parser = self._parser
        cut = tuple(parser.cut_calls) if parser is not None and reason is not None else ()
        delta = ChoiceDelta(
            self.index, text, ids, entries, reason, tuple(pieces), prompt, stop, cut
        )
        self._token_ids.clear()
        self._entries.clear()
        return delta


def _split_output(output: RequestOutput) -> Iterable[RequestOutput]:
    """Split an output into one per token; the last one has the finish reason."""
    last = len(output.token_ids) - 1
    if last <= 0:
        return (output,)
    return [
        replace(
            output,
            first_index=output.first_index + position,
            token_ids=(token_id,),
            logprobs=output.logprobs[position : position + 1],
            finish_reason=output.finish_reason if position == last else None,
        )
        for position, token_id in enumerate(output.token_ids)
    ]
