"""Triton kernels of the lossless codec; see :mod:`baton.kv_codec.lossless_layout`.

Planes are divided into *parts* of N values. The escapes of a part follow those of all earlier
parts, so one kernel counts the escapes of each part, the caller adds the counts up, and another
kernel encodes or decodes all parts at once. The constants are those of ``LosslessLayout``, in
capitals; PARTS is the number of parts of a plane, and VALUES that of its values.
"""

import triton
import triton.language as tl

from baton.engine.cuda.kv_codec.value_kernels import bytes_at, has_header, store_header
from baton.kv_codec import lossless_layout
from baton.kv_codec.header import CHUNK_VALUES

_WINDOW = tl.constexpr(lossless_layout.WINDOW)
_MAX_FIRST = tl.constexpr(lossless_layout.MAX_FIRST)
_CHUNK = tl.constexpr(CHUNK_VALUES)
_CHUNK_BYTES = tl.constexpr(CHUNK_VALUES * lossless_layout.CODE_BITS // 8)
_WORD_BYTES = tl.constexpr(CHUNK_VALUES // 8)


@triton.jit
def choose_windows(
    blocks_ptr,  # [num_blocks]: addresses, in 64 bits
    firsts_ptr,  # [num_blocks, PLANES] in 32 bits: the first exponents of the windows
    counts_ptr,  # [num_blocks, PLANES, PARTS] in 32 bits: the numbers of escapes
    PLANES: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    SAMPLE_STRIDE: tl.constexpr,
    FLOAT32: tl.constexpr,
    SAMPLE: tl.constexpr,  # a power of two that is at least the number of sampled values
    N: tl.constexpr,
):
    """Choose the window of each plane, and count its escapes. There is one program for each block
    and plane."""
    plane = tl.program_id(0) % PLANES
    block_ptr = bytes_at(blocks_ptr, tl.program_id(0) // PLANES)
    index = tl.arange(0, SAMPLE)
    samples = index // _CHUNK * (SAMPLE_STRIDE * _CHUNK) + index % _CHUNK
    is_sample = samples < VALUES
    upper = _load_upper(block_ptr, plane * VALUES + samples, is_sample, FLOAT32)
    first = _first_of_window(_exponents(upper), is_sample)
    tl.store(firsts_ptr + tl.program_id(0), first)
    for part in range(PARTS):
        places = part * N + tl.arange(0, N)
        inside = places < VALUES
        exponents = _exponents(_load_upper(block_ptr, plane * VALUES + places, inside, FLOAT32))
        is_escape = inside & (_codes(exponents, first) == _WINDOW)
        num_escapes = tl.sum(is_escape.to(tl.int32), axis=0)
        tl.store(counts_ptr + tl.program_id(0) * PARTS + part, num_escapes)


@triton.jit
def encode(
    blocks_ptr,  # [num_blocks]: addresses, in 64 bits
    encodings_ptr,  # the same, of the encodings
    header_ptr,  # [HEADER_BYTES]
    firsts_ptr,  # as in ``choose_windows``
    counts_ptr,  # as in ``choose_windows``
    ends_ptr,  # [num_blocks, PLANES, PARTS] in 64 bits: the sums of the counts up to each part
    PLANES: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_ESCAPES: tl.constexpr,
    ENDS: tl.constexpr,
    FIRSTS: tl.constexpr,
    CODES: tl.constexpr,
    RESTS: tl.constexpr,
    LOW_HALVES: tl.constexpr,
    ESCAPES: tl.constexpr,
    FLOAT32: tl.constexpr,
    N: tl.constexpr,
):
    """Encode the blocks that have at most MAX_ESCAPES escapes. There is one program for each block,
    plane and part."""
    block, plane = tl.program_id(0) // (PLANES * PARTS), tl.program_id(0) // PARTS % PLANES
    part = tl.program_id(0) % PARTS
    if tl.load(ends_ptr + (block + 1) * (PLANES * PARTS) - 1) <= MAX_ESCAPES:
        block_ptr, encoding_ptr = bytes_at(blocks_ptr, block), bytes_at(encodings_ptr, block)
        if (plane == 0) & (part == 0):
            store_header(encoding_ptr, header_ptr, FIRSTS + PLANES, CODES)
        first = tl.load(firsts_ptr + block * PLANES + plane)
        end = tl.load(ends_ptr + tl.program_id(0))
        if part == PARTS - 1:
            tl.store(encoding_ptr + FIRSTS + plane, first.to(tl.uint8))
            plane_ends_ptr = (encoding_ptr + ENDS).to(tl.pointer_type(tl.uint32))
            tl.store(plane_ends_ptr + plane, end.to(tl.uint32))

        places = part * N + tl.arange(0, N)
        inside = places < VALUES
        upper = _load_upper(block_ptr, plane * VALUES + places, inside, FLOAT32)
        exponents = _exponents(upper)
        codes = _codes(exponents, first)
        rests = ((upper << 1) & 0xFE) | (upper >> 15)
        tl.store(encoding_ptr + RESTS + plane * VALUES + places, rests.to(tl.uint8), mask=inside)
        if FLOAT32:
            words_ptr = block_ptr.to(tl.pointer_type(tl.uint16))
            low = tl.load(words_ptr + 2 * (plane * VALUES + places), mask=inside, other=0)
            halves_ptr = (encoding_ptr + LOW_HALVES).to(tl.pointer_type(tl.uint16))
            tl.store(halves_ptr + plane * VALUES + places, low, mask=inside)
        _store_codes(codes, encoding_ptr + CODES, plane, part, VALUES, N)
        is_escape = inside & (codes == _WINDOW)
        begin = ESCAPES + end - tl.load(counts_ptr + tl.program_id(0))
        offsets = tl.cumsum(is_escape.to(tl.int32), axis=0) - 1
        tl.store(encoding_ptr + begin + offsets, exponents.to(tl.uint8), mask=is_escape)


@triton.jit
def count_escapes(
    encodings_ptr,  # [num_blocks]: addresses, in 64 bits
    counts_ptr,  # [num_blocks, PLANES, PARTS] in 32 bits: the numbers of escapes
    PLANES: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    CODES: tl.constexpr,
    N: tl.constexpr,
):
    """Count the escapes in the codes of each part of an encoding. There is one program for each
    block, plane and part."""
    block, plane = tl.program_id(0) // (PLANES * PARTS), tl.program_id(0) // PARTS % PLANES
    codes_ptr = bytes_at(encodings_ptr, block) + CODES
    places = tl.program_id(0) % PARTS * N + tl.arange(0, N)
    codes = _load_codes(codes_ptr, plane, places, places < VALUES, VALUES)
    tl.store(counts_ptr + tl.program_id(0), tl.sum((codes == _WINDOW).to(tl.int32), axis=0))


@triton.jit
def decode(
    encodings_ptr,  # [num_blocks]: addresses, in 64 bits
    sizes_ptr,  # [num_blocks]: the sizes of the encodings in bytes, in 64 bits
    blocks_ptr,  # addresses of the blocks
    header_ptr,  # [HEADER_BYTES]
    counts_ptr,  # as in ``count_escapes``
    ends_ptr,  # [num_blocks, PLANES, PARTS] in 64 bits: the sums of the counts up to each part
    valid_ptr,  # [num_blocks]: 1, in 32 bits; becomes 0 for invalid encodings
    PLANES: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    ENDS: tl.constexpr,
    FIRSTS: tl.constexpr,
    CODES: tl.constexpr,
    RESTS: tl.constexpr,
    LOW_HALVES: tl.constexpr,
    ESCAPES: tl.constexpr,
    FLOAT32: tl.constexpr,
    N: tl.constexpr,
):
    """Decode blocks. There is one program for each block, plane and part. All encodings have at
    least ESCAPES bytes; no escape is read from behind their end, even if the counts are wrong."""
    block, plane = tl.program_id(0) // (PLANES * PARTS), tl.program_id(0) // PARTS % PLANES
    part = tl.program_id(0) % PARTS
    block_ptr, encoding_ptr = bytes_at(blocks_ptr, block), bytes_at(encodings_ptr, block)
    num_escapes = tl.load(sizes_ptr + block) - ESCAPES
    first = tl.load(encoding_ptr + FIRSTS + plane).to(tl.int32)
    end = tl.load(ends_ptr + tl.program_id(0))
    is_bad = first > _MAX_FIRST
    if part == PARTS - 1:
        plane_ends_ptr = (encoding_ptr + ENDS).to(tl.pointer_type(tl.uint32))
        is_bad |= tl.load(plane_ends_ptr + plane).to(tl.int64) != end
        if plane == PLANES - 1:
            is_bad |= end != num_escapes
            is_bad |= not has_header(encoding_ptr, header_ptr)
    tl.store(valid_ptr + block, 0, mask=is_bad)

    places = part * N + tl.arange(0, N)
    inside = places < VALUES
    codes = _load_codes(encoding_ptr + CODES, plane, places, inside, VALUES)
    is_escape = codes == _WINDOW
    offsets = tl.cumsum(is_escape.to(tl.int32), axis=0) - 1
    offsets += end - tl.load(counts_ptr + tl.program_id(0))
    readable = is_escape & (offsets >= 0) & (offsets < num_escapes)
    escapes = tl.load(encoding_ptr + ESCAPES + offsets, mask=readable, other=0)
    exponents = tl.where(is_escape, escapes.to(tl.int32), codes + first)
    rests_ptr = encoding_ptr + RESTS + plane * VALUES
    rests = tl.load(rests_ptr + places, mask=inside, other=0).to(tl.int32)
    upper = ((exponents & 0xFF) << 7) | (rests >> 1) | ((rests & 1) << 15)
    if FLOAT32:
        halves_ptr = (encoding_ptr + LOW_HALVES).to(tl.pointer_type(tl.uint16))
        low = tl.load(halves_ptr + plane * VALUES + places, mask=inside, other=0)
        words = (upper.to(tl.uint32) << 16) | low.to(tl.uint32)
        words_ptr = block_ptr.to(tl.pointer_type(tl.uint32))
        tl.store(words_ptr + plane * VALUES + places, words, mask=inside)
    else:
        halves_ptr = block_ptr.to(tl.pointer_type(tl.uint16))
        tl.store(halves_ptr + plane * VALUES + places, upper.to(tl.uint16), mask=inside)


@triton.jit
def _load_upper(block_ptr, places, inside, FLOAT32: tl.constexpr):
    """Return the upper 16 bits of values as integers of 32 bits."""
    if FLOAT32:
        words = tl.load(block_ptr.to(tl.pointer_type(tl.uint32)) + places, mask=inside, other=0)
        upper = (words >> 16).to(tl.int32)
    else:
        halves_ptr = block_ptr.to(tl.pointer_type(tl.uint16))
        upper = tl.load(halves_ptr + places, mask=inside, other=0).to(tl.int32)
    return upper


@triton.jit
def _exponents(upper):
    return (upper >> 7) & 0xFF


@triton.jit
def _codes(exponents, first):
    """Return the distances of exponents from the window's first, _WINDOW for escapes."""
    return tl.minimum((exponents - first) & 0xFF, _WINDOW)


@triton.jit
def _first_of_window(exponents, inside):
    """Return the first exponent of the lowest window that contains most of ``exponents``."""
    sums = tl.cumsum(tl.histogram(exponents, 256, mask=inside), axis=0)
    firsts = tl.arange(0, 256)
    upto = tl.gather(sums, tl.minimum(firsts + (_WINDOW - 1), 255), 0)
    before = tl.gather(sums, tl.maximum(firsts - 1, 0), 0)
    windows = upto - tl.where(firsts > 0, before, 0)
    return tl.argmax(tl.where(firsts <= _MAX_FIRST, windows, -1), axis=0)


@triton.jit
def _store_codes(codes, codes_ptr, plane, part, VALUES: tl.constexpr, N: tl.constexpr):
    """Store the codes [N] of a part: for each chunk, a word per bit of the codes."""
    spread = (codes & 1) | ((codes & 2) << 7) | ((codes & 4) << 14)  # a byte for each word
    eights = tl.reshape(spread, (N // 8, 8)) << tl.arange(0, 8)[None, :]
    packed = tl.sum(eights, axis=1)
    index = part * (N // 8) + tl.arange(0, N // 8)
    codes_ptr += plane * (VALUES // _CHUNK) * _CHUNK_BYTES
    codes_ptr += index // _WORD_BYTES * _CHUNK_BYTES + index % _WORD_BYTES
    for bit in tl.static_range(3):
        byte = (packed >> (8 * bit)).to(tl.uint8)
        tl.store(codes_ptr + bit * _WORD_BYTES, byte, mask=index < VALUES // 8)


@triton.jit
def _load_codes(codes_ptr, plane, places, inside, VALUES: tl.constexpr):
    """Return the codes of the values at ``places`` of a plane, and 0 where ``inside`` is false."""
    codes_ptr += plane * (VALUES // _CHUNK) * _CHUNK_BYTES
    codes_ptr += places // _CHUNK * _CHUNK_BYTES + places % _CHUNK // 8
    codes = tl.zeros_like(places)
    for bit in tl.static_range(3):
        byte = tl.load(codes_ptr + bit * _WORD_BYTES, mask=inside, other=0).to(tl.int32)
        codes |= ((byte >> (places % 8)) & 1) << bit
    return codes
