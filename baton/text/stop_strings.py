"""Finds stop strings in streamed text."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

MAX_CACHED_STEPS = 1024
"""Maximum number of steps that the automaton of some stop strings remembers; beyond it, all are
forgotten. With 64 stop strings, a step takes up to 700 bytes."""

MAX_CACHED_AUTOMATA = 32
"""Maximum number of automata that are remembered: one for each list of stop strings. All answers to
a request have the same."""


class StopStrings:
    """Cuts a streamed text before the first stop string that is completed in it.

    Only text that may still become a stop string is held back. If the same character completes
    several stop strings, the text is cut before the longest of them. The result does not depend on
    how the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._automaton = _automaton(tuple(stops)) if stops else None
        self._matched_lengths: _State = (0,) * len(stops)
        self._pending = ""
        self.matched: str | None = None

    @property
    def has_stops(self) -> bool:
        """Whether there are any stop strings."""
        return self._automaton is not None

    def push(self, text: str) -> str:
        """Append ``text`` and return the text that may be shown now, which is empty after a
        match."""
        if self.matched is not None:
            return ""
        if self._automaton is None:
            return text
        pending = self._pending + text
        for position in range(len(self._pending), len(pending)):
            step = self._automaton.step(self._matched_lengths, pending[position])
            self._matched_lengths = step.state
            if step.completed is not None:
                self.matched, self._pending = step.completed, ""
                return pending[: position + 1 - len(step.completed)]
        split = len(pending) - max(self._matched_lengths)
        self._pending = pending[split:]
        return pending[:split]

    def flush(self) -> str:
        """Return the text that was held back. Call this once the stream has ended."""
        pending, self._pending = self._pending, ""
        return pending


_State = tuple[int, ...]
"""For each stop string the length of its longest prefix that is a suffix of the text so far."""


class _Step(NamedTuple):
    """The state after a character, and the longest stop string that the character completes."""

    state: _State
    completed: str | None


class _Automaton:
    """Knuth, Morris and Pratt's automata (1977) of all stop strings. It remembers the steps that it
    has made, so that most characters of all texts cost one lookup, however many stop strings there
    are."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._steps: dict[tuple[_State, str], _Step] = {}

    def step(self, state: _State, character: str) -> _Step:
        step = self._steps.get((state, character))
        if step is None:
            if len(self._steps) == MAX_CACHED_STEPS:
                self._steps.clear()
            step = self._steps[state, character] = self._compute_step(state, character)
        return step

    def _compute_step(self, state: _State, character: str) -> _Step:
        lengths: list[int] = []
        completed: str | None = None
        for stop, borders, length in zip(self._stops, self._borders, state, strict=True):
            while length and stop[length] != character:
                length = borders[length - 1]
            if stop[length] == character:
                length += 1
            lengths.append(length)
            if length == len(stop) and length > len(completed or ""):
                completed = stop
        return _Step(tuple(lengths), completed)


@lru_cache(maxsize=MAX_CACHED_AUTOMATA)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)


@lru_cache(maxsize=1024)
def _borders(stop: str) -> Sequence[int]:
    """Return for each prefix the length of its longest proper suffix that is also its prefix."""
    borders = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[length] != stop[position]:
            length = borders[length - 1]
        if stop[length] == stop[position]:
            length += 1
        borders[position] = length
    return borders
