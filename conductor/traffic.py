"""What the conductor remembers of recent traffic: heads that many share, and who got what."""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from baton.core.ids import BlockKey, WorkerId
from conductor.policy.fleet import Key

WINDOW_REQUESTS = 1024
HEAD_BLOCKS = 64
"""Depth to which shared heads are counted; beyond, hardly any two requests agree by chance."""

MAX_PLACED_KEYS = 262_144
"""About 40 MB; the least recently placed are forgotten."""


class Heads:
    """Shares of the chain keys near the start of the last requests."""

    def __init__(self) -> None:
        self._window: deque[Sequence[Key]] = deque()
        self._counts: Counter[Key] = Counter()

    def record(self, keys: Sequence[Key]) -> None:
        head = keys[:HEAD_BLOCKS]
        self._window.append(head)
        self._counts.update(head)
        if len(self._window) > WINDOW_REQUESTS:
            for key in self._window.popleft():
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]

    def share(self, key: Key) -> float:
        """0 for a key that few requests can have told anything about."""
        if len(self._window) < 16:
            return 0.0
        return self._counts[key] / len(self._window)


class Placed:
    """Which workers were sent which blocks: the best guess of what lies in their pools."""

    def __init__(self) -> None:
        self._workers: OrderedDict[BlockKey, set[WorkerId]] = OrderedDict()

    def record(self, worker: WorkerId, keys: tuple[BlockKey, ...]) -> None:
        # The start of a prefix is placed last, so that its end is forgotten first.
        for key in reversed(keys):
            workers = self._workers.pop(key, None) or set()
            workers.add(worker)
            self._workers[key] = workers
        while len(self._workers) > MAX_PLACED_KEYS:
            self._workers.popitem(last=False)

    def forget(self, worker: WorkerId) -> None:
        """It was reborn, with an empty pool."""
        for workers in self._workers.values():
            workers.discard(worker)

    def cached_blocks(self, worker: WorkerId, keys: tuple[BlockKey, ...]) -> int:
        """Leading blocks that were sent there, by bisection: a prefix has all its heads."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if worker in self._workers.get(keys[middle - 1], ()):
                low = middle
            else:
                high = middle - 1
        return low
