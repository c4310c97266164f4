"""Matrix products of our own: for ``deterministic``, and of weights in FP8.

A library picks its tiles, and whether it splits the depth, by the number of rows; so a row's sums
would have another order beside others. With :func:`fixed_tiling` one tiling does for all.
"""

from dataclasses import dataclass

import torch
import triton

from baton.engine.cuda import gemm_kernels as kernels
from baton.engine.quantization import QuantizedCodes

BAND = 8


@dataclass(frozen=True, slots=True)
class GemmTiling:
    m: int
    n: int
    k: int
    warps: int
    stages: int


def fixed_tiling(dtype: torch.dtype) -> GemmTiling:
    """64 rows are what Hopper's matrix units take at least: fewer rows would take other
    instructions, which may sum in another order."""
    if dtype is torch.float32:
        return GemmTiling(64, 64, 32, 4, 3)
    return GemmTiling(64, 128, 64, 4, 4)


def gemm_linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedCodes,
    bias: torch.Tensor | None,
    tile: GemmTiling,
    programs: int,
) -> torch.Tensor:
    """``x`` [rows, depth] @ ``weight`` [outs, depth].T + ``bias``, in FP32 until it is stored.
    ``programs``: that run at once at most, and share out the tiles."""
    codes = weight if isinstance(weight, QuantizedCodes) else None
    values = codes.values if codes else weight
    assert isinstance(values, torch.Tensor)
    x = x.contiguous()
    assert values.is_contiguous() and x.shape[1] == values.shape[1]
    assert codes is not None or x.dtype is values.dtype
    (rows, depth), outs = x.shape, values.shape[0]
    out = x.new_empty((rows, outs))
    tiles = triton.cdiv(rows, tile.m) * triton.cdiv(outs, tile.n)
    group = codes.group if codes and codes.scales.shape[1] > 1 else 0
    kernels.product[(min(tiles, programs),)](
        x,
        values,
        codes.scales if codes else values,
        values if bias is None else bias,
        out,
        rows,
        outs,
        depth,
        M=tile.m,
        N=tile.n,
        K=depth_step(tile.k, group),
        BAND=BAND,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        BIAS=bias is not None,
        SCALED=codes is not None,
        TALL=codes.tall if codes else 1,
        GROUP=group,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def depth_step(most: int, group: int) -> int:
    """Inputs that are summed at once: a power of two that divides ``group``, if there is one, so
    that all have the same scale."""
    return min(most, group & -group) if group else most
