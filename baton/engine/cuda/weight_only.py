"""Products of few rows with weights in FP8 (E4M3), without quantized activations. Reading the
weights takes most of the time, so the aim is to read them as fast as memory allows."""

from dataclasses import dataclass, replace

import torch

from baton.engine.cuda import weight_only_kernels as kernels
from baton.engine.cuda.gemm import depth_step
from baton.engine.cuda.launch import KernelLauncher, ceil_div, power_of_2
from baton.engine.quantization import QuantizedCodes

_product, _add_splits = map(KernelLauncher, (kernels.product, kernels.add_splits))

MIN_TILE_ROWS, MAX_TILE_ROWS = 8, 128

WARPS_PER_PROCESSOR = 7
"""The depth is split until there are at least this many warps for each multiprocessor. They belong
to two programs, so that one loads while the other converts or multiplies. More splits cost more
than they gain: on an H100, 12,288 inputs and 4096 outputs for 64 rows took 30.8 us with four splits
and 36.8 with eight."""

MAX_SPLITS, MIN_STEPS = 8, 4
"""Limits on splitting the depth: the number of splits, and the steps in each. A pipeline of three
or four stages needs a few steps to be worth filling."""

FP32_BYTES = 4

SUMS_PER_PROGRAM = 512
"""Results per program of ``add_splits``: four for each thread, which loads them at once."""


@dataclass(frozen=True, slots=True)
class WeightOnlyTiling:
    """A program computes a tile of ``outs`` by ``rows`` results, and sums ``depth`` inputs in each
    step. ``splits`` programs divide the whole depth of a tile among themselves."""

    outs: int
    rows: int
    depth: int
    warps: int
    stages: int
    splits: int


def weight_only_linear(
    x: torch.Tensor,
    weight: QuantizedCodes,
    bias: torch.Tensor | None,
    tiling: WeightOnlyTiling,
) -> torch.Tensor:
    """Compute ``x`` [rows, depth] @ ``weight`` [outs, depth].T + ``bias``, in FP32 until the result
    is stored.

    With the same tiling, a row's result has the same bits at any position and beside any other
    rows, if the matrix units compute each row alike, as Triton's interpreter does. With another
    tiling, it is summed in another order."""
    x = x.contiguous()
    assert weight.values.is_contiguous() and x.shape[1] == weight.values.shape[1]
    (rows, depth), outs = x.shape, weight.values.shape[0]
    group = weight.columns_per_scale if weight.scales.shape[1] > 1 else 0
    step = depth_step(tiling.depth, group)
    split_depth = ceil_div(ceil_div(depth, step), tiling.splits) * step
    splits = ceil_div(depth, split_depth)
    out = x.new_empty((rows, outs))
    sums = x.new_empty((splits, rows, outs), dtype=torch.float32) if splits > 1 else out
    tiles = ceil_div(rows, tiling.rows) * ceil_div(outs, tiling.outs)
    _product[(tiles, splits)](
        x,
        weight.values,
        weight.scales,
        weight.scales if bias is None else bias,
        sums,
        rows,
        outs,
        depth,
        split_depth,
        OUTS=tiling.outs,
        ROWS=tiling.rows,
        K=step,
        WHOLE=depth % step == 0,
        BIAS=bias is not None and splits == 1,
        TALL=weight.rows_per_scale,
        GROUP=group,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    if splits > 1:
        _add_splits[(ceil_div(rows * outs, SUMS_PER_PROGRAM),)](
            sums,
            sums if bias is None else bias,
            out,
            rows * outs,
            outs,
            SPLITS=splits,
            BIAS=bias is not None,
            N=SUMS_PER_PROGRAM,
        )
    return out


def weight_only_tiling(
    dtype: torch.dtype, rows: int, outs: int, depth: int, processors: int
) -> WeightOnlyTiling:
    """Return the tile sizes and the number of splits for a product's shape. All numbers of rows
    with the same next power of two (at least 8) have the same tiling."""
    bucket = max(MIN_TILE_ROWS, power_of_2(rows))
    tile = _tile(dtype, min(bucket, MAX_TILE_ROWS))
    tiles = ceil_div(bucket, tile.rows) * ceil_div(outs, tile.outs)
    most = min(
        MAX_SPLITS, depth // (MIN_STEPS * tile.depth), depth // (2 * bucket * FP32_BYTES)
    )  # so that the splits' sums have at most half of the weight's bytes
    splits = 1
    while 2 * splits <= most and tiles * splits * tile.warps < WARPS_PER_PROCESSOR * processors:
        splits *= 2
    return replace(tile, splits=splits)


def _tile(dtype: torch.dtype, rows: int) -> WeightOnlyTiling:
    """Return the tile sizes for a tile of ``rows`` rows.

    These were the fastest, or nearly so, of up to 13 tilings for each number of rows on an H100
    (docs/results/gpu.md), for 4096 inputs and 24,576 outputs, and 12,288 and 4096."""
    if dtype is torch.float32:
        return WeightOnlyTiling(64, rows, 32, 4, 3, splits=1)
    if rows <= 32:
        return WeightOnlyTiling(64, rows, 128, 4, 4, splits=1)
    if rows <= 64:
        return WeightOnlyTiling(64, rows, 128, 4, 3, splits=1)
    return WeightOnlyTiling(128, rows, 128, 8, 3, splits=1)
