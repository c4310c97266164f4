"""The allocator of KV blocks: block states, reference counts and the prefix cache.

It does not touch the memory of the blocks: to the allocator, a block is just a number. Every
operation is O(1) per block.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from baton.core.ids import BlockId, BlockKey
from baton.engine.block_state import BLOCK_TRANSITIONS, SEALED, SYMBOLS, BlockState
from baton.engine.kv_window import NO_BLOCK, KvWindow

_COLUMNS = 64
_MAX_LINES = 64


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Number of blocks in each state; the numbers add up to ``num_blocks``."""

    num_blocks: int
    free: int
    filling: int
    idle: int
    referenced: int
    quarantined: int


class BlockPool:
    """A pool of blocks with the ids 0 to ``num_blocks`` - 1, all FREE at first.

    An owner gets blocks from :meth:`allocate` (FILLING, one reference) or from :meth:`find_cached`
    and :meth:`reference` (SEALED, shared), and drops each reference with :meth:`release`. A sealed
    block without references stays IDLE, and can be found by its key until it is evicted; the least
    recently released block is evicted first. A block table is released from its tail, so that the
    last block of a cached prefix is evicted before the blocks that precede it.

    Two owners may compute a block with the same key. Both seal their block, but only the one that
    was sealed first is found by the key. The other is a duplicate: its owner can use it, but nobody
    can find it. When it is released, it becomes FREE or, if the first block was evicted in the
    meantime, takes the first block's place in the cache.

    ``window`` is the window of requests that have none of their own. With one, a cached prefix need
    not have the blocks that no later token reads. Block tables have NO_BLOCK in their places, which
    is skipped wherever blocks are given to the pool. Keys and block tables are in the order of
    :class:`baton.engine.kv_window.KvWindow`, and a prefix ends with the last group of a span.
    """

    def __init__(self, num_blocks: int, window: KvWindow | None = None) -> None:
        assert num_blocks > 0, num_blocks
        self._window = window
        self._states = [BlockState.FREE] * num_blocks
        self._references = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._blocks_by_key: dict[BlockKey, BlockId] = {}
        self._free = deque(BlockId(index) for index in range(num_blocks))
        self._idle: OrderedDict[BlockId, None] = OrderedDict()
        self._counts = dict.fromkeys(BlockState, 0)
        self._counts[BlockState.FREE] = num_blocks

    # Queries

    @property
    def num_blocks(self) -> int:
        return len(self._states)

    @property
    def num_allocatable(self) -> int:
        """Number of blocks that can be allocated: all FREE blocks, and all IDLE blocks, which are
        evicted if they are needed."""
        return len(self._free) + len(self._idle)

    @property
    def counts(self) -> BlockCounts:
        return BlockCounts(
            self.num_blocks,
            free=self._counts[BlockState.FREE],
            filling=self._counts[BlockState.FILLING],
            idle=self._counts[BlockState.IDLE],
            referenced=self._counts[BlockState.REFERENCED],
            quarantined=self._counts[BlockState.QUARANTINED],
        )

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_allocatable

    def can_extend(self, cached: Collection[BlockId], num_blocks: int) -> bool:
        """Whether ``num_blocks`` blocks can be allocated without evicting the blocks ``cached``.
        The caller has found these with :meth:`find_cached` and will reference them first."""
        num_idle = sum(block_id in self._idle for block_id in cached)
        return num_blocks <= self.num_allocatable - num_idle

    def find_cached(
        self, keys: Sequence[BlockKey], limit: int | None = None, window: KvWindow | None = None
    ) -> list[BlockId]:
        """Return the blocks of the longest cached prefix of ``keys[:limit]``. Without a ``window``,
        the pool's is used. Changes nothing."""
        window = window or self._window
        if window is None or window.tokens is None:
            return self.find_cached_run(keys, limit)
        first_span, end = self._cached_window(window, keys, limit)
        return [
            self._blocks_by_key[key] if window.is_read(index, first_span) else NO_BLOCK
            for index, key in enumerate(keys[:end])
        ]

    def find_cached_run(self, keys: Sequence[BlockKey], limit: int | None = None) -> list[BlockId]:
        """Return the cached blocks of ``keys[:limit]`` up to the first that is not cached."""
        found: list[BlockId] = []
        for key in islice(keys, limit):
            block_id = self._blocks_by_key.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def find_all_cached(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Return the blocks of all ``keys`` that are cached, in their order."""
        found = (self._blocks_by_key.get(key) for key in keys)
        return [block_id for block_id in found if block_id is not None]

    def count_cached(
        self, keys: Sequence[BlockKey], limit: int | None = None, window: KvWindow | None = None
    ) -> int:
        """Return the number of blocks that :meth:`find_cached` would return."""
        window = window or self._window
        if window is not None and window.tokens is not None:
            return self._cached_window(window, keys, limit)[1]
        count = 0
        for key in islice(keys, limit):
            if key not in self._blocks_by_key:
                break
            count += 1
        return count

    def _cached_window(
        self, window: KvWindow, keys: Sequence[BlockKey], limit: int | None
    ) -> tuple[int, int]:
        """Find the longest prefix of ``keys[:limit]`` of which all blocks are cached that later
        tokens read. Return its first span that is read in groups with a window, and its length in
        blocks."""
        num_groups, num_full = window.num_groups, window.num_full
        num_sink_spans = window.num_sink_spans
        found, run_start = (0, 0), 0
        end = len(keys) if limit is None else min(limit, len(keys))
        for span in range(end // num_groups):
            start = span * num_groups
            is_cached = [key in self._blocks_by_key for key in keys[start : start + num_groups]]
            is_sink = span < num_sink_spans
            if not all(is_cached if is_sink else is_cached[:num_full]):
                break
            if not all(is_cached[num_full:]):
                run_start = span + 1
                continue
            first_span = window.first_span((span + 1) * window.block_tokens)
            if run_start <= first_span:
                found = first_span, start + num_groups
        return found

    def state(self, block_id: BlockId) -> BlockState:
        return self._states[block_id]

    def key(self, block_id: BlockId) -> BlockKey | None:
        """Return the block's key if the block is SEALED, else None."""
        return self._keys[block_id]

    def count_referenced(self, block_ids: Iterable[BlockId]) -> int:
        """Return how many of the cached blocks ``block_ids`` are referenced. NO_BLOCK is none."""
        held = (block_id for block_id in block_ids if block_id != NO_BLOCK)
        return sum(self._references[block_id] > 0 for block_id in held)

    def num_references(self, block_id: BlockId) -> int:
        return self._references[block_id]

    def references(self) -> dict[BlockId, int]:
        """Return the number of references of each block that has any."""
        return {BlockId(index): count for index, count in enumerate(self._references) if count}

    # Changes

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Allocate blocks (FREE → FILLING) and evict IDLE blocks if necessary. Call this only if
        :meth:`can_allocate` is true."""
        assert self.can_allocate(num_blocks), "check can_allocate first"
        while len(self._free) < num_blocks:
            self._evict_one()
        allocated = [self._free.popleft() for _ in range(num_blocks)]
        for block_id in allocated:
            self._set_state(block_id, BlockState.FILLING)
            self._references[block_id] = 1
        return allocated

    def seal(self, block_id: BlockId, key: BlockKey) -> bool:
        """Seal a full block: give it its key (FILLING → REFERENCED). Return False if the block is a
        duplicate, that is, if the prefix cache already has another block with this key."""
        self._set_state(block_id, BlockState.REFERENCED)
        self._keys[block_id] = key
        return self._blocks_by_key.setdefault(key, block_id) == block_id

    def reference(self, block_ids: Iterable[BlockId]) -> None:
        """Add a reference to each of these SEALED blocks."""
        for block_id in block_ids:
            if block_id == NO_BLOCK:
                continue
            if self._states[block_id] is BlockState.IDLE:
                self._set_state(block_id, BlockState.REFERENCED)
                del self._idle[block_id]
            assert self._states[block_id] is BlockState.REFERENCED, "only sealed blocks are shared"
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference to each of these blocks, from the tail of the block table to its head,
        so that the tail is evicted first."""
        for block_id in reversed(block_ids):
            if block_id == NO_BLOCK:
                continue
            assert self._references[block_id] > 0, f"block {block_id} has no owner"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._handle_last_release(block_id)

    def quarantine(self, block_ids: Sequence[BlockId]) -> None:
        """Quarantine blocks that their owner releases although a transfer may still write to them
        (FILLING → QUARANTINED)."""
        for block_id in block_ids:
            if block_id == NO_BLOCK:
                continue
            self._set_state(block_id, BlockState.QUARANTINED)
            self._references[block_id] = 0

    def release_quarantine(self, block_ids: Sequence[BlockId]) -> None:
        """Free quarantined blocks (QUARANTINED → FREE). Call this once no transfer can write to
        them any more."""
        for block_id in block_ids:
            assert self._states[block_id] is BlockState.QUARANTINED, "was not in quarantine"
            self._set_free(block_id)

    def _handle_last_release(self, block_id: BlockId) -> None:
        """Handle a block whose last reference was dropped. A sealed block becomes IDLE, unless the
        prefix cache has another block with the same key. All other blocks become FREE."""
        key = self._keys[block_id]
        if key is None:
            self._set_free(block_id)
            return
        holder = self._blocks_by_key.setdefault(key, block_id)
        if holder == block_id:
            self._set_state(block_id, BlockState.IDLE)
            self._idle[block_id] = None
            return
        if holder in self._idle:  # its duplicate was used just now, which counts as a use
            self._idle.move_to_end(holder)
        self._set_free(block_id)

    def _evict_one(self) -> None:
        block_id, _ = self._idle.popitem(last=False)
        key = self._keys[block_id]
        assert key is not None
        del self._blocks_by_key[key]
        self._set_free(block_id)

    def _set_free(self, block_id: BlockId) -> None:
        self._set_state(block_id, BlockState.FREE)
        self._keys[block_id] = None
        self._free.append(block_id)

    def _set_state(self, block_id: BlockId, state: BlockState) -> None:
        old = self._states[block_id]
        assert state in BLOCK_TRANSITIONS[old], f"block {block_id}: {old} → {state}"
        self._states[block_id] = state
        self._counts[old] -= 1
        self._counts[state] += 1

    # Diagnostics

    def check_integrity(self) -> None:
        """Raise AssertionError when states, lists, keys and counts disagree. This takes
        O(num_blocks) time."""
        for state in BlockState:
            assert self._counts[state] == self._states.count(state), f"count of {state}"
        assert sum(self._counts.values()) == self.num_blocks, "states don't add up"
        assert len(self._free) == self._counts[BlockState.FREE], "free list"
        assert len(self._idle) == self._counts[BlockState.IDLE], "idle list"
        for block_id in self._free:
            assert self._states[block_id] is BlockState.FREE, f"block {block_id} in free list"
        for block_id in self._idle:
            assert self._states[block_id] is BlockState.IDLE, f"block {block_id} in idle list"
        free = BlockState.FREE
        blocks = zip(self._states, self._references, self._keys, strict=True)
        for index, (state, references, key) in enumerate(blocks):
            # A quick check for most blocks, since simulations check the pool after every step.
            if state is not free or references or key is not None:
                self._check_block(BlockId(index))
        for key, block_id in self._blocks_by_key.items():
            assert self._keys[block_id] == key, f"block {block_id} has another key"

    def _check_block(self, block_id: BlockId) -> None:
        state, key = self._states[block_id], self._keys[block_id]
        references = self._references[block_id]
        assert (key is not None) == (state in SEALED), f"block {block_id}: {state}, key {key!r}"
        if state is BlockState.FILLING:
            assert references == 1, f"block {block_id}: filling, {references} owners"
        else:
            assert (references > 0) == (state is BlockState.REFERENCED), (
                f"block {block_id}: {state}, {references} owners"
            )
        if state is BlockState.IDLE:
            assert key is not None and self._blocks_by_key.get(key) == block_id, (
                f"block {block_id} is idle and can't be found"
            )

    def describe(self) -> str:
        """Return the counts and one character per block, as text."""
        counts = " ".join(f"{self._counts[state]} {state}" for state in BlockState)
        legend = " ".join(f"{symbol}={state}" for state, symbol in SYMBOLS.items())
        lines = [f"{self.num_blocks} blocks: {counts}", legend]
        for start in range(0, min(self.num_blocks, _MAX_LINES * _COLUMNS), _COLUMNS):
            row = "".join(SYMBOLS[state] for state in self._states[start : start + _COLUMNS])
            lines.append(f"{start:>7} {row}")
        if self.num_blocks > _MAX_LINES * _COLUMNS:
            lines.append("        …")
        return "\n".join(lines)
