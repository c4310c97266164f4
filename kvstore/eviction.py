"""Eviction policies by name. The DRAM tier, the SSD tier and trace replays use the same policies.

Policies do no I/O and read no clock: they only see keys, and they measure time in requests. A block
is *in use* while it is being written or read, and evictable otherwise. Callers release a request's
blocks from the last to the first, so that the first blocks are the most recently used and a prefix
is evicted from its end.
"""

from collections import OrderedDict
from dataclasses import dataclass

from baton.core.ids import BlockKey
from baton.errors import Invalid

BOOST_REQUESTS_PER_DOUBLING = 600
"""With each doubling of its use count, a block is ranked as if it had been used this many requests
later. The value was tuned on a trace of conversations: 300 to 600 work well for 1,000 to 30,000
blocks; a boost proportional to the capacity does not."""

_MAX_DOUBLINGS = {"baton": 4, "lru": 0}
EVICTION_POLICIES = tuple(_MAX_DOUBLINGS)


@dataclass(slots=True)
class _Block:
    """A block's state in the policy. ``bucket`` is the number of the bucket that contains the block
    or, while the block is in use, of the last bucket that contained it."""

    uses: int = 1
    last_used: int = 0
    bucket: int = 0
    in_use: bool = True


class EvictionPolicy:
    """Decides which block is evicted next: the least recently used one, after a boost for each
    doubling of its use count, so that blocks shared by many requests survive a burst of prompts
    that are never sent again. At most ``max_doublings`` count; with 0, this is LRU.

    Evictable blocks are in one bucket per doubling, ordered by last use. Every method takes O(1)
    time. Passing an unknown key is a bug in the caller."""

    def __init__(self, max_doublings: int) -> None:
        self._clock = 0
        self._blocks: dict[BlockKey, _Block] = {}
        self._buckets = [OrderedDict[BlockKey, None]() for _ in range(max_doublings + 1)]

    def tick(self) -> None:
        """Advance the policy's clock, which counts requests."""
        self._clock += 1

    def admit(self, key: BlockKey) -> None:
        """Add a new block with one use. The block is in use, so it is not evictable until
        :meth:`mark_evictable` is called."""
        assert key not in self._blocks, "admitted twice"
        self._blocks[key] = _Block(last_used=self._clock)

    def record_use(self, key: BlockKey) -> None:
        """Count one more request that uses the block. An evictable block becomes the most recently
        used one."""
        block = self._blocks[key]
        block.uses += 1
        block.last_used = self._clock
        if not block.in_use:
            del self._buckets[block.bucket][key]
            self._add_to_bucket(key, block)

    def mark_in_use(self, key: BlockKey) -> None:
        """Mark an evictable block as in use."""
        block = self._blocks[key]
        assert not block.in_use, "already in use"
        del self._buckets[block.bucket][key]
        block.in_use = True

    def mark_evictable(self, key: BlockKey) -> None:
        """Mark a block that is in use as evictable; it is then the most recently used block."""
        block = self._blocks[key]
        assert block.in_use, "was not in use"
        block.in_use = False
        self._add_to_bucket(key, block)

    def remove(self, key: BlockKey) -> None:
        """Remove a block and its use count, whether the block is in use or not."""
        block = self._blocks.pop(key)
        if not block.in_use:
            del self._buckets[block.bucket][key]

    def next_victim(self) -> BlockKey | None:
        """Return the block to evict next, without removing it; None if every block is in use."""
        oldest = [(number, next(iter(keys))) for number, keys in enumerate(self._buckets) if keys]
        return min(oldest, key=self._eviction_rank)[1] if oldest else None

    def last_used(self, key: BlockKey) -> int:
        """Return the tick at which the block was last admitted, used or marked as evictable,
        whichever came last."""
        return self._blocks[key].last_used

    def __len__(self) -> int:
        """Return the number of evictable blocks."""
        return sum(map(len, self._buckets))

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks and buckets are inconsistent."""
        in_buckets = {key: number for number, keys in enumerate(self._buckets) for key in keys}
        idle = {key: block.bucket for key, block in self._blocks.items() if not block.in_use}
        assert in_buckets == idle, "blocks and buckets differ"

    def _add_to_bucket(self, key: BlockKey, block: _Block) -> None:
        block.last_used = self._clock
        block.bucket = min(block.uses.bit_length(), len(self._buckets)) - 1
        self._buckets[block.bucket][key] = None

    def _eviction_rank(self, candidate: tuple[int, BlockKey]) -> tuple[int, int]:
        number, key = candidate
        return self._blocks[key].last_used + number * BOOST_REQUESTS_PER_DOUBLING, number


def new_eviction_policy(name: str) -> EvictionPolicy:
    """Create a policy by name. Raises Invalid for an unknown name."""
    if name not in _MAX_DOUBLINGS:
        raise Invalid(
            f"the eviction policy is {name!r}; it must be one of {', '.join(EVICTION_POLICIES)}",
            param="store_eviction",
        )
    return EvictionPolicy(_MAX_DOUBLINGS[name])
