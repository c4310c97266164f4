"""What the conductor remembers of recent traffic: heads that many share, and who got what."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from baton.core.ids import WorkerId
from conductor.policy.snapshot import AnyBlockKey

WINDOW_REQUESTS = 1024
COUNTED_BLOCKS = 64
"""Depth to which shared heads are counted; beyond, hardly any two requests agree by chance."""

DENSE_BLOCKS, SPARSE_STRIDE_BLOCKS = 64, 16
"""Of a chain every key is remembered as far as this, and beyond every so many-th: a long prompt
costs a few hundred entries, and what is believed of it is at most a stride too little."""

MAX_INDEXED_KEYS = 262_144
"""About 40 MB; the least recently placed are forgotten."""

MAX_EVICTED_PER_CALL = 1024
"""At once, so that no decision waits long when a pool has become smaller."""


class PrefixPopularity:
    """Shares of the chain keys near the start of the last requests."""

    def __init__(self) -> None:
        self._window: deque[Sequence[AnyBlockKey]] = deque()
        self._counts: Counter[AnyBlockKey] = Counter()

    def record(self, keys: Sequence[AnyBlockKey]) -> None:
        head = keys[:COUNTED_BLOCKS]
        self._window.append(head)
        self._counts.update(head)
        if len(self._window) > WINDOW_REQUESTS:
            for key in self._window.popleft():
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]

    def share(self, key: AnyBlockKey) -> float:
        """0 for a key that few requests can have told anything about."""
        if len(self._window) < 16:
            return 0.0
        return self._counts[key] / len(self._window)


class ApproxPrefixIndex:
    """Which workers were sent which blocks: the best guess of what lies in their pools, and of no
    more keys than those have blocks (``bound``).

    A worker's life has a number of its own here, so that a death is forgotten at once, and not by
    looking through all keys."""

    def __init__(self) -> None:
        self._lives: OrderedDict[AnyBlockKey, int | dict[int, None]] = OrderedDict()
        """Most keys have one: several hundred thousand dicts would be as many times 200 bytes."""
        self._life_of: dict[WorkerId, int] = {}
        self._worker_of: dict[int, WorkerId] = {}
        self._num_lives = 0
        self._most_keys = MAX_INDEXED_KEYS

    def bound(self, num_blocks: int) -> None:
        """Of all pools together; 0: nobody knows."""
        self._most_keys = min(num_blocks or MAX_INDEXED_KEYS, MAX_INDEXED_KEYS)

    def record(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> None:
        life = self._life(worker)
        # The start of a prefix is placed last, so that its end is forgotten first.
        for depth in reversed(_indexed_depths(len(keys))):
            key = keys[depth - 1]
            self._lives[key] = _joined(self._lives.pop(key, life), life)
        for _ in range(min(len(self._lives) - self._most_keys, MAX_EVICTED_PER_CALL)):
            self._lives.popitem(last=False)

    def forget(self, worker: WorkerId) -> None:
        """It is gone, and its pool with it."""
        life = self._life_of.pop(worker, None)
        if life is not None:
            del self._worker_of[life]

    def cached_blocks(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> int:
        """Leading blocks that were sent there, by bisection: a prefix has all its heads."""
        life = self._life_of.get(worker)
        if life is None:
            return 0
        return _leading(keys, lambda key: life in self._lives_of(key))

    def holders(self, keys: Sequence[AnyBlockKey], count: int) -> list[WorkerId]:
        """Workers that were sent most of the leading blocks, best first: those of the deepest key
        known, then of the deepest that yet another was sent. Looks at few of them, however many
        there are."""
        found: dict[WorkerId, None] = {}
        depth = self._deepest(keys, 0)
        while depth and len(found) < count:
            lives = self._lives_of(keys[depth - 1])
            here = (self._worker_of[life] for life in lives if life in self._worker_of)
            newcomers = (worker for worker in here if worker not in found)
            found |= dict.fromkeys(islice(newcomers, count - len(found)))
            depth = self._deepest(keys[:depth], len(lives))
        return list(found)

    def _deepest(self, keys: Sequence[AnyBlockKey], num_lives: int) -> int:
        """How many leading blocks were sent to more than so many."""
        return _leading(keys, lambda key: len(self._lives_of(key)) > num_lives)

    def _lives_of(self, key: AnyBlockKey) -> Collection[int]:
        """In the order in which they were first sent it; some may have ended."""
        lives = self._lives.get(key, ())
        return (lives,) if isinstance(lives, int) else lives

    def _life(self, worker: WorkerId) -> int:
        if worker not in self._life_of:
            self._num_lives += 1
            self._life_of[worker] = self._num_lives
            self._worker_of[self._num_lives] = worker
        return self._life_of[worker]


def _joined(lives: int | dict[int, None], life: int) -> int | dict[int, None]:
    if lives == life:
        return lives
    if isinstance(lives, int):
        return {lives: None, life: None}
    lives[life] = None
    return lives


def _indexed_depths(num_keys: int) -> Sequence[int]:
    """Depths whose keys are remembered."""
    return (
        *range(1, min(num_keys, DENSE_BLOCKS) + 1),
        *range(DENSE_BLOCKS + SPARSE_STRIDE_BLOCKS, num_keys + 1, SPARSE_STRIDE_BLOCKS),
    )


def _leading(keys: Sequence[AnyBlockKey], holds: Callable[[AnyBlockKey], bool]) -> int:
    """The deepest landmark that holds, if none does whose head does not."""
    depths = _indexed_depths(len(keys))
    low, high = 0, len(depths)
    while low < high:
        middle = (low + high + 1) // 2
        if holds(keys[depths[middle - 1] - 1]):
            low = middle
        else:
            high = middle - 1
    return depths[low - 1] if low else 0
