"""Computes checksums of KV blocks on a GPU, beside the steps of the engine."""

from collections.abc import Sequence

import torch

from baton.engine.cuda import checksum_kernels as kernels
from baton.engine.cuda.launch import KernelLauncher, ceil_div

_weighted_sums = KernelLauncher(kernels.weighted_sums)
_weighted_range_sums = KernelLauncher(kernels.weighted_range_sums)

PART_WORDS, WORDS_AT_ONCE = 16_384, 2048
"""Words per program, and words that it loads at once: 64 bytes per thread."""


def signed_sums(pool: torch.Tensor, block_ids: Sequence[int], factor: int) -> torch.Tensor:
    """Return the weighted sum (see :mod:`baton.engine.checksum`) of each of the blocks of ``pool``
    [num_blocks, ...], as signed integers of 64 bits on the pool's device. This uses the current
    stream and reads each byte once."""
    words = pool.view(torch.uint8).view(len(pool), -1).view(torch.int32)
    parts = ceil_div(words.shape[1], PART_WORDS)
    wanted = torch.tensor(block_ids, dtype=torch.int64, device=pool.device)
    sums = torch.empty((len(block_ids), parts), dtype=torch.int64, device=pool.device)
    _weighted_sums[(len(block_ids), parts)](
        words,
        wanted,
        sums,
        words.shape[1],
        FACTOR=factor,
        PART=PART_WORDS,
        N=WORDS_AT_ONCE,
    )
    return sums.sum(dim=1)


def signed_range_sums(
    memory: torch.Tensor, ranges: Sequence[tuple[int, int]], factor: int
) -> torch.Tensor:
    """Return the weighted sum of each of ``ranges`` (an offset, which is a multiple of 4, and a
    size, in bytes) of ``memory`` [num_bytes], as :func:`signed_sums` does for blocks. The last word
    of a range is padded with zeros."""
    words = memory[: len(memory) // 4 * 4].view(torch.int32)
    parts = ceil_div(max(size for _, size in ranges), 4 * PART_WORDS)
    wanted = torch.tensor(
        [(offset // 4, size) for offset, size in ranges], dtype=torch.int64, device=memory.device
    )
    sums = torch.empty((len(ranges), parts), dtype=torch.int64, device=memory.device)
    _weighted_range_sums[(len(ranges), parts)](
        words, wanted, sums, FACTOR=factor, PART=PART_WORDS, N=WORDS_AT_ONCE
    )
    return sums.sum(dim=1)
