"""Eviction policies by name. The DRAM tier, the SSD tier and trace replays use the same policies.

Policies do no I/O and read no clock: they only see keys, and they measure time in requests. A block
is *in use* while it is being written or read, and evictable otherwise. Callers release a request's
blocks from the last to the first, so that the first blocks are the most recently used and a prefix
is evicted from its end.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.core.ids import BlockKey
from baton.errors import Invalid

BOOST_REQUESTS_PER_DOUBLING = 600
"""With each doubling of its use count, a block is ranked as if it had been used this many requests
later. The value was tuned on a trace of conversations: 300 to 600 work well for 1,000 to 30,000
blocks; a boost proportional to the capacity does not."""

MAX_DOUBLINGS = 4


class EvictionPolicy(Protocol):
    """Decides which block is evicted next. Every method takes O(1) or O(log n) time. Passing an
    unknown key is a bug in the caller."""

    def tick(self) -> None:
        """Advance the policy's clock, which counts requests."""
        ...

    def admit(self, key: BlockKey, depth: int) -> None:
        """Add a new block with one use. ``depth`` is the number of blocks before it in its prefix.
        The block is in use, so it is not evictable until :meth:`mark_evictable` is called."""
        ...

    def record_use(self, key: BlockKey) -> None:
        """Count one more request that uses the block. An evictable block becomes the most recently
        used one."""
        ...

    def mark_in_use(self, key: BlockKey) -> None:
        """Mark an evictable block as in use."""
        ...

    def mark_evictable(self, key: BlockKey) -> None:
        """Mark a block that is in use as evictable; it is then the most recently used block."""
        ...

    def remove(self, key: BlockKey) -> None:
        """Remove a block and its use count, whether the block is in use or not."""
        ...

    def next_victim(self) -> BlockKey | None:
        """Return the block to evict next, without removing it; None if every block is in use."""
        ...

    def __len__(self) -> int:
        """Return the number of evictable blocks."""
        ...

    def last_used(self, key: BlockKey) -> int:
        """Return the tick at which the block was last admitted, used or marked as evictable,
        whichever came last."""
        ...


@dataclass(slots=True)
class _Block:
    """A block's state in the policy. ``bucket`` is the number of the bucket that contains the block
    or, while the block is in use, of the last bucket that contained it."""

    depth: int
    uses: int = 1
    last_used: int = 0
    bucket: int = 0
    in_use: bool = True


BucketOf = Callable[[_Block], int]

SPARE_BUCKETS = 16
"""Empty buckets are removed once there are more than two buckets per evictable block plus this
many."""


