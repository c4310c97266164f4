"""Computes matrix products with weights in FP8 (E4M3). The method depends on the number of rows.

- Few rows (decodes): memory-bound, so our own product reads the codes and converts them in
  registers (:mod:`baton.engine.cuda.weight_only`). Activations are not quantized.
- Many rows (prefill) in BF16 models whose weights have a scale for each output: compute-bound, so
  activations are quantized as well, each row by its largest number, and FP8 is multiplied by FP8
  (``torch._scaled_mm``). That costs accuracy (docs/cuda.md).
- Many rows of other models: weights are decoded first, and multiplied by torch.
"""

import torch
from torch.nn import functional

from baton.engine.cuda import fp8_kernels as kernels
from baton.engine.cuda.launch import KernelLauncher, ceil_div, power_of_2
from baton.engine.cuda.weight_only import weight_only_linear, weight_only_tiling
from baton.engine.quantization import E4M3, QuantizedCodes

_quantize_rows, _dequantize = map(KernelLauncher, (kernels.quantize_rows, kernels.dequantize))

MAX_UNQUANTIZED_ROWS = 128
"""Number of rows above which activations may be quantized. Reading a weight's byte takes as long as
some 200 BF16 operations on an H200 (300 on an H100), and each row needs two operations per weight,
so reading and computing take equally long at 100 to 150 rows."""

MAX_WEIGHT_ONLY_ROWS = 256
"""Maximum number of rows for which weights are converted in registers. With 256 rows, on an H100,
that took 161 us for 100 million weights with scales for blocks; decoding them into memory and
multiplying there took 196 us."""

MIN_TILE = 16
"""Matrix sizes must be multiples of this for ``torch._scaled_mm``."""

DEQUANTIZE_COLUMNS = 1024
"""Columns per program of ``dequantize``."""


def fp8_linear(
    x: torch.Tensor, weight: QuantizedCodes, bias: torch.Tensor | None, processors: int
) -> torch.Tensor:
    """Compute ``x`` [rows, depth] @ ``weight`` [outs, depth].T + ``bias``, without waiting for the
    device."""
    rows, (outs, depth) = x.shape[0], weight.values.shape
    is_large = rows > MAX_UNQUANTIZED_ROWS
    if is_large and x.dtype is torch.bfloat16 and supports_scaled_mm(weight):
        return scaled_linear(x, weight, bias)
    if rows <= MAX_WEIGHT_ONLY_ROWS:
        tiling = weight_only_tiling(x.dtype, rows, outs, depth, processors)
        return weight_only_linear(x, weight, bias, tiling)
    return functional.linear(x, dequantize(weight, x.dtype), bias)


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
    padded = power_of_2(depth)
    _quantize_rows[(rows,)](
        x, codes, scales, DEPTH=depth, PADDED=padded, num_warps=min(16, max(1, padded // 512))
    )
    return codes, scales


def dequantize(weight: QuantizedCodes, dtype: torch.dtype) -> torch.Tensor:
    """Return the decoded weights, [outs, depth] in ``dtype``."""
    outs, depth = weight.values.shape
    out = torch.empty_like(weight.values, dtype=dtype)
    _dequantize[(outs, ceil_div(depth, DEQUANTIZE_COLUMNS))](
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
