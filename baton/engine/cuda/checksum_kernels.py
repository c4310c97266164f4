"""A Triton kernel for the checksums of KV blocks; see :mod:`baton.engine.checksum`."""

import triton
import triton.language as tl


@triton.jit
def weighted_sums(
    words_ptr,  # [num_blocks, block_words]: the pool as integers of 32 bits
    blocks_ptr,  # [num_wanted]: the indices of the wanted blocks, in 64 bits
    sums_ptr,  # [num_wanted, parts], in 64 bits
    block_words,
    FACTOR: tl.constexpr,
    PART: tl.constexpr,  # words of a part, a multiple of N
    N: tl.constexpr,
):
    """Sum the words of one part of a block, each times (2 * its index in the block + 1) * FACTOR,
    modulo 2^64. There is one program for each wanted block and part."""
    words_ptr += tl.load(blocks_ptr + tl.program_id(0)) * block_words
    begin = tl.program_id(1) * PART
    total = tl.zeros([N], tl.int64)
    for first in range(begin, tl.minimum(begin + PART, block_words), N):
        index = first + tl.arange(0, N)
        words = tl.load(words_ptr + index, mask=index < block_words, other=0).to(tl.int64)
        total += words * ((index.to(tl.int64) * 2 + 1) * FACTOR)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums_ptr + place, tl.sum(total, axis=0))
