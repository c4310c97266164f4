"""Products with weights in FP8 (E4M3), by the number of rows.

- Few rows, as decodes have: reading weights is what takes time, so our own product reads codes and
  converts them in registers. Rows stay as they are.
- Many rows, as prompts have: multiplying is what takes time, so rows are quantized as well, each by
  its largest number, and FP8 is multiplied by FP8 (``torch._scaled_mm``), in BF16 models whose
  weights have a scale for each output. That costs accuracy (docs/cuda.md).
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
"""At most. A weight's byte is read in the time of some 200 operations in BF16 on an H200, 300 on an
H100, and each row does two with it: there both take as long at 100 to 150 rows."""

MIN_TILE = 16
"""``torch._scaled_mm`` takes matrices of multiples of it."""

PROGRAMS_PER_PROCESSOR = 2
"""Wanted, of few rows: so that one reads while another is done reading."""

STAGES_BYTES, MAX_STAGES = 96 * 1024, 8
"""Of shared memory, for tiles that are on their way: two programs share a processor's 228 KiB."""

DECODED_COLUMNS = 1024
"""Of one program of ``dequantize``."""


def fp8_linear(
    x: torch.Tensor, weight: QuantizedCodes, bias: torch.Tensor | None, processors: int
) -> torch.Tensor:
    """``x`` [rows, depth] @ ``weight`` [outs, depth].T + ``bias``. Waits for nothing."""
    if x.shape[0] <= MAX_WEIGHT_ONLY_ROWS:
        outs = weight.values.shape[0]
        tile = tiling(x.dtype, x.shape[0], outs, processors)
        return gemm.gemm_linear(x, weight, bias, tile, triton.cdiv(outs, tile.n))
    if x.dtype is torch.bfloat16 and can_scale(weight):
        return scaled_linear(x, weight, bias)
    return functional.linear(x, dequantize(weight, x.dtype), bias)


def tiling(dtype: torch.dtype, rows: int, outs: int, processors: int) -> GemmTiling:
    """All rows in one tile, so that weights are read once; and so few outputs that each processor
    has some to read, but not so few that reading rows, again for each tile, takes more. As many
    stages as there is room for: what is on its way hides the memory's latency."""
    m, n = max(MIN_TILE, triton.next_power_of_2(rows)), 64
    least = MIN_TILE if rows <= MIN_TILE // 2 else 2 * MIN_TILE
    while n > least and triton.cdiv(outs, n) < PROGRAMS_PER_PROCESSOR * processors:
        n //= 2
    k = max(64, min(256, 4096 // m))
    stage_bytes = k * (m * dtype.itemsize + n)
    return GemmTiling(m, n, k, 4, max(3, min(MAX_STAGES, STAGES_BYTES // stage_bytes)))


def can_scale(weight: QuantizedCodes) -> bool:
    """Whether ``torch._scaled_mm`` takes it."""
    outs, depth = weight.values.shape
    return weight.has_row_scales and outs % MIN_TILE == 0 and depth % MIN_TILE == 0


def scaled_linear(
    x: torch.Tensor, weight: QuantizedCodes, bias: torch.Tensor | None
) -> torch.Tensor:
    """FP8 by FP8; sums in FP32."""
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
    """``x`` [rows, depth] in E4M3, and what each row was divided by, [rows, 1] in FP32: its largest
    number by 448."""
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
    """[outs, depth] in ``dtype``."""
    outs, depth = weight.values.shape
    out = torch.empty_like(weight.values, dtype=dtype)
    kernels.dequantize[(outs, triton.cdiv(depth, DECODED_COLUMNS))](
        weight.values,
        weight.scales,
        out,
        DEPTH=depth,
        GROUPS=weight.scales.shape[1],
        TALL=weight.tall,
        GROUP=weight.group,
        N=DECODED_COLUMNS,
    )
    return out
