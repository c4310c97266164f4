"""Collects the parts of a parsed answer."""

from array import array
from collections.abc import Iterator

from router.openai.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)
from router.openai.text_buffer import TextBuffer


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
