"""Who goes when room is needed: one rule by name, the same in DRAM, on the SSD and in a replay.

Pure: keys in, keys out. Time is a number of requests. A block is *held* while somebody fills or
reads it, and evictable else. Callers release a request's blocks last to first, so that heads are
the most recent and a prefix is eaten from its end.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.core.ids import BlockKey
from baton.errors import Invalid

HEAD_START_REQUESTS = 600
"""What a doubling of a block's uses is worth. Found on a trace of conversations, where 300 to 600
do well from 1,000 to 30,000 blocks, and a head start in proportion to the capacity does not."""

MOST_DOUBLINGS = 4


class EvictionPolicy(Protocol):
    """Every method is O(1), or nearly. Unknown keys are the caller's bug."""

    def tick(self) -> None:
        """One more request."""
        ...

    def admit(self, key: BlockKey, depth: int) -> None:
        """A new block, ``depth`` blocks from its prefix's start, used once, held."""
        ...

    def use(self, key: BlockKey) -> None:
        """One more request uses it, held or not."""
        ...

    def hold(self, key: BlockKey) -> None:
        """Evictable → held."""
        ...

    def release(self, key: BlockKey) -> None:
        """Held → evictable, and the most recently used."""
        ...

    def forget(self, key: BlockKey) -> None:
        """Evicted, purged or damaged; held or not."""
        ...

    def victim(self) -> BlockKey | None:
        """Who goes next; None when everything is held. It stays until forgotten."""
        ...

    def __len__(self) -> int:
        """Evictable blocks."""
        ...


@dataclass(slots=True)
class _Block:
    """``lane`` is where it stands, or would if it were not held."""

    depth: int
    uses: int = 1
    last_used: int = 0
    lane: int = 0
    held: bool = True


Lane = Callable[[_Block], int]
Score = Callable[[int, int], int]
"""Of a lane's number and of when its oldest was last used: the least goes first."""


class LanePolicy:
    """Blocks stand in lanes, the oldest in front; who goes is one of those in front.

    ``lane_of`` says where a block belongs, ``score`` which lane's oldest goes. With a sorted set of
    lanes that is all there is to LRU (one lane), LFU (a lane per count of uses), and others.
    """

    def __init__(self, lane_of: Lane, score: Score) -> None:
        self._lane_of = lane_of
        self._score = score
        self._clock = 0
        self._blocks: dict[BlockKey, _Block] = {}
        self._lanes: dict[int, OrderedDict[BlockKey, None]] = {}
        self._num_evictable = 0

    def tick(self) -> None:
        self._clock += 1

    def admit(self, key: BlockKey, depth: int) -> None:
        assert key not in self._blocks, "admitted twice"
        self._blocks[key] = _Block(depth, last_used=self._clock)

    def use(self, key: BlockKey) -> None:
        block = self._blocks[key]
        block.uses += 1
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
        best: tuple[int, int] | None = None
        chosen: BlockKey | None = None
        for number, lane in self._lanes.items():
            oldest = next(iter(lane))
            rank = (self._score(number, self._blocks[oldest].last_used), number)
            if best is None or rank < best:
                best, chosen = rank, oldest
        return chosen

    def last_used(self, key: BlockKey) -> int:
        """The tick of its last release."""
        return self._blocks[key].last_used

    def __len__(self) -> int:
        return self._num_evictable

    def _enter(self, key: BlockKey, block: _Block) -> None:
        block.last_used = self._clock
        block.lane = self._lane_of(block)
        self._lanes.setdefault(block.lane, OrderedDict())[key] = None
        self._num_evictable += 1

    def _leave(self, key: BlockKey, block: _Block) -> None:
        lane = self._lanes[block.lane]
        del lane[key]
        if not lane:
            del self._lanes[block.lane]
        self._num_evictable -= 1


def _doublings(block: _Block) -> int:
    return min(block.uses.bit_length() - 1, MOST_DOUBLINGS)


def _baton() -> LanePolicy:
    """Least recently used, but each doubling of its uses is a head start: what many requests
    share outlives a burst of prompts that nobody sends again."""
    return LanePolicy(_doublings, lambda lane, last_used: last_used + lane * HEAD_START_REQUESTS)


def _lru() -> LanePolicy:
    """Least recently used."""
    return LanePolicy(lambda block: 0, lambda lane, last_used: last_used)


MOST_LANES = 1024
"""Of LFU and length-aware: beyond, uses or depths count as equal."""


def _lfu() -> LanePolicy:
    """Fewest uses, then least recently used."""
    return LanePolicy(lambda block: min(block.uses, MOST_LANES), lambda lane, last_used: lane)


def _length_aware() -> LanePolicy:
    """Deepest in its prefix, then least recently used: LengthAwareCache of the Mooncake paper
    (Qin et al., FAST '25)."""
    return LanePolicy(lambda block: min(block.depth, MOST_LANES), lambda lane, last_used: -lane)


_POLICIES: dict[str, Callable[[], LanePolicy]] = {
    "baton": _baton,
    "lru": _lru,
    "lfu": _lfu,
    "length_aware": _length_aware,
}
POLICIES = tuple(_POLICIES)


def new_policy(name: str) -> EvictionPolicy:
    """Raises Invalid for a name that is none."""
    if name not in _POLICIES:
        raise Invalid(
            f"there is no eviction policy {name!r}; there are {', '.join(POLICIES)}",
            param="store_eviction",
        )
    return _POLICIES[name]()
