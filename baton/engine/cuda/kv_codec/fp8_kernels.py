"""Triton kernels of the codec FP8; see :mod:`baton.kv_codec.fp8_layout`.

There is one program for each block, plane and head. The constants are those of ``Fp8Layout``, in
capitals; ROWS and COLUMNS are the tile that a program handles at once, COLUMNS >= HEAD_DIM.
"""

import triton
import triton.language as tl

from baton.engine.cuda.kv_codec.value_kernels import (
    bytes_at,
    has_header,
    load_values,
    store_header,
    store_values,
)

_NAN, _LARGEST = tl.constexpr(0x7F), tl.constexpr(0x7E)
_SUBNORMAL_ROUNDER = tl.constexpr(2.0**14)
_ROUNDER_BITS = tl.constexpr((127 + 14) << 23)


@triton.jit
def encode(
    blocks_ptr,  # [num_blocks]: addresses, in 64 bits
    encodings_ptr,  # the same, of the encodings
    header_ptr,  # [HEADER_BYTES]
    PLANES: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALES: tl.constexpr,
    CODES: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    MAX_SCALE: tl.constexpr,
    FLOAT32: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Encode blocks."""
    block, part = tl.program_id(0) // (PLANES * HEADS), tl.program_id(0) % (PLANES * HEADS)
    block_ptr, encoding_ptr = bytes_at(blocks_ptr, block), bytes_at(encodings_ptr, block)
    if part == 0:
        store_header(encoding_ptr, header_ptr, SCALES + PLANES * HEADS, CODES)
    first = (part // HEADS * TOKENS * HEADS + part % HEADS) * HEAD_DIM
    columns = tl.arange(0, COLUMNS)
    largest = tl.zeros([ROWS, COLUMNS], tl.int32)
    for begin in range(0, TOKENS, ROWS):
        tokens = begin + tl.arange(0, ROWS)
        inside = (tokens < TOKENS)[:, None] & (columns < HEAD_DIM)[None, :]
        places = first + tokens[:, None] * (HEADS * HEAD_DIM) + columns[None, :]
        values = load_values(block_ptr, places, inside, FLOAT32)
        sizes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.maximum(largest, tl.where(sizes < 0x7F800000, sizes, 0))
    most = tl.max(tl.max(largest, axis=1), axis=0)
    scale = (most >> 23) - 8 + ((most & 0x7FFFFF) > 0x600000).to(tl.int32)
    scale = tl.minimum(tl.maximum(scale, MIN_SCALE), MAX_SCALE)
    tl.store(encoding_ptr + SCALES + part, scale.to(tl.uint8))
    factor = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    for begin in range(0, TOKENS, ROWS):
        tokens = begin + tl.arange(0, ROWS)
        inside = (tokens < TOKENS)[:, None] & (columns < HEAD_DIM)[None, :]
        places = first + tokens[:, None] * (HEADS * HEAD_DIM) + columns[None, :]
        values = load_values(block_ptr, places, inside, FLOAT32)
        tl.store(encoding_ptr + CODES + places, _to_e4m3(values, factor), mask=inside)


@triton.jit
def decode(
    encodings_ptr,  # [num_blocks]: addresses, in 64 bits
    blocks_ptr,  # the same, of the blocks
    header_ptr,  # [HEADER_BYTES]
    valid_ptr,  # [num_blocks]: 1, in 32 bits; becomes 0 for invalid encodings
    PLANES: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALES: tl.constexpr,
    CODES: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    MAX_SCALE: tl.constexpr,
    FLOAT32: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Decode blocks. All encodings have the right size."""
    block, part = tl.program_id(0) // (PLANES * HEADS), tl.program_id(0) % (PLANES * HEADS)
    block_ptr, encoding_ptr = bytes_at(blocks_ptr, block), bytes_at(encodings_ptr, block)
    if part == 0:
        tl.store(valid_ptr + block, 0, mask=not has_header(encoding_ptr, header_ptr))
    scale = tl.load(encoding_ptr + SCALES + part).to(tl.int32)
    tl.store(valid_ptr + block, 0, mask=(scale < MIN_SCALE) | (scale > MAX_SCALE))
    factor = (scale << 23).to(tl.float32, bitcast=True)
    first = (part // HEADS * TOKENS * HEADS + part % HEADS) * HEAD_DIM
    columns = tl.arange(0, COLUMNS)
    for begin in range(0, TOKENS, ROWS):
        tokens = begin + tl.arange(0, ROWS)
        inside = (tokens < TOKENS)[:, None] & (columns < HEAD_DIM)[None, :]
        places = first + tokens[:, None] * (HEADS * HEAD_DIM) + columns[None, :]
        codes = tl.load(encoding_ptr + CODES + places, mask=inside, other=0)
        store_values(_from_e4m3(codes, factor), block_ptr, places, inside, FLOAT32)


@triton.jit
def _to_e4m3(values, factor):
    """Return the codes of ``values`` * ``factor``."""
    bits = values.to(tl.uint32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    sizes = magnitudes.to(tl.float32, bitcast=True) * factor
    small = (sizes + _SUBNORMAL_ROUNDER).to(tl.uint32, bitcast=True) - _ROUNDER_BITS
    size_bits = sizes.to(tl.uint32, bitcast=True)
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    normal = tl.where(normal > _LARGEST, _LARGEST, normal)
    codes = tl.where(sizes < 0.015625, small, normal)
    codes = tl.where(magnitudes > 0x7F800000, _NAN, codes)
    return (codes | ((bits >> 31) << 7)).to(tl.uint8)


@triton.jit
def _from_e4m3(codes, factor):
    """Return the numbers that codes stand for, times ``factor``."""
    codes = codes.to(tl.int32)
    sizes = codes & 0x7F
    normal = ((sizes << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    values = tl.where(sizes < 8, sizes.to(tl.float32) * 0.001953125, normal) * factor
    bits = tl.where(sizes == _NAN, 0x7FC00000, values.to(tl.int32, bitcast=True))
    return (bits | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True)
