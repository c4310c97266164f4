"""One answer as its client sees it: tokens become text, stop strings end it, and what is in it is
told apart."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton.core.ids import TokenId
from baton.core.request import FinishReason, RequestOutput, TokenLogprob
from baton.text.detokenizer import IncrementalDetokenizer
from baton.text.stop_strings import StopStrings
from router.generation.generation import Generation
from router.generation.record import GenerationRecord
from router.openai.parsers.output_parser import OutputParser
from router.openai.parsers.output_parts import OutputPart
from router.openai.token_entry import TokenEntry


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What is new of one answer. ``entries`` are empty unless logprobs were asked for. Where the
    answer may be more than text, there are ``pieces`` instead of ``text``. The first one brings
    ``prompt_entries``, if they were asked for."""

    index: int
    text: str
    token_ids: tuple[TokenId, ...]
    entries: tuple[TokenEntry, ...]
    finish_reason: str | None
    pieces: tuple[OutputPart, ...] = ()
    prompt_entries: tuple[TokenEntry, ...] = ()


DeltaHandler = Callable[[ChoiceDelta], Awaitable[None]]


class TextSink(Protocol):
    """Where text can go at once, if it can."""

    @property
    def is_open(self) -> bool: ...

    def put(self, index: int, text: str) -> None:
        """Only while it is open."""
        ...


PromptLogprobsBuilder = Callable[[Sequence[TokenLogprob]], tuple[TokenEntry, ...]]

FINISH_REASON_TOOL_CALLS = "tool_calls"
"""Why an answer ended that calls something."""


class ChoiceStream:
    """:meth:`run` follows a journey and emits deltas; the last one has a finish reason.

    With ``every_token``, a delta is emitted for each step, even while its text is held back
    (half a character, the beginning of a stop string); without, such steps join the next.
    Without a ``reader`` the answer is nothing but text. With ``shows_stop`` the stop string, or the
    token that ends the answer, is a part of it. ``offset`` is how many characters are shown before
    it. A ``silent`` one has no tokens at all: it is asked for because of its prompt.
    """

    def __init__(
        self,
        index: int,
        journey: Generation,
        detokenizer: IncrementalDetokenizer,
        stops: Sequence[str],
        *,
        every_token: bool,
        reader: OutputParser | None = None,
        shows_stop: bool = False,
        score_prompt: PromptLogprobsBuilder | None = None,
        offset: int = 0,
        silent: bool = False,
    ) -> None:
        self.index = index
        self._journey = journey
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._reader = reader
        self._shows_stop = shows_stop
        self._every_token = every_token
        self._score_prompt = score_prompt
        self._silent = silent
        self._num_characters = offset
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.logprob_sum = 0.0
        self._token_ids: list[TokenId] = []
        self._entries: list[TokenEntry] = []
        self._prompt_entries: tuple[TokenEntry, ...] = ()

    @property
    def record(self) -> GenerationRecord:
        return self._journey.record

    @property
    def mean_logprob(self) -> float:
        """Of its tokens; needs logprobs."""
        return self.logprob_sum / max(self.num_tokens, 1)

    async def run(self, emit: DeltaHandler, outlet: TextSink | None = None) -> str:
        """The finish reason. Raises BatonError when the journey can't go on. Where an answer is
        nothing but text that nothing can hold back, its tokens go to ``outlet`` while that is open,
        without waking this task."""
        relay = partial(self._relay, outlet) if outlet is not None and self._is_plain else None
        async with aclosing(self._journey.outputs(relay)) as outputs:
            async for output in outputs:
                if self._score_prompt is not None:  # the first output tells
                    self._prompt_entries = self._score_prompt(output.prompt_logprobs)
                    self._score_prompt = None
                if self._silent:
                    await emit(self._delta("", (), FinishReason.LENGTH))
                    return FinishReason.LENGTH
                text, reason = self._read(output)
                pieces: list[OutputPart] = []
                if self._reader is not None:
                    pieces, reason = self._part(self._reader, output, text, reason)
                    text = ""
                if text or pieces or reason is not None or self._every_token:
                    await emit(self._delta(text, pieces, reason))
                if reason is not None:
                    return reason
        raise AssertionError("a journey ends with a reason or an error")

    @property
    def _is_plain(self) -> bool:
        special = self._silent or self._score_prompt is not None
        return not (self._every_token or self._reader or self._stops.watches or special)

    def _relay(self, outlet: TextSink, output: RequestOutput) -> bool:
        if not outlet.is_open:
            return False
        self.num_tokens += len(output.token_ids)
        text = self._detokenizer.push(output.token_ids)
        if text:
            self._num_characters += len(text)
            outlet.put(self.index, text)
        return True

    def _read(self, output: RequestOutput) -> tuple[str, str | None]:
        """The text that can be shown now, and the reason if this is the end."""
        stopped = output.finish_reason is FinishReason.STOP
        last = len(output.token_ids) - 1
        pieces: list[str] = []
        for position, token_id in enumerate(output.token_ids):
            self._keep(output, position, token_id)
            if stopped and position == last and not self._shows_stop:
                break  # an EOS, or another token that only ends the answer, has no text
            pieces.append(self._show(self._detokenizer.push((token_id,))))
            if self._stops.matched is not None:
                return "".join(pieces) + self._stop_text(), FinishReason.STOP
        if output.finish_reason is None:
            return "".join(pieces), None
        pieces.append(self._show(self._detokenizer.flush()))
        pieces.append(self._stops.flush())
        if self._stops.matched is None:
            return "".join(pieces), output.finish_reason
        return "".join(pieces) + self._stop_text(), FinishReason.STOP

    def _stop_text(self) -> str:
        return (self._stops.matched or "") if self._shows_stop else ""

    def _part(
        self, reader: OutputParser, output: RequestOutput, text: str, reason: str | None
    ) -> tuple[list[OutputPart], str | None]:
        """An answer that calls ends for that reason, also where it has called enough."""
        was_thinking = reader.is_thinking
        pieces = reader.push(text)
        if was_thinking or reader.is_thinking:
            self.num_reasoning_tokens += len(output.token_ids)
        if reason is not None:
            pieces += reader.flush()
        if reader.enough or (reader.has_called and reason == FinishReason.STOP):
            reason = FINISH_REASON_TOOL_CALLS
        return pieces, reason

    def _show(self, text: str) -> str:
        self._num_characters += len(text)
        return self._stops.push(text)

    def _keep(self, output: RequestOutput, position: int, token_id: TokenId) -> None:
        self._token_ids.append(token_id)
        self.num_tokens += 1
        if output.logprobs:
            self._entries.append(TokenEntry(output.logprobs[position], self._num_characters))
            self.logprob_sum += output.logprobs[position].logprob

    def _delta(self, text: str, pieces: Sequence[OutputPart], reason: str | None) -> ChoiceDelta:
        ids, entries = tuple(self._token_ids), tuple(self._entries)
        prompt, self._prompt_entries = self._prompt_entries, ()
        delta = ChoiceDelta(self.index, text, ids, entries, reason, tuple(pieces), prompt)
        self._token_ids.clear()
        self._entries.clear()
        return delta
