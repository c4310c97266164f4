"""One answer as its client sees it: tokens become text, stop strings end it."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from baton.core.ids import TokenId
from baton.core.request import FinishReason, RequestOutput, TokenLogprob
from baton.text.stop_strings import StopStrings
from baton.text.tokenizer import Tokenizer
from router.journey import Journey
from router.record import JourneyRecord


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token's logprobs. ``offset`` is where its text begins, in characters of the answer."""

    logprob: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one answer. ``entries`` are empty unless logprobs were asked for."""

    index: int
    text: str
    token_ids: tuple[TokenId, ...]
    entries: tuple[TokenEntry, ...]
    finish_reason: str | None


Emit = Callable[[Delta], Awaitable[None]]


class Choice:
    """:meth:`run` follows a journey and emits deltas; the last one has a finish reason.

    With ``every_token``, a delta is emitted for each step, even while its text is held back
    (half a character, the beginning of a stop string); without, such steps join the next.
    """

    def __init__(
        self,
        index: int,
        journey: Journey,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        every_token: bool,
    ) -> None:
        self.index = index
        self._journey = journey
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(stops)
        self._every_token = every_token
        self._num_characters = 0
        self.num_tokens = 0
        self._token_ids: list[TokenId] = []
        self._entries: list[TokenEntry] = []

    @property
    def record(self) -> JourneyRecord:
        return self._journey.record

    async def run(self, emit: Emit) -> str:
        """The finish reason. Raises BatonError when the journey can't go on."""
        async with aclosing(self._journey.outputs()) as outputs:
            async for output in outputs:
                text, reason = self._read(output)
                if text or reason is not None or self._every_token:
                    await emit(self._delta(text, reason))
                if reason is not None:
                    return reason
        raise AssertionError("a journey ends with a reason or an error")

    def _read(self, output: RequestOutput) -> tuple[str, str | None]:
        """The text that can be shown now, and the reason if this is the end."""
        stopped = output.finish_reason is FinishReason.STOP
        last = len(output.token_ids) - 1
        pieces: list[str] = []
        for position, token_id in enumerate(output.token_ids):
            self._keep(output, position, token_id)
            if stopped and position == last:
                break  # an EOS, or another token that only ends the answer, has no text
            pieces.append(self._show(self._detokenizer.push((token_id,))))
            if self._stops.matched is not None:
                return "".join(pieces), FinishReason.STOP
        if output.finish_reason is None:
            return "".join(pieces), None
        pieces.append(self._show(self._detokenizer.flush()))
        pieces.append(self._stops.flush())
        matched = self._stops.matched is not None
        return "".join(pieces), FinishReason.STOP if matched else output.finish_reason

    def _show(self, text: str) -> str:
        self._num_characters += len(text)
        return self._stops.push(text)

    def _keep(self, output: RequestOutput, position: int, token_id: TokenId) -> None:
        self._token_ids.append(token_id)
        self.num_tokens += 1
        if output.logprobs:
            self._entries.append(TokenEntry(output.logprobs[position], self._num_characters))

    def _delta(self, text: str, reason: str | None) -> Delta:
        delta = Delta(self.index, text, tuple(self._token_ids), tuple(self._entries), reason)
        self._token_ids.clear()
        self._entries.clear()
        return delta
