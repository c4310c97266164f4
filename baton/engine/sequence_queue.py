"""A queue that sorts sequences by arrival, whatever the order in which they are added."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from baton.engine.sequence import Sequence

_arrival = attrgetter("arrival_index")
_priority = attrgetter("waiting_prompt.priority")


class SequenceQueue:
    """A list sorted by arrival. It has at most a few thousand elements, so inserting is cheap."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.arrival_index, key=_arrival)
        assert self._sequences[index] is sequence, f"{sequence.request_id} is not in the queue"
        del self._sequences[index]

    def latest_preemptable(self) -> Sequence | None:
        """Return the latest-arrived preemptable sequence of the lowest priority; None if no
        sequence is preemptable."""
        latest_first = (each for each in reversed(self._sequences) if each.is_preemptable)
        return max(latest_first, key=_priority, default=None)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)
