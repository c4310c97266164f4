"""Predicts whether memory suffices for one more answer until all running answers have ended."""

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
    """Whether KV memory is predicted to suffice if ``candidate`` joins the ``running`` sequences,
    which have their blocks already. ``candidate.num_shared_blocks`` must be set. Always true if no
    running answer grows on this worker, or if ``candidate`` is a PREFILL request.

    If the answers are as long as predicted, the prediction is exact, with two exceptions: a shared
    block counts only for the request that had it first, and requests that are still being prefilled
    or transferred count as if they were decoding already. If memory runs short nevertheless, a
    request is preempted. The caller skips this check for requests that were already preempted once,
    so that their clients don't wait even longer.
    """
    growing = [each for each in running if each.task is not Task.PREFILL]
    if not growing or candidate.task is Task.PREFILL:
        return True
    used_blocks = sum(each.num_held_blocks - each.num_shared_blocks for each in growing)
    spare_blocks = pool.num_allocatable - config.watermark_blocks
    capacity = (spare_blocks + used_blocks) * config.block_tokens
    demands = [_demand(each, config) for each in growing]
    added = _demand(candidate, config)
    if config.window_tokens is not None and config.num_full_groups:
        return _fits_in_groups(demands, added, capacity, config)
    return MemoryForecast(demands, capacity).fits(added)


def _fits_in_groups(
    demands: list[KvDemand], added: KvDemand, capacity: int, config: EngineConfig
) -> bool:
    """Whether the capacity suffices for demands that grow by a block of each group of layers
    without a window. Of groups with a window, as much is set aside as each request needs at its
    end. ``capacity`` counts the tokens of each block, whatever its group."""
    assert config.window_tokens is not None
    most = config.window_tokens + config.block_tokens - 1
    windowed = sum(
        min(most, each.current_tokens + each.remaining_tokens) for each in (*demands, added)
    )
    rest = capacity - windowed * config.num_windowed_groups
    return MemoryForecast(demands, rest // config.num_full_groups).fits(added)


def _demand(sequence: Sequence, config: EngineConfig) -> KvDemand:
    """Return the memory that a request will need. Its last block is rarely full, so
    ``block_tokens`` - 1 tokens are added to its length. The last token of an answer needs no KV."""
    length = len(sequence.token_ids)
    num_prompt_tokens = sequence.spec.num_prompt_tokens
    max_answer_tokens = sequence.max_total_tokens - num_prompt_tokens
    num_answer_tokens = length - num_prompt_tokens
    expected = revised_prediction(
        sequence.predicted_answer_tokens, num_answer_tokens, max_answer_tokens
    )
    sequence.predicted_answer_tokens = expected
    shared = config.num_tokens_in(sequence.num_shared_blocks)
    rounding = config.block_tokens - 1
    growth = max(0, num_prompt_tokens + expected - 1 - length)
    if sequence.window.tokens is not None and not sequence.window.num_full:
        # Longer contexts take no more memory.
        sinks = sequence.window.num_sink_spans * config.block_tokens
        window = sinks + sequence.window.tokens + rounding
        length, growth = min(length, window), min(growth, max(0, window - length))
    return KvDemand(max(0, length + rounding - shared), growth)
