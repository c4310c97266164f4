"""Triton functions, for the kernels of KV codecs to call, that read and write the values of blocks.

The kernels convert BF16 by arithmetic on integers, and select the bits of NaN themselves: a GPU's
own conversions and products give other bits of NaN than a CPU's.
"""

import triton
import triton.language as tl


@triton.jit
def bytes_at(addresses_ptr, index):
    """Return a pointer to the bytes at an address, which is a multiple of 16."""
    return tl.multiple_of(tl.load(addresses_ptr + index), 16).to(tl.pointer_type(tl.uint8))


@triton.jit
def load_values(block_ptr, places, inside, FLOAT32: tl.constexpr):
    """Return the values of a block at ``places`` in FP32, and 0 where ``inside`` is false."""
    if FLOAT32:
        values = tl.load(block_ptr.to(tl.pointer_type(tl.float32)) + places, mask=inside, other=0.0)
    else:
        words_ptr = block_ptr.to(tl.pointer_type(tl.uint16))
        values = from_bfloat16(tl.load(words_ptr + places, mask=inside, other=0))
    return values


@triton.jit
def store_values(values, block_ptr, places, inside, FLOAT32: tl.constexpr):
    """Store values, rounded to the block's dtype."""
    if FLOAT32:
        tl.store(block_ptr.to(tl.pointer_type(tl.float32)) + places, values, mask=inside)
    else:
        words_ptr = block_ptr.to(tl.pointer_type(tl.uint16))
        tl.store(words_ptr + places, to_bfloat16(values), mask=inside)


@triton.jit
def to_bfloat16(values):
    """Round to nearest, ties to even, and return the bits. NaN stays NaN if its payload is not all
    ones."""
    bits = values.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)


@triton.jit
def from_bfloat16(bits):
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def store_header(encoding_ptr, header_ptr, END: tl.constexpr, CODES: tl.constexpr):
    """Store the header of an encoding, and zeros in the fewer than 16 bytes of [END, CODES)."""
    index = tl.arange(0, 16)
    tl.store(encoding_ptr + index, tl.load(header_ptr + index))
    zeros = tl.zeros([16], tl.uint8)
    tl.store(encoding_ptr + END + index, zeros, mask=END + index < CODES)


@triton.jit
def has_header(encoding_ptr, header_ptr):
    """Return whether an encoding begins with the expected header."""
    index = tl.arange(0, 16)
    differs = tl.load(encoding_ptr + index) != tl.load(header_ptr + index)
    return tl.sum(differs.to(tl.int32), axis=0) == 0
