"""Predicts whether memory suffices for one more answer until all running answers have ended."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from baton.core.answer_length_predictor import revised_prediction
from baton.core.task import Task
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class KvDemand:
    """A request's KV in tokens: ``current_tokens`` are in use now (for a waiting request, at its
    start), and ``remaining_tokens`` are added later, one per step."""

    current_tokens: int
    remaining_tokens: int


_remaining_tokens = attrgetter("remaining_tokens")


def fits(running: Iterable[KvDemand], candidate: KvDemand, capacity_tokens: int) -> bool:
    """Return whether memory suffices for the running requests and the candidate at each predicted
    end of a request, up to the candidate's own end. Later ends don't matter: the candidate has
    freed its memory by then.

    Each request grows by a token per step, and frees all its memory at its end. So the memory in
    use peaks just before a request ends (Jaillet et al. 2025, "Online Scheduling for LLM Inference
    with KV Cache Constraints", arXiv 2502.07115).

    The candidate's end is checked first, and then the earlier ends, from the latest to the
    earliest. At each end, ``count`` requests run until then or longer, and ``held`` is the sum of
    their current tokens."""
    ordered = sorted(running, key=_remaining_tokens)
    end = bisect_left(ordered, candidate.remaining_tokens, key=_remaining_tokens)
    later = ordered[end:]
    held = candidate.current_tokens + sum(each.current_tokens for each in later)
    count = 1 + len(later)
    if held + count * candidate.remaining_tokens > capacity_tokens:
        return False
    for each in reversed(ordered[:end]):
        held += each.current_tokens
        count += 1
        if held + count * each.remaining_tokens > capacity_tokens:
            return False
    return True


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
    return fits(demands, added, capacity)


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
    return fits(demands, added, rest // config.num_full_groups)


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
