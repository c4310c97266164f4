"""Checksums of KV blocks, which the receiver of a transfer verifies."""

from collections.abc import Sequence

import torch
import xxhash

from baton.core.ids import BlockId
from baton.core.kv_transfer import CHECKSUM_XXH3
from baton.engine.kv_pool import KvMemory

CHECKSUM_WSUM = "wsum64"
"""The sum of the block's 32-bit words, each times an odd weight that depends on its position,
modulo 2^64. It is used for GPU memory, where it takes a single reduction. A change of any one word
changes the sum."""

BLOCKS_AT_ONCE = 32
"""Number of blocks on a GPU whose checksums are computed together. They need five times as much
scratch memory as they are large: 400 MB for blocks of 2.4 MB (16 tokens of Qwen3-8B)."""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def checksum_algorithm(pool: KvMemory) -> str:
    return CHECKSUM_XXH3 if pool.device == "cpu" else CHECKSUM_WSUM


def block_checksums(pool: KvMemory, block_ids: Sequence[BlockId]) -> list[int]:
    """Return one 64-bit checksum per block, over the whole block even if it is partly filled."""
    if pool.device == "cpu":
        flat = memoryview(pool.tensor.view(torch.uint8).view(-1).numpy())  # type: ignore[arg-type]
        size = pool.block_bytes
        return [xxhash.xxh3_64_intdigest(flat[b * size : (b + 1) * size]) for b in block_ids]
    return weighted_sums(pool.tensor, block_ids)


def weighted_sums(data: torch.Tensor, block_ids: Sequence[int]) -> list[int]:
    """Return the checksum :data:`CHECKSUM_WSUM` of the blocks ``block_ids`` of ``data``
    [num_blocks, ...]. The size of a block must be a multiple of 4 bytes."""
    data = data.view(torch.uint8)
    parts = [
        _signed_sums(data[list(block_ids[first : first + BLOCKS_AT_ONCE])])
        for first in range(0, len(block_ids), BLOCKS_AT_ONCE)
    ]
    return [value % (1 << 64) for value in torch.cat(parts).tolist()] if parts else []


def _signed_sums(blocks: torch.Tensor) -> torch.Tensor:
    words = blocks.reshape(blocks.shape[0], -1).view(torch.int32).to(torch.int64)
    weights = torch.arange(words.shape[1], device=words.device) * 2 + 1
    return (words * (weights * _GOLDEN)).sum(dim=1)
