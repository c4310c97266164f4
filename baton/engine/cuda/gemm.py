"""Matrix products for ``deterministic``: the same bits for a row in whatever batch.

A library picks its tiles, and whether it splits the depth, by the number of rows; so a row's sums
would have another order beside others. Here one tiling does for all.
"""

from dataclasses import dataclass

import torch
import triton

from baton.engine.cuda import gemm_kernels as kernels

BAND = 8


@dataclass(frozen=True, slots=True)
class Tiling:
    m: int
    n: int
    k: int
    warps: int
    stages: int


def tiling(dtype: torch.dtype) -> Tiling:
    """64 rows are what Hopper's matrix units take at least: fewer rows would take other
    instructions, which may sum in another order."""
    if dtype is torch.float32:
        return Tiling(64, 64, 32, 4, 3)
    return Tiling(64, 128, 64, 4, 4)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, processors: int
) -> torch.Tensor:
    """``x`` [rows, depth] @ ``weight`` [outs, depth].T + ``bias``, in FP32 until it is stored."""
    x = x.contiguous()
    assert weight.is_contiguous() and x.shape[1] == weight.shape[1] and x.dtype is weight.dtype
    (rows, depth), outs = x.shape, weight.shape[0]
    out = x.new_empty((rows, outs))
    tile = tiling(x.dtype)
    tiles = triton.cdiv(rows, tile.m) * triton.cdiv(outs, tile.n)
    kernels.product[(min(tiles, processors),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        outs,
        depth,
        M=tile.m,
        N=tile.n,
        K=tile.k,
        BAND=BAND,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        BIAS=bias is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
