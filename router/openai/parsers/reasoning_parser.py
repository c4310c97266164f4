"""Parser of the reasoning before an answer: ``<think>…</think>``."""

from collections.abc import Callable

from router.openai.parsers.held_whitespace import excess_whitespace, strip_held_whitespace
from router.openai.parsers.output_parts import OutputPart, ReasoningPart, TextPart
from router.openai.parsers.tool_call_parser import partial_marker_length

THINK_START, THINK_END = "<think>", "</think>"


class ReasoningParser:
    """Splits reasoning from the answer. If ``in_reasoning`` is True, the prompt has already opened
    the reasoning. White space next to the tags is dropped; before a tag, this applies to the
    last MAX_HELD_WHITESPACE characters of it. An answer that begins with more white space has no
    reasoning, unless the prompt has opened it."""

    def __init__(self, *, in_reasoning: bool) -> None:
        self._held = ""
        self._pieces: list[OutputPart] = []
        self._begun = False
        self.in_reasoning = in_reasoning
        self._state: Callable[[], bool] = self._at_start

    def push(self, text: str) -> list[OutputPart]:
        self._held += text
        while self._state():
            pass
        return self._take()

    def flush(self) -> list[OutputPart]:
        """End the input and return the parts that were held back."""
        held, self._held = self._held, ""
        if held.strip() and self.in_reasoning:
            self._pieces.append(ReasoningPart(held.strip() if not self._begun else held.rstrip()))
        elif held and not self.in_reasoning:
            self._pieces.append(TextPart(held))
        return self._take()

    # -- states: each reads the start of the held text, and returns False when it needs more -------

    def _at_start(self) -> bool:
        rest = self._held.lstrip()
        if self.in_reasoning:
            self._held = rest
        may_open = not excess_whitespace(self._held)
        if may_open and rest.startswith(THINK_START):
            self._held, self.in_reasoning = rest.removeprefix(THINK_START), True
        elif may_open and THINK_START.startswith(rest):
            return False
        self._state = self._in_reasoning if self.in_reasoning else self._in_answer
        return True

    def _in_reasoning(self) -> bool:
        if not self._begun:
            self._held = self._held.lstrip()
        before, found, rest = self._held.partition(THINK_END)
        held_back = 0 if found else partial_marker_length(before, THINK_END)
        reasoning = strip_held_whitespace(before[: len(before) - held_back])
        if reasoning:
            self._begun = True
            self._pieces.append(ReasoningPart(reasoning))
        if found:
            self._held, self.in_reasoning, self._state = rest, False, self._skip_whitespace
            return True
        self._held = before[len(reasoning) :]
        return False

    def _skip_whitespace(self) -> bool:
        self._held = self._held.lstrip()
        self._state = self._in_answer if self._held else self._skip_whitespace
        return bool(self._held)

    def _in_answer(self) -> bool:
        if self._held:
            self._pieces.append(TextPart(self._held))
            self._held = ""
        return False

    def _take(self) -> list[OutputPart]:
        pieces, self._pieces = self._pieces, []
        return pieces
