"""Whether memory suffices for one more answer beside those that run, until all have ended."""

from collections.abc import Iterable

from baton.core.answer_length_predictor import revised_prediction
from baton.core.memory_forecast import KvDemand, MemoryForecast
from baton.core.task import Task
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.sequence import Sequence


def memory_suffices(
    pool: BlockPool, config: EngineConfig, running: Iterable[Sequence], candidate: Sequence
) -> bool:
    """Whether ``candidate`` may join ``running``, who hold blocks already; ``num_shared`` of its
    cached blocks are used by others anyway. True beside nobody whose answer grows here.

    Blocks that several share are taken to stay with the first of them, so the projection is
    right but for sharing; and a request that is still being computed, or landing, is taken to
    answer already. What it gets wrong, preemption mends. Who was preempted isn't asked for it
    again: its client has waited enough.
    """
    growing = [each for each in running if each.task is not Task.PREFILL]
    if not growing or candidate.task is Task.PREFILL:
        return True
    held_blocks = sum(len(each.block_ids) - each.num_shared for each in growing)
    spare_blocks = pool.num_allocatable - config.watermark_blocks
    capacity = (spare_blocks + held_blocks) * config.block_tokens
    demands = [_demand(each, config) for each in growing]
    return MemoryForecast(demands, capacity).fits(_demand(candidate, config))


def _demand(sequence: Sequence, config: EngineConfig) -> KvDemand:
    """A request's last block is full only now and then: each is taken to need one token less
    than a whole block more. The last token of an answer needs no KV."""
    length = len(sequence.token_ids)
    num_prompt_tokens = sequence.spec.num_prompt_tokens
    most = sequence.max_tokens - num_prompt_tokens
    expected = revised_prediction(sequence.expected_tokens, length - num_prompt_tokens, most)
    sequence.expected_tokens = expected
    shared = sequence.num_shared * config.block_tokens
    rounding = config.block_tokens - 1
    return KvDemand(length + rounding - shared, max(0, num_prompt_tokens + expected - 1 - length))
