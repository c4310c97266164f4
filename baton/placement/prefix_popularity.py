"""Which prefixes are popular, and the block key by which a prompt is looked up on the hash ring.
The conductor uses it and, while no conductor answers, the router, so both have the same ring."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

WINDOW_REQUESTS = 1024
"""Number of recent requests over which popularity is counted."""

COUNTED_BLOCKS = 64
"""Number of leading blocks whose popularity is counted; later blocks are rarely shared by
unrelated requests."""

MIN_REQUESTS = 48
"""Fewer recent requests than this count as so many, since the first requests say little about the
share of the next ones."""


class PrefixPopularity:
    """Records the first :data:`COUNTED_BLOCKS` block keys of the last :data:`WINDOW_REQUESTS`
    requests, to tell which share of these requests contains a given key."""

    def __init__(self) -> None:
        self._window: deque[Sequence[Hashable]] = deque()
        self._counts: Counter[Hashable] = Counter()

    def record(self, keys: Sequence[Hashable]) -> None:
        head = keys[:COUNTED_BLOCKS]
        self._window.append(head)
        self._counts.update(head)
        if len(self._window) > WINDOW_REQUESTS:
            for key in self._window.popleft():
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]

    def request_share(self, key: Hashable) -> float:
        """Return the share of recent requests that contain this key, from 0 to 1; 0 if only one
        does."""
        count = self._counts[key]
        return count / max(len(self._window), MIN_REQUESTS) if count > 1 else 0.0


def first_unpopular_key(
    keys: Sequence[KeyT], request_share: Callable[[KeyT], float], num_workers: int
) -> KeyT | None:
    """Return the first block key of a prompt that only few requests share (at most a quarter of a
    worker's fair share), since in real traffic many requests have the same first blocks. None if
    there is no such key. ``request_share`` is that of :class:`PrefixPopularity`; ``num_workers`` is
    the number of workers that compute prompts."""
    limit = 1 / (4 * max(num_workers, 1))
    return next((key for key in keys if request_share(key) <= limit), None)
