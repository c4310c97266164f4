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


@triton.jit
def weighted_range_sums(
    words_ptr,  # [num_words]: the memory as integers of 32 bits
    ranges_ptr,  # [num_ranges, 2]: the first word and the size in bytes of each range, in 64 bits
    sums_ptr,  # [num_ranges, parts], in 64 bits
    FACTOR: tl.constexpr,
    PART: tl.constexpr,  # words of a part, a multiple of N
    N: tl.constexpr,
):
    """Sum the words of one part of a range as :func:`weighted_sums` does. Bytes of the last word
    that are beyond the range count as zeros."""
    words_ptr += tl.load(ranges_ptr + 2 * tl.program_id(0))
    size = tl.load(ranges_ptr + 2 * tl.program_id(0) + 1).to(tl.int32)
    num_words = tl.cdiv(size, 4)
    last_bits = (size - 4 * (num_words - 1)) * 8
    begin = tl.program_id(1) * PART
    total = tl.zeros([N], tl.int64)
    for first in range(begin, tl.minimum(begin + PART, num_words), N):
        index = first + tl.arange(0, N)
        words = tl.load(words_ptr + index, mask=index < num_words, other=0).to(tl.int64)
        cut = words & ((tl.full([N], 1, tl.int64) << last_bits) - 1)
        words = tl.where((index == num_words - 1) & (last_bits < 32), cut, words)
        total += words * ((index.to(tl.int64) * 2 + 1) * FACTOR)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums_ptr + place, tl.sum(total, axis=0))
