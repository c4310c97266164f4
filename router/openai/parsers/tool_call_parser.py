"""A parser of calls: text in, as it arrives; text and calls out."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from router.openai.parsers.json_call_reader import JsonCallReader, NotAToolCall
from router.openai.parsers.output_parts import (
    OutputPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)


class ToolCallParser(ABC):
    """What comes out does not depend on how the text is split, but for how it is split itself.
    What may still become markup is held back, and nothing else is.

    White space around calls belongs to the markup. What begins like a call and is none is text; a
    call whose arguments have begun stays one, however it ends.
    """

    marker: str
    """Begins a call, in the midst of a text."""
    is_special: bool
    """Whether the marker is a special token: where it begins no call, it is not shown."""

    def __init__(self) -> None:
        self._state: Callable[[], bool] = self._outside
        self._held = ""
        self._opening = ""
        self._object: JsonCallReader | None = None
        self._pieces: list[OutputPart] = []
        self._after_call = False
        self.num_calls = 0

    def push(self, text: str) -> list[OutputPart]:
        self._held += text
        while self._state():
            pass
        return self._take()

    def flush(self) -> list[OutputPart]:
        """The text has ended: whatever is held is decided now."""
        if self._object is not None:
            try:
                self._object.close()
            except NotAToolCall as failure:
                self._say(self._opening + failure.raw)
        elif not (self._after_call and self._held.isspace()):
            self._end()
        self._held, self._object = "", None
        return self._take()

    # -- states: each reads from the beginning of what is held, and is False when it needs more ----

    def _outside(self) -> bool:
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held
        before, found, rest = self._held.partition(self.marker)
        if found:
            text = before.rstrip()
            self._say(text)
            self._opening = before[len(text) :] + ("" if self.is_special else found)
            self._held = rest
            self._state = self._opened
            return True
        kept = partial_marker_length(self._held, self.marker)
        text = self._held[: len(self._held) - kept].rstrip()
        self._say(text)
        self._held = self._held[len(text) :]
        return False

    @abstractmethod
    def _opened(self) -> bool:
        """After the marker."""

    def _inside(self) -> bool:
        """In the object of a call."""
        call = self._object
        assert call is not None
        had_begun, held = call.begun, self._held
        self._held = ""
        try:
            self._held = held[call.push(held) :]
        except NotAToolCall as failure:
            self._refuse(failure.raw, held[failure.used :])
            return True
        if call.begun:
            if not had_begun:
                self._begin(call.name or "")
            self._grow(call.take())
        if call.done:
            self._object = None
            self._state = self._after_object
        return call.done

    @abstractmethod
    def _after_object(self) -> bool:
        """After the object of a call."""

    def _end(self) -> None:
        """What is held in a state without an object is text, unless a state knows better."""
        opening = "" if self._state == self._outside else self._opening
        self._say(opening + self._held)

    # -- what the states do ----------------------------------------------------------------------

    def _open_object(self, call: JsonCallReader) -> bool:
        self._object = call
        self._state = self._inside
        return True

    def _refuse(self, raw: str, rest: str) -> None:
        """``raw``, after the marker, is no call."""
        self._say(self._opening + raw)
        self._object, self._held = None, rest
        self._state = self._outside

    def _leave(self, rest: str) -> bool:
        """The calls are over, or there are others after a text."""
        self._held, self._after_call = rest, True
        self._state = self._outside
        return True

    def _say(self, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, TextPart):
            self._pieces[-1] = TextPart(last.text + text)
        else:
            self._pieces.append(TextPart(text))

    def _begin(self, name: str) -> None:
        self._pieces.append(ToolCallStart(self.num_calls, name))
        self.num_calls += 1

    def _grow(self, arguments: str) -> None:
        if arguments:
            self._pieces.append(ToolCallArguments(self.num_calls - 1, arguments))

    def _take(self) -> list[OutputPart]:
        pieces, self._pieces = self._pieces, []
        return pieces


def partial_marker_length(text: str, marker: str) -> int:
    """How many of the last characters may be the beginning of ``marker``."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