class BucketPolicy:
    """Keeps evictable blocks in numbered buckets, ordered by last use. The least recently used
    block of the lowest bucket is evicted next.

    ``bucket_of`` returns the bucket of a block. LRU uses one bucket, and LFU uses one bucket per
    use count. The bucket numbers are kept in a heap. An empty bucket stays in the heap until it
    comes to the front or all empty buckets are removed.
    """

    def __init__(self, bucket_of: BucketOf) -> None:
        self._bucket_of = bucket_of
        self._clock = 0
        self._blocks: dict[BlockKey, _Block] = {}
        self._buckets: dict[int, OrderedDict[BlockKey, None]] = {}
        self._bucket_heap: list[int] = []  # the keys of _buckets
        self._num_evictable = 0

    def tick(self) -> None:
        self._clock += 1

    def admit(self, key: BlockKey, depth: int) -> None:
        assert key not in self._blocks, "admitted twice"
        self._blocks[key] = _Block(depth, last_used=self._clock)

    def record_use(self, key: BlockKey) -> None:
        block = self._blocks[key]
        block.uses += 1
        block.last_used = self._clock
        if not block.in_use:
            self._remove_from_bucket(key, block)
            self._add_to_bucket(key, block)

    def mark_in_use(self, key: BlockKey) -> None:
        block = self._blocks[key]
        assert not block.in_use, "already in use"
        self._remove_from_bucket(key, block)
        block.in_use = True

    def mark_evictable(self, key: BlockKey) -> None:
        block = self._blocks[key]
        assert block.in_use, "was not in use"
        block.in_use = False
        self._add_to_bucket(key, block)

    def remove(self, key: BlockKey) -> None:
        block = self._blocks.pop(key)
        if not block.in_use:
            self._remove_from_bucket(key, block)

    def next_victim(self) -> BlockKey | None:
        while self._bucket_heap:
            bucket = self._buckets[self._bucket_heap[0]]
            if bucket:
                return next(iter(bucket))
            del self._buckets[heapq.heappop(self._bucket_heap)]
        return None

    def last_used(self, key: BlockKey) -> int:
        return self._blocks[key].last_used

    def __len__(self) -> int:
        return self._num_evictable

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks and buckets are inconsistent."""
        in_buckets = {key: number for number, keys in self._buckets.items() for key in keys}
        idle = {key: block.bucket for key, block in self._blocks.items() if not block.in_use}
        assert in_buckets == idle, "blocks and buckets differ"
        assert len(idle) == self._num_evictable == sum(map(len, self._buckets.values())), "count"
        assert sorted(self._bucket_heap) == sorted(self._buckets), "heap and buckets differ"
        assert len(self._buckets) <= 2 * len(idle) + SPARE_BUCKETS, "too many empty buckets"

    def _add_to_bucket(self, key: BlockKey, block: _Block) -> None:
        block.last_used = self._clock
        block.bucket = self._bucket_of(block)
        if block.bucket not in self._buckets:
            self._buckets[block.bucket] = OrderedDict()
            heapq.heappush(self._bucket_heap, block.bucket)
        self._buckets[block.bucket][key] = None
        self._num_evictable += 1

    def _remove_from_bucket(self, key: BlockKey, block: _Block) -> None:
        del self._buckets[block.bucket][key]
        self._num_evictable -= 1
        if len(self._buckets) > 2 * self._num_evictable + SPARE_BUCKETS:
            self._remove_empty_buckets()

    def _remove_empty_buckets(self) -> None:
        """Remove the empty buckets. More than half of all buckets are empty then, so the cost is
        amortized O(1)."""
        self._buckets = {number: keys for number, keys in self._buckets.items() if keys}
        self._bucket_heap = sorted(self._buckets)


def _doublings(block: _Block) -> int:
    return min(block.uses.bit_length() - 1, MAX_DOUBLINGS)


class FrequencyBoostedLru(BucketPolicy):
    """LRU with a boost for each doubling of a block's use count, so that blocks shared by many
    requests survive a burst of prompts that are never sent again. There is one bucket per
    doubling."""

    def __init__(self) -> None:
        super().__init__(_doublings)

    def next_victim(self) -> BlockKey | None:
        oldest = [(number, next(iter(keys))) for number, keys in self._buckets.items() if keys]
        return min(oldest, key=self._eviction_rank)[1] if oldest else None

    def _eviction_rank(self, candidate: tuple[int, BlockKey]) -> tuple[int, int]:
        number, key = candidate
        return self._blocks[key].last_used + number * BOOST_REQUESTS_PER_DOUBLING, number


def _lru() -> BucketPolicy:
    """Return a policy that evicts the least recently used block."""
    return BucketPolicy(lambda block: 0)


def _lfu() -> BucketPolicy:
    """Return a policy that evicts the block with the fewest uses; of several such blocks, the least
    recently used one."""
    return BucketPolicy(lambda block: block.uses)


def _length_aware() -> BucketPolicy:
    """Return a policy that evicts the block deepest in its prefix; of several such blocks, the
    least recently used one. This is LengthAwareCache of the Mooncake paper (Qin et al., FAST
    '25)."""
    return BucketPolicy(lambda block: -block.depth)


_POLICIES: dict[str, Callable[[], BucketPolicy]] = {
    "baton": FrequencyBoostedLru,
    "lru": _lru,
    "lfu": _lfu,
    "length_aware": _length_aware,
}
EVICTION_POLICIES = tuple(_POLICIES)


def new_eviction_policy(name: str) -> EvictionPolicy:
    """Create a policy by name. Raises Invalid for an unknown name."""
    if name not in _POLICIES:
        raise Invalid(
            f"the eviction policy is {name!r}; it must be one of {', '.join(EVICTION_POLICIES)}",
            param="store_eviction",
        )
    return _POLICIES[name]()
