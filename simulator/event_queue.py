"""The queue of future events in virtual time."""

import heapq
from collections.abc import Callable
from itertools import count


class EventQueue:
    """Runs callbacks in the order of their times; callbacks with the same time run in the order in
    which they were scheduled."""

    def __init__(self) -> None:
        self.now_seconds = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._stopped = False

    def schedule(self, seconds: float, callback: Callable[[], None]) -> None:
        at = seconds if seconds > self.now_seconds else self.now_seconds
        heapq.heappush(self._heap, (at, next(self._numbers), callback))

    def run(self, after_each: Callable[[], None] | None = None) -> None:
        """Run callbacks until none is left, or :meth:`stop` is called. Call ``after_each``, if
        given, after every callback."""
        heap = self._heap
        while heap and not self._stopped:
            self.now_seconds, _, happen = heapq.heappop(heap)
            happen()
            if after_each is not None:
                after_each()

    def stop(self) -> None:
        """Make :meth:`run` return after the current callback."""
        self._stopped = True
