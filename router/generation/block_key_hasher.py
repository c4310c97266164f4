"""Computes the block keys of prompts. Long prompts are hashed off the event loop."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from baton.core.attention_window import AttentionWindow
from baton.core.block_key import KeyRoot, block_keys
from baton.core.ids import BlockKey, TokenId
from baton.core.request import RequestSpec
from baton.core.variant import Variant
from router.limits import MAX_CACHED_HASHERS

MIN_OFFLOAD_TOKENS = 8192
"""From this many tokens on, hashing takes a millisecond or more, so it runs in a thread."""


@dataclass(frozen=True, slots=True)
class BlockKeyHasher:
    """Computes block keys for one tenant and one variant of a model: a hash chain that starts at
    ``root_key``."""

    root_key: BlockKey
    block_size_tokens: int

    def compute_keys(self, tokens: Sequence[TokenId]) -> tuple[BlockKey, ...]:
        return tuple(block_keys(self.root_key, tokens, self.block_size_tokens))


@lru_cache(MAX_CACHED_HASHERS)
def block_key_hasher(
    variant: Variant,
    tenant_salt: bytes,
    adapter_digest: bytes = b"",
    attention_window: AttentionWindow | None = None,
    *,
    exact_kv: bool = False,
) -> BlockKeyHasher:
    """Return the hasher for a tenant's block keys, with an adapter or the base model, and with or
    without an attention window, which computes the same keys as the workers of ``variant``.
    ``exact_kv``: for requests whose KV must not pass a lossy codec."""
    root = KeyRoot(
        bytes.fromhex(variant.model_digest),
        variant.kv_dtype,
        variant.block_tokens,
        adapter_digest.hex(),
        tenant_salt,
        "" if exact_kv else variant.lossy_codec,
        "" if attention_window is None else attention_window.key_text,
    )
    return BlockKeyHasher(root.key(), variant.block_tokens)


async def compute_block_keys(spec: RequestSpec, variant: Variant) -> tuple[BlockKey, ...]:
    """Return the keys of all full blocks of a request's tokens on workers of ``variant``."""
    hasher = block_key_hasher(
        variant,
        spec.tenant_salt,
        spec.adapter_digest,
        spec.attention_window,
        exact_kv=spec.exact_kv,
    )
    if len(spec.token_ids) < MIN_OFFLOAD_TOKENS:
        return hasher.compute_keys(spec.token_ids)
    return await asyncio.to_thread(hasher.compute_keys, spec.token_ids)
