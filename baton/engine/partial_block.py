"""Finds a block that another request has partly filled with the tokens that a request needs."""

from collections.abc import Iterable

from baton.core.ids import TokenId
from baton.engine.config import EngineConfig
from baton.engine.kv_window import NO_BLOCK
from baton.engine.sequence import Sequence


def find_partial_block(
    sequence: Sequence, wanted: list[TokenId], others: Iterable[Sequence], config: EngineConfig
) -> tuple[Sequence | None, int]:
    """Return the sequence of ``others`` that has computed most of the tokens ``wanted``, which
    follow the sealed blocks of ``sequence``, after the same prefix; and how many it has computed.
    Return None and 0 if there is none."""
    first, after = sequence.num_sealed_blocks, sequence.num_sealed_blocks + config.num_groups
    start = config.num_tokens_in(first)
    best, length = None, 0
    for other in others:
        blocks = other.block_ids[first:after]
        has_blocks = len(blocks) == config.num_groups and NO_BLOCK not in blocks
        if has_blocks and other is not sequence and _has_same_prefix(other, sequence, first):
            end = min(start + config.block_tokens, other.num_computed_tokens)
            count = _common_prefix_length(wanted, other.token_ids[start:end])
            if count > length:
                best, length = other, count
    return best, length


def _has_same_prefix(one: Sequence, other: Sequence, num_blocks: int) -> bool:
    """Whether both sequences have the same first ``num_blocks`` blocks, the same tenant and the
    same adapter."""
    if num_blocks == 0:
        return one.key_root == other.key_root
    return (
        one.block_keys[num_blocks - 1 : num_blocks] == other.block_keys[num_blocks - 1 : num_blocks]
    )


def _common_prefix_length(one: list[TokenId], other: list[TokenId]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
