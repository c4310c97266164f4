"""Triton kernels of the codecs INT4 and INT2; see :mod:`baton.kv_codec.rotated_layout`.

There is one program for each block, plane and group of a row. Each addition, product and rounding
is that of :mod:`baton.kv_codec.portable_rotated`, in the same order, so these kernels must be
launched without fused multiplications and additions (``enable_fp_fusion=False``). Square roots and
quotients are those that IEEE 754 prescribes.

The constants are those of ``RotatedLayout``, in capitals. ROWS tokens are handled at once, and
GROUP is 2 ** STAGES.
"""

import numpy as np
import triton
import triton.language as tl

from baton.engine.cuda.kv_codec.value_kernels import (
    bytes_at,
    from_bfloat16,
    has_header,
    load_values,
    store_header,
    store_values,
    to_bfloat16,
)
from baton.kv_codec import rotated_layout

_MAX_VALUE = tl.constexpr(rotated_layout.MAX_VALUE)
_MIN_SCALE = tl.constexpr(rotated_layout.MIN_SCALE)
_MAX_SCALE_BITS = tl.constexpr(int(np.float32(rotated_layout.MAX_SCALE).view(np.uint32)) >> 16)
_SIGNS0, _SIGNS1, _SIGNS2, _SIGNS3 = map(tl.constexpr, rotated_layout.SIGN_WORDS)


