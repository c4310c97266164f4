"""Reasoning before an answer: ``<think>…</think>``."""

from collections.abc import Callable

from router.openai.parsers.output_parts import OutputPart, ReasoningPart, TextPart
from router.openai.parsers.tool_call_parser import partial_marker_length

THINK_START, THINK_END = "<think>", "</think>"


class ReasoningParser:
    """Splits thoughts from the answer. With ``inside``, the prompt has opened them already. White
    space around the tags belongs to them."""

    def __init__(self, *, inside: bool) -> None:
        self._held = ""
        self._pieces: list[OutputPart] = []
        self._begun = False
        self.inside = inside
        self._state: Callable[[], bool] = self._at_start

    def push(self, text: str) -> list[OutputPart]:
        self._held += text
        while self._state():
            pass
        return self._take()

    def flush(self) -> list[OutputPart]:
        """The text has ended."""
        held, self._held = self._held, ""
        if held.strip() and self.inside:
            self._pieces.append(ReasoningPart(held.strip() if not self._begun else held.rstrip()))
        elif held and not self.inside:
            self._pieces.append(TextPart(held))
        return self._take()

    # -- states: each reads from the beginning of what is held, and is False when it needs more ----

    def _at_start(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith(THINK_START):
            self._held, self.inside = rest.removeprefix(THINK_START), True
        elif THINK_START.startswith(rest):
            return False
        self._state = self._within if self.inside else self._beyond
        return True

    def _within(self) -> bool:
        if not self._begun:
            self._held = self._held.lstrip()
        before, found, rest = self._held.partition(THINK_END)
        kept = 0 if found else partial_marker_length(before, THINK_END)
        thought = before[: len(before) - kept].rstrip()
        if thought:
            self._begun = True
            self._pieces.append(ReasoningPart(thought))
        if found:
            self._held, self.inside, self._state = rest, False, self._gap
            return True
        self._held = before[len(thought) :]
        return False

    def _gap(self) -> bool:
        self._held = self._held.lstrip()
        self._state = self._beyond if self._held else self._gap
        return bool(self._held)

    def _beyond(self) -> bool:
        if self._held:
            self._pieces.append(TextPart(self._held))
            self._held = ""
        return False

    def _take(self) -> list[OutputPart]:
        pieces, self._pieces = self._pieces, []
        return pieces
