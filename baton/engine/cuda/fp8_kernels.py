"""Triton kernels that quantize rows to E4M3 and decode weights."""

import triton
import triton.language as tl

from baton.engine.cuda.e4m3_kernels import to_e4m3


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
