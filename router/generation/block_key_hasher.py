"""Computes the block keys of prompts. Long prompts are hashed off the event loop."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.block_key import block_keys
from baton.core.ids import BlockKey, TokenId

MIN_OFFLOAD_TOKENS = 8192
"""From this many tokens on, hashing takes a millisecond or more, so it runs in a thread."""


@dataclass(frozen=True, slots=True)
class BlockKeyHasher:
    """Computes block keys for one tenant and one model: a hash chain that starts at
    ``root_key``."""

    root_key: BlockKey
    block_size_tokens: int

    def compute_keys(self, tokens: Sequence[TokenId]) -> tuple[BlockKey, ...]:
        return tuple(block_keys(self.root_key, tokens, self.block_size_tokens))


async def compute_block_keys(
    hasher: BlockKeyHasher | None, tokens: Sequence[TokenId]
) -> tuple[BlockKey, ...]:
    """Return the keys of all full blocks of ``tokens``. While no worker is known, ``hasher`` is
    None and the result is empty: the request is then placed by its length only."""
    if hasher is None:
        return ()
    if len(tokens) < MIN_OFFLOAD_TOKENS:
        return hasher.compute_keys(tokens)
    return await asyncio.to_thread(hasher.compute_keys, tokens)
