"""The accumulated result of one choice, with its text and its parts."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.core.ids import TokenId
from router.serving.choice_stream import ChoiceDelta, TokenEntry
from router.serving.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)

PIECES_PER_RUN = 128
"""So many pieces are joined at a time."""


class TextBuffer:
    """A text that grows by pieces. It takes little more memory than its characters: a piece of one
    token takes more than 50 bytes, so the pieces are joined :data:`PIECES_PER_RUN` at a time."""

    __slots__ = ("_pieces", "_runs")

    def __init__(self) -> None:
        self._runs: list[str] = []
        self._pieces: list[str] = []

    def append(self, piece: str) -> None:
        if not piece:
            return
        self._pieces.append(piece)
        if len(self._pieces) >= PIECES_PER_RUN:
            self._runs.append("".join(self._pieces))
            self._pieces.clear()

    @property
    def text(self) -> str:
        return "".join((*self._runs, *self._pieces))

    def take(self) -> str:
        """Return the text, and leave the buffer empty."""
        text = self.text
        self._runs.clear()
        self._pieces.clear()
        return text

    def __bool__(self) -> bool:
        """Return whether there is any text."""
        return bool(self._pieces or self._runs)


class AnswerParts:
    """The parts of one parsed answer, in order. A part that continues the last one (more text, more
    reasoning, more arguments of the same call) is joined to it, unless tokens with logprobs have
    arrived since: the Responses API searches for the logprobs of a text among the tokens that had
    arrived when the text ended."""

    __slots__ = ("_ends", "_last_text", "_parts")

    def __init__(self) -> None:
        self._parts: list[OutputPart] = []
        self._ends = array("q")
        self._last_text = TextBuffer()  # what has been joined to the last part

    def add(self, part: OutputPart, num_entries: int) -> None:
        """Add a part. ``num_entries`` is the number of tokens with logprobs that have arrived up to
        its end."""
        continues = self._parts and _is_continued(self._parts[-1], part)
        if continues and self._ends[-1] == num_entries:
            self._last_text.append(_text(part))
            return
        self._join()
        self._parts.append(part)
        self._ends.append(num_entries)

    def remove_call(self, index: int) -> None:
        """Remove a tool call."""
        self._join()
        kept = [
            (part, end)
            for part, end in zip(self._parts, self._ends, strict=True)
            if not (isinstance(part, ToolCallStart | ToolCallArguments) and part.index == index)
        ]
        self._parts = [part for part, _ in kept]
        self._ends = array("q", [end for _, end in kept])

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[OutputPart]:
        self._join()
        return iter(self._parts)

    def with_ends(self) -> Iterator[tuple[OutputPart, int]]:
        """Return each part with the number of tokens with logprobs up to its end."""
        return zip(self, self._ends, strict=True)

    def _join(self) -> None:
        if self._last_text:
            last = self._parts[-1]
            self._parts[-1] = _replace_text(last, _text(last) + self._last_text.take())


@dataclass(slots=True)
class ChoiceResult:
    """One choice, accumulated from its deltas. ``prompt_text`` is the prompt if it is echoed, else
    empty; ``prompt_token_ids`` are sent only for ``return_token_ids``. An answer is either parsed,
    then it has ``parts``, or it has ``unparsed_text``. ``token_ids`` has 64-bit integers.
    ``stop_string`` is the stop string that ended the answer, or None."""

    index: int
    prompt_token_ids: Sequence[TokenId]
    prompt_text: str = ""
    unparsed_text: TextBuffer = field(default_factory=TextBuffer)
    parts: AnswerParts = field(default_factory=AnswerParts)
    token_ids: "array[int]" = field(default_factory=lambda: array("q"))
    token_entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_token_entries: Sequence[TokenEntry] = ()
    stop_string: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.prompt_token_entries = self.prompt_token_entries or delta.prompt_token_entries
        self.unparsed_text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.token_entries.extend(delta.token_entries)
        for part in delta.parts:
            self.parts.add(part, len(self.token_entries))
        for index in delta.cut_calls:
            self.parts.remove_call(index)
        self.finish_reason = delta.finish_reason
        self.stop_string = delta.stop_string

    @property
    def text(self) -> str:
        """The text of the answer, without reasoning and tool calls."""
        texts = [part.text for part in self.parts if isinstance(part, TextPart)]
        return self.unparsed_text.text + "".join(texts)

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def tool_calls(self) -> list[tuple[ToolCallStart, str]]:
        """The calls and their arguments, in order."""
        calls: dict[int, tuple[ToolCallStart, list[str]]] = {}
        for part in self.parts:
            match part:
                case ToolCallStart(index):
                    calls[index] = (part, [])
                case ToolCallArguments(index, arguments):
                    calls[index][1].append(arguments)
        return [(call, "".join(arguments)) for call, arguments in calls.values()]


def _is_continued(part: OutputPart, by: OutputPart) -> bool:
    match part, by:
        case (TextPart(), TextPart()) | (ReasoningPart(), ReasoningPart()):
            return True
        case ToolCallArguments(index), ToolCallArguments(other):
            return index == other
    return False


def _text(part: OutputPart) -> str:
    match part:
        case TextPart(text) | ReasoningPart(text) | ToolCallArguments(_, text):
            return text
        case ToolCallStart():
            return ""


def _replace_text(part: OutputPart, text: str) -> OutputPart:
    match part:
        case TextPart():
            return TextPart(text)
        case ReasoningPart():
            return ReasoningPart(text)
        case ToolCallArguments(index):
            return ToolCallArguments(index, text)
        case ToolCallStart():
            return part
