"""The base class of the tool call parsers, which split a model's answer into text and tool calls
while it arrives."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from router.openai.parsers.held_whitespace import excess_whitespace, strip_held_whitespace
from router.openai.parsers.json_call_reader import JsonCallReader, NotAToolCall
from router.openai.parsers.output_parts import (
    OutputPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)


class ToolCallParser(ABC):
    """Splits an answer into text and tool calls. The concatenated output does not depend on how the
    input is split into pushes. Only text that may still become markup is held back.

    White space around calls belongs to the markup. At most MAX_HELD_WHITESPACE characters of it are
    held back at one place: what precedes them is text before a call, and is dropped after a call
    and after a special marker. Text that begins like a call and turns out not to be one stays text;
    a call whose arguments have begun stays a call, however it ends.
    """

    marker: str
    """The string that begins a call within text."""
    is_special: bool
    """Whether the marker is a special token. A special token that begins no call is not shown."""

    def __init__(self) -> None:
        self._state: Callable[[], bool] = self._outside
        self._held_text = ""
        self._opening = ""
        self._call_reader: JsonCallReader | None = None
        self._parts: list[OutputPart] = []
        self._after_call = False
        self.num_calls = 0

    def push(self, text: str) -> list[OutputPart]:
        self._held_text += text
        while self._state():
            pass
        return self._take_parts()

    def flush(self) -> list[OutputPart]:
        """End the input: decide whether the held text is a call or text, and return the last
        parts."""
        if self._call_reader is not None:
            try:
                self._call_reader.flush()
            except NotAToolCall as failure:
                self._emit_text(self._opening + failure.text)
        elif not (self._after_call and self._held_text.isspace()):
            self._on_input_end()
        self._held_text, self._call_reader = "", None
        return self._take_parts()

    # -- states: each reads the start of the held text, and returns False when it needs more -------

    def _outside(self) -> bool:
        if self._after_call:
            self._held_text = self._held_text.lstrip()
            self._after_call = not self._held_text
        before, found, rest = self._held_text.partition(self.marker)
        if found:
            text = strip_held_whitespace(before)
            self._emit_text(text)
            self._opening = before[len(text) :] + ("" if self.is_special else found)
            self._held_text = rest
            self._state = self._after_marker
            return True
        held_back = partial_marker_length(self._held_text, self.marker)
        text = strip_held_whitespace(self._held_text[: len(self._held_text) - held_back])
        self._emit_text(text)
        self._held_text = self._held_text[len(text) :]
        return False

    @abstractmethod
    def _after_marker(self) -> bool:
        """Read what follows the marker. Return False if more text is needed."""

    def _in_object(self) -> bool:
        """Read a part of a call's object. Return False if more text is needed."""
        call = self._call_reader
        assert call is not None
        had_begun, held = call.has_begun, self._held_text
        self._held_text = ""
        try:
            self._held_text = held[call.push(held) :]
        except NotAToolCall as failure:
            self._emit_as_text(failure.text, held[failure.num_used :])
            return True
        if call.has_begun:
            if not had_begun:
                self._emit_call_start(call.name or "")
            self._emit_arguments(call.take_arguments())
        if call.is_done:
            self._call_reader = None
            self._state = self._after_object
        return call.is_done

    @abstractmethod
    def _after_object(self) -> bool:
        """Read what follows a call's object. Return False if more text is needed."""

    def _on_input_end(self) -> None:
        """Handle the end of the input outside of an object: emit the held text, unless a subclass
        overrides this."""
        opening = "" if self._state == self._outside else self._opening
        self._emit_text(opening + self._held_text)

    # -- what the states do ----------------------------------------------------------------------

    def _open_object(self, call: JsonCallReader) -> bool:
        self._call_reader = call
        self._state = self._in_object
        return True

    def _emit_as_text(self, raw: str, rest: str) -> None:
        """Treat ``raw``, which followed the marker, as text: it is not a call."""
        self._emit_text(self._opening + raw)
        self._call_reader, self._held_text = None, rest
        self._state = self._outside

    def _end_calls(self, rest: str) -> bool:
        """Continue outside of the markup after a call; text or further calls may follow in
        ``rest``."""
        self._held_text, self._after_call = rest, True
        self._state = self._outside
        return True

    def _emit_excess_whitespace(self) -> None:
        """Emit the excess of the white space at the start of the held text as text."""
        excess = excess_whitespace(self._held_text)
        self._emit_text(self._held_text[:excess])
        self._held_text = self._held_text[excess:]

    def _emit_text(self, text: str) -> None:
        if not text:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, TextPart):
            self._parts[-1] = TextPart(last.text + text)
        else:
            self._parts.append(TextPart(text))

    def _emit_call_start(self, name: str) -> None:
        self._parts.append(ToolCallStart(self.num_calls, name))
        self.num_calls += 1

    def _emit_arguments(self, arguments: str) -> None:
        if arguments:
            self._parts.append(ToolCallArguments(self.num_calls - 1, arguments))

    def _take_parts(self) -> list[OutputPart]:
        pieces, self._parts = self._parts, []
        return pieces


def partial_marker_length(text: str, marker: str) -> int:
    """Return how many of the last characters of ``text`` may be the beginning of ``marker``."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
