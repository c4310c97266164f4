"""Finds stop strings in streamed text."""

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Cuts a streamed text before the first stop string that is completed in it.

    Only text that may still become a stop string is held back. If the same character completes
    several stop strings, the text is cut before the longest of them. The result does not depend on
    how the text is split. There is one automaton per stop string (Knuth, Morris and Pratt, 1977),
    which takes O(1) amortised time per character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._automata = [_Automaton(stop) for stop in stops]
        self._pending = ""
        self.matched: str | None = None

    @property
    def has_stops(self) -> bool:
        """Whether there are any stop strings."""
        return bool(self._automata)

    def push(self, text: str) -> str:
        """Append ``text`` and return the text that may be shown now, which is empty after a
        match."""
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        pending = self._pending + text
        for position in range(len(self._pending), len(pending)):
            stop = self._step(pending[position])
            if stop is not None:
                self.matched, self._pending = stop, ""
                return pending[: position + 1 - len(stop)]
        num_held = max(automaton.num_matched for automaton in self._automata)
        split = len(pending) - num_held
        self._pending = pending[split:]
        return pending[:split]

    def flush(self) -> str:
        """Return the text that was held back. Call this once the stream has ended."""
        pending, self._pending = self._pending, ""
        return pending

    def _step(self, character: str) -> str | None:
        """Feed one character and return the longest stop string that it completes, if any."""
        completed: str | None = None
        for automaton in self._automata:
            if automaton.step(character) and len(automaton.stop) > len(completed or ""):
                completed = automaton.stop
        return completed


class _Automaton:
    """A KMP automaton. ``num_matched`` is the length of the longest prefix of ``stop`` that is a
    suffix of the text so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def step(self, character: str) -> bool:
        matched = self.num_matched
        while matched and self.stop[matched] != character:
            matched = self._borders[matched - 1]
        if self.stop[matched] == character:
            matched += 1
        self.num_matched = matched
        return matched == len(self.stop)


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
