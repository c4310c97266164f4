"""Triton kernels for products of few rows with weights in FP8 (E4M3), without quantized
activations."""

import triton
import triton.language as tl

from baton.engine.cuda.e4m3_kernels import from_e4m3


@triton.jit(do_not_specialize=["rows"])  # else, 1 and multiples of 16 would be compiled separately
def product(
    x_ptr,  # [rows, depth], contiguous
    codes_ptr,  # [outs, depth] in E4M3, contiguous
    scales_ptr,  # [outs / TALL, depth / GROUP, both rounded up] in FP32
    bias_ptr,  # [outs]; read with BIAS only
    out_ptr,  # [splits, rows, outs]
    rows,
    outs,
    depth,
    split_depth,  # inputs that a program sums, a multiple of K
    OUTS: tl.constexpr,  # outputs of a tile
    ROWS: tl.constexpr,  # rows of a tile
    K: tl.constexpr,  # inputs of a step
    WHOLE: tl.constexpr,  # depth is a multiple of K
    BIAS: tl.constexpr,
    TALL: tl.constexpr,  # outputs that share a scale
    GROUP: tl.constexpr,  # inputs that share a scale, a multiple of K; 0: all of them
    PRECISION: tl.constexpr,
):
    """Compute x @ weight.T (+ bias). There is one program for each tile of the result and each
    split of the depth; it stores the sum of its split.

    A program computes the transposed tile, weight @ x.T, because matrix units take the first
    operand from registers, where the codes are converted, and at least 64 rows of it."""
    row_tiles = tl.cdiv(rows, ROWS)  # they share weights, so they are computed in succession
    row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(0) // row_tiles
    out = tile * OUTS + tl.arange(0, OUTS)
    weight = tl.minimum(out, outs - 1).to(tl.int64)  # so that loads need no mask
    x_line = x_ptr + row.to(tl.int64)[:, None] * depth
    codes_line = codes_ptr + weight[:, None] * depth
    groups = tl.cdiv(depth, GROUP) if GROUP else 1
    if TALL % OUTS == 0:
        scale_line = scales_ptr + tile * OUTS // TALL * groups
    else:
        scale_line = scales_ptr + (weight // TALL * groups)[:, None]
    row_exists = (row < rows)[:, None]
    acc = tl.zeros([OUTS, ROWS], tl.float32)
    first = tl.program_id(1) * split_depth
    for begin in range(first, tl.minimum(first + split_depth, depth), K):
        columns = (begin + tl.arange(0, K))[None, :]
        if WHOLE:
            x = tl.load(x_line + columns, mask=row_exists, other=0.0)
            codes = tl.load(codes_line + columns)
        else:
            x = tl.load(x_line + columns, mask=row_exists & (columns < depth), other=0.0)
            codes = tl.load(codes_line + columns, mask=columns < depth, other=0.0)
        if GROUP:
            scale = tl.load(scale_line + begin // GROUP)
            part = tl.dot(from_e4m3(codes, x.dtype), tl.trans(x), input_precision=PRECISION)
            acc += part * scale
        else:
            acc = tl.dot(from_e4m3(codes, x.dtype), tl.trans(x), acc, input_precision=PRECISION)
    if not GROUP:
        acc *= tl.load(scale_line)
    if BIAS:
        acc += tl.load(bias_ptr + weight).to(tl.float32)[:, None]
    place = (tl.program_id(1).to(tl.int64) * rows + row)[None, :] * outs + out[:, None]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty),
             mask=(row < rows)[None, :] & (out < outs)[:, None])  # fmt: skip


@triton.jit
def add_splits(
    sums_ptr,  # [SPLITS, size / outs, outs] in FP32
    bias_ptr,  # [outs]; read with BIAS only
    out_ptr,  # [size / outs, outs]
    size,
    outs,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    N: tl.constexpr,
):
    """Add the sums of all splits, always in the same order (+ bias). There is one program for every
    ``N`` results."""
    index = tl.program_id(0) * N + tl.arange(0, N)
    exists = index < size
    total = tl.load(sums_ptr + index, mask=exists, other=0.0)
    for _ in tl.static_range(1, SPLITS):
        sums_ptr += size
        total += tl.load(sums_ptr + index, mask=exists, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + index % outs, mask=exists, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=exists)
