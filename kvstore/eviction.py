"""Who goes when room is needed: one rule by name, the same in DRAM, on the SSD and in a replay.

Pure: keys in, keys out. Time is a number of requests. A block is *held* while somebody fills or
reads it, and evictable else. Callers release a request's blocks last to first, so that heads are
the most recent and a prefix is eaten from its end.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.core.ids import BlockKey
from baton.errors import Invalid

BOOST_REQUESTS_PER_DOUBLING = 600
"""What a doubling of a block's uses is worth. Found on a trace of conversations, where 300 to 600
do well from 1,000 to 30,000 blocks, and a head start in proportion to the capacity does not."""

MAX_DOUBLINGS = 4


class EvictionPolicy(Protocol):
    """Who goes when room is needed. Every method is O(1) or O(log n). Unknown keys are the
    caller's bug."""

    def tick(self) -> None:
        """One more request: the policy's clock, by which recency and head starts count."""
        ...

    def admit(self, key: BlockKey, depth: int) -> None:
        """A new block, ``depth`` blocks from its prefix's start (0 = first), used once, held:
        not evictable until released."""
        ...

    def use(self, key: BlockKey) -> None:
        """One more request uses it, held or not. An evictable one becomes the most recently
        used."""
        ...

    def hold(self, key: BlockKey) -> None:
        """Evictable → held."""
        ...

    def release(self, key: BlockKey) -> None:
        """Held → evictable, and the most recently used."""
        ...

    def forget(self, key: BlockKey) -> None:
        """Evicted, purged or damaged; held or not. Its uses are forgotten, too."""
        ...

    def victim(self) -> BlockKey | None:
        """Who goes next; None when everything is held. It stays until forgotten."""
        ...

    def __len__(self) -> int:
        """Evictable blocks."""
        ...

    def last_used(self, key: BlockKey) -> int:
        """The tick at which it was last used or released; before that, admitted."""
        ...


@dataclass(slots=True)
class _Block:
    """``lane`` is where it stands, or would if it were not held."""

    depth: int
    uses: int = 1
    last_used: int = 0
    lane: int = 0
    held: bool = True


BucketOf = Callable[[_Block], int]

SPARE_BUCKETS = 16
"""Empty lanes that may stay beyond two per evictable block: they are swept many at once."""


class BucketPolicy:
    """Blocks stand in lanes, the oldest in front; the oldest of the lowest lane goes.

    ``lane_of`` says where a block belongs. That is all there is to LRU (one lane), LFU (a lane per
    count of uses), and others. The lanes' numbers are a heap; a lane that has become empty stays
    in it until it comes to the front or is swept.
    """

    def __init__(self, lane_of: BucketOf) -> None:
        self._lane_of = lane_of
        self._clock = 0
        self._blocks: dict[BlockKey, _Block] = {}
        self._lanes: dict[int, OrderedDict[BlockKey, None]] = {}
        self._numbers: list[int] = []  # a heap of the keys of _lanes
        self._num_evictable = 0

    def tick(self) -> None:
        self._clock += 1

    def admit(self, key: BlockKey, depth: int) -> None:
        assert key not in self._blocks, "admitted twice"
        self._blocks[key] = _Block(depth, last_used=self._clock)

    def use(self, key: BlockKey) -> None:
        block = self._blocks[key]
        block.uses += 1
        block.last_used = self._clock
        if not block.held:
            self._leave(key, block)
            self._enter(key, block)

    def hold(self, key: BlockKey) -> None:
        block = self._blocks[key]
        assert not block.held, "held twice"
        self._leave(key, block)
        block.held = True

    def release(self, key: BlockKey) -> None:
        block = self._blocks[key]
        assert block.held, "was not held"
        block.held = False
        self._enter(key, block)

    def forget(self, key: BlockKey) -> None:
        block = self._blocks.pop(key)
        if not block.held:
            self._leave(key, block)

    def victim(self) -> BlockKey | None:
        while self._numbers:
            lane = self._lanes[self._numbers[0]]
            if lane:
                return next(iter(lane))
            del self._lanes[heapq.heappop(self._numbers)]
        return None

    def last_used(self, key: BlockKey) -> int:
        return self._blocks[key].last_used

    def __len__(self) -> int:
        return self._num_evictable

    def check_integrity(self) -> None:
        """Raises AssertionError when the books don't balance."""
        standing = {key: number for number, lane in self._lanes.items() for key in lane}
        idle = {key: block.lane for key, block in self._blocks.items() if not block.held}
        assert standing == idle, "blocks and lanes differ"
        assert len(idle) == self._num_evictable == sum(map(len, self._lanes.values())), "count"
        assert sorted(self._numbers) == sorted(self._lanes), "heap and lanes differ"
        assert len(self._lanes) <= 2 * len(idle) + SPARE_BUCKETS, "empty lanes pile up"

    def _enter(self, key: BlockKey, block: _Block) -> None:
        block.last_used = self._clock
        block.lane = self._lane_of(block)
        if block.lane not in self._lanes:
            self._lanes[block.lane] = OrderedDict()
            heapq.heappush(self._numbers, block.lane)
        self._lanes[block.lane][key] = None
        self._num_evictable += 1

    def _leave(self, key: BlockKey, block: _Block) -> None:
        del self._lanes[block.lane][key]
        self._num_evictable -= 1
        if len(self._lanes) > 2 * self._num_evictable + SPARE_BUCKETS:
            self._sweep()

    def _sweep(self) -> None:
        """Drops the empty lanes. They are more than half, so each pays for O(1) of it."""
        self._lanes = {number: lane for number, lane in self._lanes.items() if lane}
        self._numbers = sorted(self._lanes)


def _doublings(block: _Block) -> int:
    return min(block.uses.bit_length() - 1, MAX_DOUBLINGS)


class FrequencyBoostedLru(BucketPolicy):
    """Least recently used, but each doubling of its uses is a head start: what many requests
    share outlives a burst of prompts that nobody sends again. A lane per doubling."""

    def __init__(self) -> None:
        super().__init__(_doublings)

    def victim(self) -> BlockKey | None:
        fronts = [(number, next(iter(lane))) for number, lane in self._lanes.items() if lane]
        return min(fronts, key=self._due)[1] if fronts else None

    def _due(self, front: tuple[int, BlockKey]) -> tuple[int, int]:
        number, key = front
        return self._blocks[key].last_used + number * BOOST_REQUESTS_PER_DOUBLING, number


def _lru() -> BucketPolicy:
    """Least recently used."""
    return BucketPolicy(lambda block: 0)


def _lfu() -> BucketPolicy:
    """Fewest uses, then least recently used."""
    return BucketPolicy(lambda block: block.uses)


def _length_aware() -> BucketPolicy:
    """Deepest in its prefix, then least recently used: LengthAwareCache of the Mooncake paper
    (Qin et al., FAST '25)."""
    return BucketPolicy(lambda block: -block.depth)


_POLICIES: dict[str, Callable[[], BucketPolicy]] = {
    "baton": FrequencyBoostedLru,
    "lru": _lru,
    "lfu": _lfu,
    "length_aware": _length_aware,
}
EVICTION_POLICIES = tuple(_POLICIES)


def new_eviction_policy(name: str) -> EvictionPolicy:
    """Raises Invalid for a name that is none."""
    if name not in _POLICIES:
        raise Invalid(
            f"there is no eviction policy {name!r}; there are {', '.join(EVICTION_POLICIES)}",
            param="store_eviction",
        )
    return _POLICIES[name]()