@triton.jit
def encode(
    blocks_ptr,  # [num_blocks]: addresses, in 64 bits
    encodings_ptr,  # the same, of the encodings
    header_ptr,  # [HEADER_BYTES]
    codebooks_ptr,  # [2, 2, 8] in FP32: magnitudes and thresholds, with MEAN_BITS and with BITS
    mean_factor,  # 1 / TOKENS
    PLANES: tl.constexpr,
    TOKENS: tl.constexpr,
    ROW: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    BITS: tl.constexpr,
    MEAN_BITS: tl.constexpr,
    SCALES: tl.constexpr,
    CODES: tl.constexpr,
    FLOAT32: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Encode blocks."""
    GROUPS: tl.constexpr = ROW // GROUP
    block, part = tl.program_id(0) // (PLANES * GROUPS), tl.program_id(0) % (PLANES * GROUPS)
    plane, group = part // GROUPS, part % GROUPS
    block_ptr, encoding_ptr = bytes_at(blocks_ptr, block), bytes_at(encodings_ptr, block)
    NUM_SCALES: tl.constexpr = PLANES * (1 + TOKENS) * GROUPS
    if part == 0:
        store_header(encoding_ptr, header_ptr, SCALES + 2 * NUM_SCALES, CODES)
    first = plane * TOKENS * ROW + group * GROUP
    scales_ptr = (encoding_ptr + SCALES).to(tl.pointer_type(tl.uint16))
    scales_ptr += plane * (1 + TOKENS) * GROUPS + group
    MEAN_BYTES: tl.constexpr = GROUP * MEAN_BITS // 8
    ROW_BYTES: tl.constexpr = GROUP * BITS // 8
    codes_ptr = encoding_ptr + CODES + plane * (GROUPS * (MEAN_BYTES + TOKENS * ROW_BYTES))

    columns = tl.arange(0, GROUP)[None, :]
    total = _load_bounded(block_ptr, first + columns, columns < GROUP, FLOAT32)
    for token in range(1, TOKENS):
        row = first + token * ROW + columns
        total += _load_bounded(block_ptr, row, columns < GROUP, FLOAT32)
    mean_scale, mean_codes = _encode_groups(
        total * mean_factor, codebooks_ptr + 8, 1, GROUP, STAGES, MEAN_BITS
    )
    tl.store(scales_ptr + tl.arange(0, 1), mean_scale)
    mean_bytes = group * MEAN_BYTES + tl.arange(0, MEAN_BYTES)[None, :]
    tl.store(codes_ptr + mean_bytes, _pack(mean_codes, 1, GROUP, MEAN_BITS))
    mean = _decode_groups(mean_scale, mean_codes, codebooks_ptr, 1, GROUP, STAGES, MEAN_BITS)

    codes_ptr += GROUPS * MEAN_BYTES + group * ROW_BYTES
    code_bytes = tl.arange(0, ROW_BYTES)[None, :]
    for begin in range(0, TOKENS, ROWS):
        tokens = begin + tl.arange(0, ROWS)
        inside = (tokens < TOKENS)[:, None]
        values = _load_bounded(block_ptr, first + tokens[:, None] * ROW + columns, inside, FLOAT32)
        scales, codes = _encode_groups(values - mean, codebooks_ptr + 24, ROWS, GROUP, STAGES, BITS)
        tl.store(scales_ptr + (1 + tokens) * GROUPS, scales, mask=tokens < TOKENS)
        places = tokens[:, None] * (GROUPS * ROW_BYTES) + code_bytes
        tl.store(codes_ptr + places, _pack(codes, ROWS, GROUP, BITS), mask=inside)


@triton.jit
def decode(
    encodings_ptr,  # [num_blocks]: addresses, in 64 bits
    blocks_ptr,  # the same, of the blocks
    header_ptr,  # [HEADER_BYTES]
    codebooks_ptr,  # as in ``encode``
    valid_ptr,  # [num_blocks]: 1, in 32 bits; becomes 0 for invalid encodings
    PLANES: tl.constexpr,
    TOKENS: tl.constexpr,
    ROW: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    BITS: tl.constexpr,
    MEAN_BITS: tl.constexpr,
    SCALES: tl.constexpr,
    CODES: tl.constexpr,
    FLOAT32: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Decode blocks. All encodings have the right size."""
    GROUPS: tl.constexpr = ROW // GROUP
    block, part = tl.program_id(0) // (PLANES * GROUPS), tl.program_id(0) % (PLANES * GROUPS)
    plane, group = part // GROUPS, part % GROUPS
    block_ptr, encoding_ptr = bytes_at(blocks_ptr, block), bytes_at(encodings_ptr, block)
    if part == 0:
        tl.store(valid_ptr + block, 0, mask=not has_header(encoding_ptr, header_ptr))
    first = plane * TOKENS * ROW + group * GROUP
    scales_ptr = (encoding_ptr + SCALES).to(tl.pointer_type(tl.uint16))
    scales_ptr += plane * (1 + TOKENS) * GROUPS + group
    MEAN_BYTES: tl.constexpr = GROUP * MEAN_BITS // 8
    ROW_BYTES: tl.constexpr = GROUP * BITS // 8
    codes_ptr = encoding_ptr + CODES + plane * (GROUPS * (MEAN_BYTES + TOKENS * ROW_BYTES))

    columns = tl.arange(0, GROUP)[None, :]
    mean_scale = tl.load(scales_ptr + tl.arange(0, 1))
    _check_scales(mean_scale, valid_ptr + block)
    mean_bytes = tl.load(codes_ptr + group * MEAN_BYTES + columns % MEAN_BYTES)
    mean_codes = _unpack(mean_bytes, columns, GROUP, MEAN_BITS)
    mean = _decode_groups(mean_scale, mean_codes, codebooks_ptr, 1, GROUP, STAGES, MEAN_BITS)

    codes_ptr += GROUPS * MEAN_BYTES + group * ROW_BYTES
    for begin in range(0, TOKENS, ROWS):
        tokens = begin + tl.arange(0, ROWS)
        inside = (tokens < TOKENS)[:, None]
        scales = tl.load(scales_ptr + (1 + tokens) * GROUPS, mask=tokens < TOKENS, other=0)
        _check_scales(scales, valid_ptr + block)
        code_bytes = tokens[:, None] * (GROUPS * ROW_BYTES) + columns % ROW_BYTES
        packed = tl.load(codes_ptr + code_bytes, mask=inside, other=0)
        codes = _unpack(packed, columns, GROUP, BITS)
        differences = _decode_groups(scales, codes, codebooks_ptr + 16, ROWS, GROUP, STAGES, BITS)
        places = first + tokens[:, None] * ROW + columns
        store_values(differences + mean, block_ptr, places, inside, FLOAT32)


@triton.jit
def _load_bounded(block_ptr, places, inside, FLOAT32: tl.constexpr):
    """Return values of a block; NaN as 0, and others as at most _MAX_VALUE."""
    values = load_values(block_ptr, places, inside, FLOAT32)
    values = tl.where(values == values, values, 0.0)
    values = tl.where(values > _MAX_VALUE, _MAX_VALUE, values)
    return tl.where(values < -_MAX_VALUE, -_MAX_VALUE, values)


@triton.jit
def _check_scales(scales, valid_ptr):
    """Store 0 if a scale is not one that encoders write."""
    tl.store(valid_ptr, 0, mask=tl.max(scales.to(tl.int32), axis=0) > _MAX_SCALE_BITS)


@triton.jit
def _encode_groups(
    values,  # [ROWS, GROUP]
    thresholds_ptr,  # [8], of which 2 ** (BITS - 1) - 1 are used
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    BITS: tl.constexpr,
):
    """Return the scales [ROWS], as the bits of BF16, and the codes [ROWS, GROUP]."""
    norms = tl.sqrt_rn(_sums(values * values, ROWS, GROUP, STAGES))
    scale_bits = to_bfloat16(norms)
    scale_bits = tl.where(from_bfloat16(scale_bits) < _MIN_SCALE, 0, scale_bits).to(tl.uint16)
    scales = from_bfloat16(scale_bits)
    factors = tl.where(scales > 0, tl.div_rn(1.0, tl.where(scales > 0, scales, 1.0)), 0.0)
    rotated = _transform(_flip_signs(values, GROUP), ROWS, GROUP, STAGES) * factors[:, None]
    bits = rotated.to(tl.int32, bitcast=True)
    sizes = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    codes = ((bits >> 31) & 1) << (BITS - 1)
    for index in tl.static_range((1 << (BITS - 1)) - 1):
        codes += (sizes > tl.load(thresholds_ptr + index)).to(tl.int32)
    return scale_bits, codes


@triton.jit
def _decode_groups(
    scale_bits,  # [ROWS]
    codes,  # [ROWS, GROUP]
    magnitudes_ptr,  # [8], of which 2 ** (BITS - 1) are used
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    BITS: tl.constexpr,
):
    """Return the values [ROWS, GROUP]."""
    index = codes & ((1 << (BITS - 1)) - 1)
    magnitudes = tl.load(magnitudes_ptr + index)
    rotated = tl.where(codes >> (BITS - 1) > 0, -magnitudes, magnitudes)
    factors = from_bfloat16(scale_bits) * (1 / GROUP)
    values = _transform(rotated, ROWS, GROUP, STAGES) * factors[:, None]
    return _flip_signs(values, GROUP)


@triton.jit
def _flip_signs(values, GROUP: tl.constexpr):
    """Negate the values [ROWS, GROUP] that SIGN_WORDS name."""
    index = tl.arange(0, GROUP)
    words = tl.where(index < 32, _SIGNS0, _SIGNS1)
    words = tl.where(index < 64, words, tl.where(index < 96, _SIGNS2, _SIGNS3)).to(tl.uint32)
    negated = (words >> (index % 32).to(tl.uint32)) << 31
    return (values.to(tl.uint32, bitcast=True) ^ negated[None, :]).to(tl.float32, bitcast=True)


@triton.jit
def _transform(values, ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr):
    """Return the Hadamard transform of each row of ``values`` [ROWS, GROUP], not normalised."""
    for stage in tl.static_range(STAGES):
        one, other = _pairs(values, ROWS << stage, GROUP >> stage)
        values = tl.join(one + other, one - other)
        values = tl.reshape(tl.permute(values, (0, 2, 1)), (ROWS, GROUP))
    return values


@triton.jit
def _sums(values, ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr):
    """Return the sum of each row of ``values`` [ROWS, GROUP]: fold halves upon each other."""
    for stage in tl.static_range(STAGES):
        one, other = _pairs(values, ROWS, GROUP >> stage)
        values = one + other
    return tl.reshape(values, (ROWS,))


@triton.jit
def _pairs(values, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the first and the second half [ROWS, SIZE / 2] of each SIZE values."""
    return tl.split(tl.permute(tl.reshape(values, (ROWS, 2, SIZE // 2)), (0, 2, 1)))


@triton.jit
def _pack(codes, ROWS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Return the bytes [ROWS, GROUP * BITS / 8] of ``codes`` [ROWS, GROUP]."""
    PARTS: tl.constexpr = 8 // BITS
    parts = tl.reshape(codes, (ROWS, PARTS, GROUP // PARTS))
    shifts = (tl.arange(0, PARTS) * BITS)[None, :, None]
    return tl.sum(parts << shifts, axis=1).to(tl.uint8)


@triton.jit
def _unpack(packed, columns, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Return the codes of the values ``columns`` [1, GROUP] from the bytes that contain them."""
    shifts = columns // (GROUP * BITS // 8) * BITS
    return (packed.to(tl.int32) >> shifts) & ((1 << BITS) - 1)
