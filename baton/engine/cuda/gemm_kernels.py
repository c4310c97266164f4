"""A matrix product whose order of summation does not depend on the number of rows. Weights may be
in FP8 (E4M3); they are converted in registers."""

import triton
import triton.language as tl

from baton.engine.cuda.e4m3_kernels import from_e4m3


@triton.jit(do_not_specialize=["rows"])  # one row must be summed as many are
def product(
    x_ptr,  # [rows, depth], contiguous
    weight_ptr,  # [outs, depth], contiguous
    scales_ptr,  # [outs / TALL, depth / GROUP, both rounded up] in FP32; read with SCALED only
    bias_ptr,  # [outs]; read with BIAS only
    out_ptr,  # [rows, outs]
    rows,
    outs,
    depth,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BAND: tl.constexpr,  # row tiles computed in succession, so that they share cached weights
    PRECISION: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,  # weights are in FP8
    TALL: tl.constexpr,  # outputs that share a scale
    GROUP: tl.constexpr,  # inputs that share a scale, a multiple of K; 0: all of them
):
    """Compute x @ weight.T (+ bias). The programs divide the tiles among themselves. A tile is
    always M by N, even if fewer rows exist, and its depth is never split."""
    row_tiles, out_tiles = tl.cdiv(rows, M), tl.cdiv(outs, N)
    for tile in range(tl.program_id(0), row_tiles * out_tiles, tl.num_programs(0)):
        band = tile // (BAND * out_tiles)
        first = band * BAND
        height = tl.minimum(row_tiles - first, BAND)
        inner = tile % (BAND * out_tiles)
        row = (first + inner % height) * M + tl.arange(0, M)
        out = inner // height * N + tl.arange(0, N)
        row_exists, out_exists = row < rows, out < outs
        x_line = x_ptr + row.to(tl.int64)[:, None] * depth
        weight_line = weight_ptr + out.to(tl.int64)[:, None] * depth
        scale_line = scales_ptr + out // TALL * (tl.cdiv(depth, GROUP) if GROUP else 1)
        acc = tl.zeros([M, N], tl.float32)
        for begin in range(0, depth, K):
            columns = begin + tl.arange(0, K)
            inside = (columns < depth)[None, :]
            x = tl.load(x_line + columns[None, :], mask=row_exists[:, None] & inside, other=0.0)
            weight = tl.load(
                weight_line + columns[None, :], mask=out_exists[:, None] & inside, other=0.0
            )
            if SCALED:
                weight = from_e4m3(weight, x.dtype)
            if SCALED and GROUP:
                part = tl.dot(x, tl.trans(weight), input_precision=PRECISION)
                scale = tl.load(scale_line + begin // GROUP, mask=out_exists, other=0.0)
                acc += part * scale[None, :]
            else:
                acc = tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
        if SCALED and not GROUP:
            acc *= tl.load(scale_line, mask=out_exists, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + out, mask=out_exists, other=0.0).to(tl.float32)[None, :]
        place = row.to(tl.int64)[:, None] * outs + out[None, :]
        tl.store(out_ptr + place, acc.to(x_ptr.dtype.element_ty),
                 mask=row_exists[:, None] & out_exists[None, :])  # fmt: skip
