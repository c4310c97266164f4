"""Block keys of prompts, computed off the event loop when there are many."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.block_key import block_keys
from baton.core.ids import BlockKey, TokenId

MIN_OFFLOAD_TOKENS = 8192
"""Beyond, hashing takes more than about a millisecond, and moves to a thread."""


@dataclass(frozen=True, slots=True)
class BlockKeyHasher:
    """One tenant's chain over one model."""

    root: BlockKey
    block_tokens: int

    def keys(self, tokens: Sequence[TokenId]) -> tuple[BlockKey, ...]:
        return tuple(block_keys(self.root, tokens, self.block_tokens))


async def compute_block_keys(
    chain: BlockKeyHasher | None, tokens: Sequence[TokenId]
) -> tuple[BlockKey, ...]:
    """No keys without a chain: the request is placed by its length then."""
    if chain is None:
        return ()
    if len(tokens) < MIN_OFFLOAD_TOKENS:
        return chain.keys(tokens)
    return await asyncio.to_thread(chain.keys, tokens)
