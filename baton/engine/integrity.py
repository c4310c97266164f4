"""The engine's books: every reference in the pool belongs to somebody, and the reverse."""

from collections import Counter
from collections.abc import Iterable, Mapping

from baton.core.block_key import block_keys
from baton.core.ids import BlockId, BlockKey, RequestId
from baton.engine.block_pool import BlockPool
from baton.engine.block_state import BlockState
from baton.engine.config import EngineConfig
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Phase, Sequence


def check_queues(sequences: Mapping[RequestId, Sequence], scheduler: Scheduler) -> None:
    """Every sequence stands in the lineup of its phase, once, and in no other."""
    for phase, lineup in scheduler.lineups.items():
        for sequence in lineup:
            assert sequence.phase is phase, f"{sequence.describe()} stands in {phase}"
            assert sequences.get(sequence.request_id) is sequence, sequence.describe()
    in_line = sum(len(lineup) for lineup in scheduler.lineups.values())
    assert in_line == len(sequences), f"{in_line} in line, {len(sequences)} known"
    assert scheduler.num_slots >= 0, "more slots taken than there are"


def check_owners(
    sequences: Iterable[Sequence], imported: Iterable[BlockId], pool: BlockPool
) -> None:
    """A block has as many references as block tables and imports name it."""
    owners = Counter(imported)
    for sequence in sequences:
        owners.update(sequence.block_ids)
    for index in range(pool.num_blocks):
        block_id = BlockId(index)
        assert owners[block_id] == pool.num_references(block_id), (
            f"block {block_id}: {owners[block_id]} owners, "
            f"{pool.num_references(block_id)} references"
        )


def check_sequence(
    sequence: Sequence, root: BlockKey, pool: BlockPool, config: EngineConfig
) -> None:
    """The block table fits the counts, and its sealed blocks are what the tokens say."""
    what = sequence.describe()
    assert sequence.keys == block_keys(root, sequence.token_ids, config.block_tokens), what
    assert sequence.num_remaining > 0, what
    if sequence.phase is Phase.WAITING:
        assert not sequence.block_ids and sequence.num_computed == 0, what
        return
    assert len(set(sequence.block_ids)) == len(sequence.block_ids), what
    assert config.blocks_for(sequence.num_computed) <= len(sequence.block_ids), what
    if sequence.phase is not Phase.RESERVED:
        assert sequence.num_sealed == sequence.num_computed // config.block_tokens, what
    for index, block_id in enumerate(sequence.block_ids):
        if index < sequence.num_sealed:
            assert pool.key(block_id) == sequence.keys[index], f"{what}: block {block_id}"
        else:
            assert pool.state(block_id) is BlockState.FILLING, f"{what}: block {block_id}"
