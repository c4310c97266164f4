"""Checksums of KV blocks, which the receiver of a transfer verifies."""

from collections.abc import Sequence

import torch
import xxhash

from baton.core.ids import BlockId
from baton.core.kv_transfer import CHECKSUM_WSUM as CHECKSUM_WSUM
from baton.core.kv_transfer import CHECKSUM_XXH3
from baton.engine.kv_pool import KvPool

FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""The golden ratio times 2^64, as a signed integer."""


def checksum_algorithm(pool: KvPool) -> str:
    return CHECKSUM_XXH3 if pool.device == "cpu" else CHECKSUM_WSUM


def block_checksums(pool: KvPool, block_ids: Sequence[BlockId]) -> list[int]:
    """Return one 64-bit checksum per block, over the whole block even if it is partly filled."""
    if pool.device == "cpu":
        flat = memoryview(pool.tensor.view(torch.uint8).view(-1).numpy())  # type: ignore[arg-type]
        size = pool.block_bytes
        return [xxhash.xxh3_64_intdigest(flat[b * size : (b + 1) * size]) for b in block_ids]
    from baton.engine.cuda.block_stream import on_block_stream
    from baton.engine.cuda.checksum import signed_sums

    if not block_ids:
        return []
    with on_block_stream(pool.tensor.device):
        return _unsigned(signed_sums(pool.tensor, block_ids, FACTOR))


def range_checksums(pool: KvPool, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return one 64-bit checksum for each of ``ranges``: an offset and a size in the pool's memory,
    both in bytes. On a GPU, offsets must be multiples of 4, and the last word of a range is padded
    with zeros."""
    if pool.device == "cpu":
        flat = memoryview(pool.memory.numpy())  # type: ignore[arg-type]
        return [xxhash.xxh3_64_intdigest(flat[start : start + size]) for start, size in ranges]
    from baton.engine.cuda.block_stream import on_block_stream
    from baton.engine.cuda.checksum import signed_range_sums

    if not ranges:
        return []
    with on_block_stream(pool.tensor.device):
        return _unsigned(signed_range_sums(pool.memory, ranges, FACTOR))


def weighted_sums(blocks: torch.Tensor) -> list[int]:
    """Return the checksum :data:`CHECKSUM_WSUM` of each of ``blocks`` [num_blocks, ...], computed
    by torch. The size of a block must be a multiple of 4 bytes."""
    words = blocks.reshape(blocks.shape[0], -1).view(torch.int32).to(torch.int64)
    weights = torch.arange(words.shape[1], device=words.device) * 2 + 1
    return _unsigned((words * (weights * FACTOR)).sum(dim=1))


def _unsigned(sums: torch.Tensor) -> list[int]:
    return [value % (1 << 64) for value in sums.tolist()]
