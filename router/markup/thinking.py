"""Reasoning before an answer: ``<think>…</think>``."""

from collections.abc import Callable

from router.markup.parser import open_end
from router.markup.pieces import Piece, Text, Thought

OPEN, CLOSE = "<think>", "</think>"


class Thinking:
    """Splits thoughts from the answer. With ``inside``, the prompt has opened them already. White
    space around the tags belongs to them."""

    def __init__(self, *, inside: bool) -> None:
        self._held = ""
        self._pieces: list[Piece] = []
        self._begun = False
        self.inside = inside
        self._state: Callable[[], bool] = self._at_start

    def push(self, text: str) -> list[Piece]:
        self._held += text
        while self._state():
            pass
        return self._take()

    def flush(self) -> list[Piece]:
        """The text has ended."""
        held, self._held = self._held, ""
        if held.strip() and self.inside:
            self._pieces.append(Thought(held.strip() if not self._begun else held.rstrip()))
        elif held and not self.inside:
            self._pieces.append(Text(held))
        return self._take()

    # -- states: each reads from the beginning of what is held, and is False when it needs more ----

    def _at_start(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith(OPEN):
            self._held, self.inside = rest.removeprefix(OPEN), True
        elif OPEN.startswith(rest):
            return False
        self._state = self._within if self.inside else self._beyond
        return True

    def _within(self) -> bool:
        if not self._begun:
            self._held = self._held.lstrip()
        before, found, rest = self._held.partition(CLOSE)
        kept = 0 if found else open_end(before, CLOSE)
        thought = before[: len(before) - kept].rstrip()
        if thought:
            self._begun = True
            self._pieces.append(Thought(thought))
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
            self._pieces.append(Text(self._held))
            self._held = ""
        return False

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces
