"""Sequences in the order of their arrival, whatever order they joined in."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from baton.engine.sequence import Sequence

_arrival = attrgetter("arrival")
_priority = attrgetter("waiting.priority")


class SequenceQueue:
    """A list sorted by arrival. It holds at most some thousand, so shifting it is cheap."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.arrival, key=_arrival)
        assert self._sequences[index] is sequence, f"{sequence.request_id} is not in line"
        del self._sequences[index]

    def oldest(self, count: int) -> list[Sequence]:
        return list(islice(self._sequences, count))

    def latest_preemptable(self) -> Sequence | None:
        """Of the lowest priority that there is."""
        latest_first = (each for each in reversed(self._sequences) if each.preemptable)
        return max(latest_first, key=_priority, default=None)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)
