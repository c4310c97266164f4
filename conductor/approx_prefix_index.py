"""The conductor's memory of the blocks of the requests that each worker was sent."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from baton.core.ids import WorkerId
from conductor.limits import MAX_EVICTED_PER_CALL, MAX_INDEXED_KEYS, MAX_INDEXED_PAIRS
from conductor.policy.snapshot import AnyBlockKey

DENSE_BLOCKS, SPARSE_STRIDE_BLOCKS = 64, 16
"""The first :data:`DENSE_BLOCKS` keys of a prompt are indexed, then every
:data:`SPARSE_STRIDE_BLOCKS`-th one: a long prompt takes a few hundred entries, and its cached
prefix is underestimated by less than one stride."""


class ApproxPrefixIndex:
    """Estimates which blocks each worker has cached, from the requests that the worker was sent.
    The index has at most :data:`MAX_INDEXED_KEYS` keys, no more than all workers together have
    blocks (:meth:`set_capacity`), and at most :data:`MAX_INDEXED_PAIRS` pairs of a key and a
    worker. The workers of one key are not limited: all of them may have the blocks of a system
    prompt, and one without these blocks would count as one that has no later block either.

    A worker gets a new incarnation number each time it is added, so that it can be removed in O(1),
    without searching all keys.
    """

    def __init__(self) -> None:
        self._incarnations_by_key: OrderedDict[AnyBlockKey, int | dict[int, None]] = OrderedDict()
        """For each key, the numbers of the incarnations that were sent requests with it. Most keys
        have one incarnation, which is stored without a dict to save about 200 bytes per key."""
        self._incarnation_of: dict[WorkerId, int] = {}
        self._worker_of: dict[int, WorkerId] = {}
        self._num_incarnations = 0
        self._max_keys = MAX_INDEXED_KEYS
        self._num_pairs = 0
        """Number of pairs of a key and an incarnation."""

    def set_capacity(self, num_blocks: int) -> None:
        """Set the total number of blocks of all workers; 0 if unknown."""
        self._max_keys = min(num_blocks or MAX_INDEXED_KEYS, MAX_INDEXED_KEYS)

    def record(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> None:
        life, depths = self._get_incarnation(worker), _indexed_depths(len(keys))
        # The start of a prefix is added last, so that its end is dropped first.
        for depth in reversed(depths):
            self._add_incarnation(keys[depth - 1], life)
        self._evict(max(MAX_EVICTED_PER_CALL, 2 * len(depths)))

    def remove_worker(self, worker: WorkerId) -> None:
        """Remove a worker that has left or restarted. An unknown worker is ignored."""
        life = self._incarnation_of.pop(worker, None)
        if life is not None:
            del self._worker_of[life]

    def num_cached_blocks(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> int:
        """Return how many leading blocks were in requests to the worker, rounded down to an indexed
        prefix length. Assumes that a worker that was sent a block was also sent all blocks before
        it."""
        life = self._incarnation_of.get(worker)
        if life is None:
            return 0
        return _deepest_indexed(keys, lambda key: life in self._incarnations_with(key))

    def workers_with_prefix(self, keys: Sequence[AnyBlockKey], count: int) -> list[WorkerId]:
        """Return up to ``count`` workers that were sent requests with a prefix of ``keys``, in
        descending order of the prefix's length. The cost does not depend on the number of
        workers."""
        found: dict[WorkerId, None] = {}
        depth = self._deepest_shared_by(keys, 0)
        while depth and len(found) < count:
            lives = self._incarnations_with(keys[depth - 1])
            here = (self._worker_of[life] for life in lives if life in self._worker_of)
            newcomers = (worker for worker in here if worker not in found)
            found |= dict.fromkeys(islice(newcomers, count - len(found)))
            depth = self._deepest_shared_by(keys[:depth], len(lives))
        return list(found)

    def _deepest_shared_by(self, keys: Sequence[AnyBlockKey], num_lives: int) -> int:
        """Return the length, in blocks, of the longest prefix of the prompt that was sent to more
        than ``num_lives`` incarnations of workers."""
        return _deepest_indexed(keys, lambda key: len(self._incarnations_with(key)) > num_lives)

    def _incarnations_with(self, key: AnyBlockKey) -> Collection[int]:
        """Return the incarnations that were sent requests with this key, in the order of their
        first such request. Some of them may have been removed since."""
        lives = self._incarnations_by_key.get(key, ())
        return (lives,) if isinstance(lives, int) else lives

    def _get_incarnation(self, worker: WorkerId) -> int:
        if worker not in self._incarnation_of:
            self._num_incarnations += 1
            self._incarnation_of[worker] = self._num_incarnations
            self._worker_of[self._num_incarnations] = worker
        return self._incarnation_of[worker]

    def _add_incarnation(self, key: AnyBlockKey, life: int) -> None:
        """Add an incarnation to those of a key, which becomes the most recently sent key. Removed
        incarnations are dropped once they are the majority: a key that is sent for months, such as
        that of a system prompt, would otherwise collect every worker that there ever was."""
        lives = self._incarnations_by_key.pop(key, None)
        if lives is None:
            lives = life
            self._num_pairs += 1
        elif isinstance(lives, dict):
            num_before = len(lives)
            lives[life] = None
            if len(lives) > 2 * len(self._worker_of):
                lives = {each: None for each in lives if each in self._worker_of}
            self._num_pairs += len(lives) - num_before
        elif lives != life:
            lives = {lives: None, life: None}
            self._num_pairs += 1
        self._incarnations_by_key[key] = lives

    def _evict(self, max_keys: int) -> None:
        """Drop the least recently sent keys, at most ``max_keys`` of them, until the index is
        within its bounds."""
        for _ in range(max_keys):
            is_full = self._num_pairs > MAX_INDEXED_PAIRS
            if not is_full and len(self._incarnations_by_key) <= self._max_keys:
                return
            _, lives = self._incarnations_by_key.popitem(last=False)
            self._num_pairs -= 1 if isinstance(lives, int) else len(lives)


def _indexed_depths(num_keys: int) -> Sequence[int]:
    """Return the prefix lengths, in blocks, whose keys are indexed."""
    return (
        *range(1, min(num_keys, DENSE_BLOCKS) + 1),
        *range(DENSE_BLOCKS + SPARSE_STRIDE_BLOCKS, num_keys + 1, SPARSE_STRIDE_BLOCKS),
    )


def _deepest_indexed(keys: Sequence[AnyBlockKey], holds: Callable[[AnyBlockKey], bool]) -> int:
    """Return the longest indexed prefix length, in blocks, whose key satisfies ``holds``; 0 if none
    does. Assumes that the keys of all shorter prefixes satisfy it too."""
    depths = _indexed_depths(len(keys))[::-1]
    deepest = bisect_left(depths, True, key=lambda depth: holds(keys[depth - 1]))
    return depths[deepest] if deepest < len(depths) else 0
