"""A sequence's block table: how it is filled at first, extended at its end, and emptied before the
window."""

from dataclasses import dataclass

from baton.core.ids import BlockId
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.kv_window import NO_BLOCK
from baton.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class NewTable:
    """The block table of a sequence that gets its blocks: the ``cached`` blocks, then new ones at
    the indexes ``added``, up to index ``end``. Beside them, ``num_spare`` blocks are allocated for
    the rest of the known tokens, in groups without a window."""

    cached: list[BlockId]
    added: list[int]
    end: int
    num_spare: int

    @classmethod
    def of(
        cls,
        sequence: Sequence,
        cached: list[BlockId],
        end: int,
        first_span: int,
        config: EngineConfig,
    ) -> "NewTable":
        """Return a table without the blocks before ``first_span`` in groups with a window."""
        window = sequence.window
        if first_span:
            cached = [
                block_id if window.is_read(index, first_span) else NO_BLOCK
                for index, block_id in enumerate(cached)
            ]
        missing = config.num_blocks_for(sequence.num_known_tokens) - end
        return cls(
            cached,
            window.read_indexes(range(len(cached), end), first_span),
            end,
            missing // config.num_groups * window.num_full,
        )

    @property
    def num_new(self) -> int:
        return len(self.added) + self.num_spare

    def give(self, sequence: Sequence, new: list[BlockId]) -> None:
        """Give the table to the sequence, with the ``num_new`` blocks ``new``."""
        table = [*self.cached, *[NO_BLOCK] * (self.end - len(self.cached))]
        for index, block_id in zip(self.added, new, strict=False):
            table[index] = block_id
        sequence.block_ids = tuple(table)
        sequence.spare_block_ids = tuple(new[len(self.added) :])
        sequence.num_sealed_blocks = len(self.cached)
        sequence.num_dropped_blocks = table.count(NO_BLOCK)


def extend_table(
    sequence: Sequence, pool: BlockPool, config: EngineConfig, num_spans: int = 1
) -> bool:
    """Add the blocks of ``num_spans`` more spans to the block table. Return False, and change
    nothing, if too few can be allocated."""
    if config.num_groups == 1:
        if not pool.can_allocate(num_spans):
            return False
        sequence.block_ids += tuple(pool.allocate(num_spans))
        return True
    num_full = num_spans * config.num_full_groups
    spare, rest = sequence.spare_block_ids[:num_full], sequence.spare_block_ids[num_full:]
    num_new = num_spans * config.num_groups - len(spare)
    if not pool.can_allocate(num_new):
        return False
    sequence.spare_block_ids = rest
    new = pool.allocate(num_new)
    full = [*spare, *new[: num_full - len(spare)]]
    windowed = new[num_full - len(spare) :]
    sequence.block_ids += _interleave(full, windowed, num_spans, config)
    return True


def _interleave(
    full: list[BlockId], windowed: list[BlockId], num_spans: int, config: EngineConfig
) -> tuple[BlockId, ...]:
    """Return the part of a block table that has these blocks of groups without and with window."""
    block_ids: list[BlockId] = []
    per_span = config.num_full_groups, config.num_windowed_groups
    for span in range(num_spans):
        for blocks, count in zip((full, windowed), per_span, strict=True):
            block_ids += blocks[span * count : (span + 1) * count]
    return tuple(block_ids)


def drop_before_window(sequence: Sequence, pool: BlockPool, config: EngineConfig) -> bool:
    """Release the blocks that no later token reads, and allocate as many for tokens that are not
    computed yet. A step that is being computed does not read them, because it computes later
    tokens. Return whether any was released.

    So a prompt that is longer than the window always finds its next blocks, unless the released
    ones are shared. (Its blocks in groups without a window were allocated when it was admitted.)"""
    window = sequence.window
    if window.tokens is None:
        return False
    count = window.first_span_after(sequence.num_dropped_blocks)
    first = window.first_span(sequence.num_computed_tokens)
    if window.num_dropped(first) <= sequence.num_dropped_blocks:
        return False
    count = max(count, window.num_sink_spans)
    num_groups, table = config.num_groups, sequence.block_ids
    dropped = [
        index
        for index in range(count * num_groups, first * num_groups)
        if not window.is_read(index, first)
    ]
    pool.release([table[index] for index in dropped])
    changed = list(table[: first * num_groups])
    for index in dropped:
        changed[index] = NO_BLOCK
    sequence.block_ids = (*changed, *table[first * num_groups :])
    sequence.num_dropped_blocks = window.num_dropped(first)
    sequence.num_shared_blocks = max(0, sequence.num_shared_blocks - len(dropped))
    end = config.table_end(sequence.num_known_tokens, sequence.num_sealed_blocks, window)
    num_new = min(first - count, (end - len(table)) // num_groups)
    if num_new > 0:
        extend_table(sequence, pool, config, num_new)
    return True
