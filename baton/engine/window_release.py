"""Releases the blocks of a sequence that no later token reads."""

from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.kv_window import NO_BLOCK
from baton.engine.sequence import Sequence


def drop_before_window(sequence: Sequence, pool: BlockPool, config: EngineConfig) -> bool:
    """Release the blocks that no later token reads, and allocate as many for tokens that are not
    computed yet. A step that is being computed does not read them, because it computes later
    tokens. Return whether any was released.

    So a prompt that is longer than the window always finds its next blocks, unless the released
    ones are shared."""
    count = sequence.num_dropped_blocks
    first = config.window.first_block(sequence.num_computed_tokens)
    if first <= count:
        return False
    pool.release(sequence.block_ids[count:first])
    sequence.block_ids = (NO_BLOCK,) * first + sequence.block_ids[first:]
    sequence.num_dropped_blocks = first
    sequence.num_shared_blocks = max(0, sequence.num_shared_blocks - (first - count))
    end = config.table_end(sequence.num_known_tokens, sequence.num_sealed_blocks)
    num_new = min(first - count, end - len(sequence.block_ids))
    if num_new > 0 and pool.can_allocate(num_new):
        sequence.block_ids += tuple(pool.allocate(num_new))
    return True
