"""Computes matrix products with weights in FP8 (E4M3). The method depends on the number of rows.

- Few rows (decodes): memory-bound, so our own product reads the codes and converts them in
  registers. Activations are not quantized.
- Many rows (prefill) in BF16 models whose weights have a scale for each output: compute-bound, so
  activations are quantized as well, each row by its largest number, and FP8 is multiplied by FP8
  (``torch._scaled_mm``). That costs accuracy (docs/cuda.md).
- Many rows of other models: weights are decoded first, and multiplied by torch.
"""

import torch
import triton
from torch.nn import functional

from baton.engine.cuda import fp8_kernels as kernels
from baton.engine.cuda import gemm
from baton.engine.cuda.gemm import GemmTiling
from baton.engine.quantization import E4M3, QuantizedCodes

MAX_WEIGHT_ONLY_ROWS = 128
"""Maximum number of rows whose activations are not quantized. Reading a weight's byte takes as long
as some 200 BF16 operations on an H200 (300 on an H100), and each row needs two operations per
weight, so reading and computing take equally long at 100 to 150 rows."""

MIN_TILE = 16
"""Matrix sizes must be multiples of this for ``torch._scaled_mm``."""

PROGRAMS_PER_PROCESSOR = 2
"""Target number of programs per multiprocessor if there are few rows, so that one program reads
memory while another computes."""

STAGES_BYTES, MAX_STAGES = 96 * 1024, 8
"""Limits on a program's pipeline: the shared memory for the tiles of all its stages, and the number
of stages. A multiprocessor has 228 KiB of shared memory, for two programs."""

DEQUANTIZE_COLUMNS = 1024
"""Columns per program of ``dequantize``."""


def fp8_linear(
    x: torch.Tensor, weight: QuantizedCodes, bias: torch.Tensor | None, processors: int
) -> torch.Tensor:
    """Compute ``x`` [rows, depth] @ ``weight`` [outs, depth].T + ``bias``, without waiting for the
    device."""
    if x.shape[0] <= MAX_WEIGHT_ONLY_ROWS:
        outs = weight.values.shape[0]
        tile = weight_only_tiling(x.dtype, x.shape[0], outs, processors)
        return gemm.gemm_linear(x, weight, bias, tile, triton.cdiv(outs, tile.n))
    if x.dtype is torch.bfloat16 and supports_scaled_mm(weight):
        return scaled_linear(x, weight, bias)
    return functional.linear(x, dequantize(weight, x.dtype), bias)


def weight_only_tiling(dtype: torch.dtype, rows: int, outs: int, processors: int) -> GemmTiling:
    """Return the tile sizes for few rows. All rows are in one tile, so that weights are read once.
    A tile has 64 outputs, or fewer if there would otherwise be too few tiles to keep every
    multiprocessor busy; but each tile reads all rows again, so a tile has at least 16 outputs (32
    for more than eight rows). There are as many pipeline stages as fit into shared memory, to hide
    the memory's latency."""
    m, n = max(MIN_TILE, triton.next_power_of_2(rows)), 64
    least = MIN_TILE if rows <= MIN_TILE // 2 else 2 * MIN_TILE
    while n > least and triton.cdiv(outs, n) < PROGRAMS_PER_PROCESSOR * processors:
        n //= 2
    k = max(64, min(256, 4096 // m))
    stage_bytes = k * (m * dtype.itemsize + n)
    return GemmTiling(m, n, k, 4, max(3, min(MAX_STAGES, STAGES_BYTES // stage_bytes)))


def supports_scaled_mm(weight: QuantizedCodes) -> bool:
    """Whether ``torch._scaled_mm`` accepts this weight."""
    outs, depth = weight.values.shape
    return weight.has_row_scales and outs % MIN_TILE == 0 and depth % MIN_TILE == 0


def scaled_linear(
    x: torch.Tensor, weight: QuantizedCodes, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute ``x`` @ ``weight``.T + ``bias`` with ``x`` quantized to FP8 row by row. The products
    of FP8 numbers are summed in FP32."""
    codes, scales = quantize_rows(x)
    product: torch.Tensor = torch._scaled_mm(
        codes,
        weight.values.t(),
        scale_a=scales,
        scale_b=weight.scales.t(),
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=False,
    )
    return product


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` [rows, depth] in E4M3, and each row's scale, [rows, 1] in FP32: the row's
    largest absolute value divided by 448."""
    x = x.contiguous()
    rows, depth = x.shape
    codes = torch.empty_like(x, dtype=E4M3)
    scales = x.new_empty((rows, 1), dtype=torch.float32)
    padded = triton.next_power_of_2(depth)
    kernels.quantize_rows[(rows,)](
        x, codes, scales, DEPTH=depth, PADDED=padded, num_warps=min(16, max(1, padded // 512))
    )
    return codes, scales


def dequantize(weight: QuantizedCodes, dtype: torch.dtype) -> torch.Tensor:
    """Return the decoded weights, [outs, depth] in ``dtype``."""
    outs, depth = weight.values.shape
    out = torch.empty_like(weight.values, dtype=dtype)
    kernels.dequantize[(outs, triton.cdiv(depth, DEQUANTIZE_COLUMNS))](
        weight.values,
        weight.scales,
        out,
        DEPTH=depth,
        GROUPS=weight.scales.shape[1],
        TALL=weight.rows_per_scale,
        GROUP=weight.columns_per_scale,
        N=DEQUANTIZE_COLUMNS,
    )
    return out
