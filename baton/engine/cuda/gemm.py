"""Our own matrix product, used with the setting ``deterministic``. A library such as cuBLAS chooses
its tiles, and whether to split the depth (K), by the number of rows, so the order in which it sums
a row's products depends on the batch. The tile sizes of :func:`fixed_tiling` are the same for all
batches.
"""

from dataclasses import dataclass

import torch

from baton.engine.cuda import gemm_kernels as kernels
from baton.engine.cuda.launch import KernelLauncher, ceil_div
from baton.engine.quantization import QuantizedCodes

_product = KernelLauncher(kernels.product)

BAND = 8


@dataclass(frozen=True, slots=True)
class GemmTiling:
    m: int
    n: int
    k: int
    warps: int
    stages: int


def fixed_tiling(dtype: torch.dtype) -> GemmTiling:
    """Return the tile sizes for the setting ``deterministic``. Hopper's matrix units take at least
    64 rows; fewer rows would need other instructions, which may sum in another order."""
    if dtype is torch.float32:
        return GemmTiling(64, 64, 32, 4, 3)
    return GemmTiling(128, 256, 64, 8, 3)


def gemm_linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedCodes,
    bias: torch.Tensor | None,
    tile: GemmTiling,
    programs: int,
) -> torch.Tensor:
    """Compute ``x`` [rows, depth] @ ``weight`` [outs, depth].T + ``bias``, in FP32 until the result
    is stored. At most ``programs`` programs are launched; they divide the tiles among
    themselves."""
    codes = weight if isinstance(weight, QuantizedCodes) else None
    values = codes.values if codes else weight
    assert isinstance(values, torch.Tensor)
    x = x.contiguous()
    assert values.is_contiguous() and x.shape[1] == values.shape[1]
    assert codes is not None or x.dtype is values.dtype
    (rows, depth), outs = x.shape, values.shape[0]
    out = x.new_empty((rows, outs))
    tiles = ceil_div(rows, tile.m) * ceil_div(outs, tile.n)
    group = codes.columns_per_scale if codes and codes.scales.shape[1] > 1 else 0
    _product[(min(tiles, programs),)](
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
        TALL=codes.rows_per_scale if codes else 1,
        GROUP=group,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def depth_step(most: int, group: int) -> int:
    """Return how many elements along the inner dimension are summed in a step. They must share a
    scale. If each ``group`` of elements has a scale, the result is the largest power of two that
    divides ``group``, but at most ``most``; if all share one (``group`` is 0), it is ``most``."""
    return min(most, group & -group) if group else most
