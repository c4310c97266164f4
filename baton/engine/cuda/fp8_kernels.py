"""Triton kernels that convert to E4M3 and back."""

import triton
import triton.language as tl

from baton.engine.attention.triton_kernels import to_e4m3


@triton.jit
def from_e4m3(codes, dtype: tl.constexpr):
    """Convert E4M3 to a wider format, exactly. Triton's own conversion to BF16 takes an F2F
    instruction for each number, which only a few lanes of a multiprocessor execute. Conversions to
    FP16, to FP32 and from there to BF16 have faster instructions."""
    half = codes.to(tl.float16)
    return half if dtype == tl.float16 else half.to(tl.float32).to(dtype)


@triton.jit
def quantize_rows(
    x_ptr,  # [rows, DEPTH], contiguous
    codes_ptr,  # the same shape, in E4M3
    scales_ptr,  # [rows] in FP32
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two >= DEPTH
):
    """Quantize each row so that its largest absolute value becomes 448. There is one program per
    row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    inside = columns < DEPTH
    x = tl.load(x_ptr + row * DEPTH + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-30)  # so that the quotient is finite
    tl.store(codes_ptr + row * DEPTH + columns, to_e4m3(x * (448.0 / largest)), mask=inside)
    tl.store(scales_ptr + row, largest / 448.0)


@triton.jit
def dequantize(
    codes_ptr,  # [outs, DEPTH] in E4M3, contiguous
    scales_ptr,  # [outs / TALL, GROUPS] in FP32
    out_ptr,  # [outs, DEPTH]
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    TALL: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
):
    """Decode weights. There is one program for every ``N`` inputs of an output."""
    out = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inside = columns < DEPTH
    codes = tl.load(codes_ptr + out * DEPTH + columns, mask=inside, other=0.0)
    scale = tl.load(scales_ptr + out // TALL * GROUPS + columns // GROUP, mask=inside, other=0.0)
    wide = codes.to(tl.float32) * scale
    tl.store(out_ptr + out * DEPTH + columns, wide.to(out_ptr.dtype.element_ty), mask=inside)
