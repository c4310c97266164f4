"""Consistency checks between the engine's sequences, its queues and the block pool."""

from collections import Counter
from collections.abc import Iterable, Mapping

from baton.core.block_key import block_keys
from baton.core.ids import BlockId, BlockKey, RequestId
from baton.engine.block_pool import BlockPool
from baton.engine.block_state import BlockState
from baton.engine.config import EngineConfig
from baton.engine.kv_window import NO_BLOCK
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Phase, Sequence


def check_queues(sequences: Mapping[RequestId, Sequence], scheduler: Scheduler) -> None:
    """Check that every sequence is in the queue of its phase, once, and in no other queue."""
    for phase, lineup in scheduler.queues.items():
        for sequence in lineup:
            assert sequence.phase is phase, f"{sequence.describe()} is in the queue of {phase}"
            assert sequences.get(sequence.request_id) is sequence, sequence.describe()
    num_queued = sum(len(lineup) for lineup in scheduler.queues.values())
    assert num_queued == len(sequences), f"{num_queued} in queues, {len(sequences)} known"
    assert scheduler.num_free_slots >= 0, "more slots taken than there are"


def check_owners(
    sequences: Iterable[Sequence], imported: Iterable[BlockId], pool: BlockPool
) -> None:
    """Check that the number of references to each block equals the number of its occurrences in
    block tables and in ``imported``."""
    owners = Counter(imported)
    for sequence in sequences:
        owners.update(sequence.block_ids[sequence.num_dropped_blocks :])
    references = pool.references()
    for block_id in owners.keys() | references.keys():
        owned, counted = owners[block_id], references.get(block_id, 0)
        assert owned == counted, f"block {block_id}: {owned} owners, {counted} references"


def check_sequence(
    sequence: Sequence, root: BlockKey, pool: BlockPool, config: EngineConfig
) -> None:
    """Check that the block table matches the numbers of computed tokens and sealed blocks, and that
    the keys of its sealed blocks match the tokens."""
    text = sequence.describe()
    assert sequence.block_keys == block_keys(root, sequence.token_ids, config.block_tokens), text
    assert sequence.num_uncomputed_tokens > 0, text
    if sequence.phase is Phase.WAITING:
        assert not sequence.block_ids and sequence.num_computed_tokens == 0, text
        return
    dropped, held = sequence.num_dropped_blocks, sequence.block_ids[sequence.num_dropped_blocks :]
    assert set(sequence.block_ids[:dropped]) <= {NO_BLOCK} and NO_BLOCK not in held, text
    assert dropped <= config.window.first_block(sequence.num_known_tokens), text
    assert len(set(held)) == len(held), text
    assert config.num_blocks_for(sequence.num_computed_tokens) <= len(sequence.block_ids), text
    if sequence.phase is not Phase.RESERVED:
        assert sequence.num_sealed_blocks == sequence.num_computed_tokens // config.block_tokens, (
            text
        )
    for index, block_id in enumerate(held, start=dropped):
        if index < sequence.num_sealed_blocks:
            assert pool.key(block_id) == sequence.block_keys[index], f"{text}: block {block_id}"
        else:
            assert pool.state(block_id) is BlockState.FILLING, f"{text}: block {block_id}"
