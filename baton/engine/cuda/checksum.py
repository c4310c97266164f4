"""Computes checksums of KV blocks on a GPU, beside the steps of the engine."""

from collections.abc import Sequence
from functools import cache

import torch

from baton.engine.cuda import checksum_kernels as kernels
from baton.engine.cuda.launch import KernelLauncher, ceil_div

_weighted_sums = KernelLauncher(kernels.weighted_sums)

PART_WORDS, WORDS_AT_ONCE = 16_384, 2048
"""Words per program, and words that it loads at once: 64 bytes per thread."""

HIGH_PRIORITY = -1


@cache
def checksum_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream for checksums. On the default stream they would wait for the step that
    is running, 50 ms on an H100 for a chunk of 2,048 tokens of an 8B model, although the blocks
    were finished by the step before."""
    return torch.cuda.Stream(device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]


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
