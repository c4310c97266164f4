"""Virtual time: what happens next."""

import heapq
from collections.abc import Callable
from itertools import count


class EventQueue:
    """Callbacks in the order of their time; of one time, in the order they were made."""

    def __init__(self) -> None:
        self.now_seconds = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._stopped = False

    def at(self, seconds: float, happen: Callable[[], None]) -> None:
        at = seconds if seconds > self.now_seconds else self.now_seconds
        heapq.heappush(self._heap, (at, next(self._numbers), happen))

    def run(self, after_each: Callable[[], None] | None = None) -> None:
        """Until nothing is left, or :meth:`stop`."""
        heap = self._heap
        while heap and not self._stopped:
            self.now_seconds, _, happen = heapq.heappop(heap)
            happen()
            if after_each is not None:
                after_each()

    def stop(self) -> None:
        """What happens now is the last."""
        self._stopped = True
