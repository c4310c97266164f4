"""Measures the error and speed of FP8 weights and FP8 KV on a GPU."""

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from baton.engine.quantization import E4M3, MAX_E4M3, QuantizedCodes, quantize, to_e4m3
from benchmarks.gpu import kernels
from benchmarks.gpu.kernels import QWEN3_8B, copy_rate, free
from benchmarks.gpu.timing import GpuTableRow, device, kernel_seconds, matrix_rate

BLOCK = 128
"""In FP8 checkpoints, each square of this many outputs by this many inputs shares a scale."""

ROWS = (1, 8, 64, 128, 256, 8192)
SHAPES = ((4096, 24_576), (12_288, 4096))
"""Matrix shapes (inputs, outputs), which make up most of a layer of Qwen3-8B."""

LONG_CONTEXTS = (1024, 8192)
MOST_LOST = 0.06
"""The largest allowed relative error of a product. Rounding to E4M3 causes an error of about 0.027
in the weights, and as much again in the rows."""


def weights(rounds: int) -> Iterator[GpuTableRow]:
    """Measure FP8 weights: matrix products with several numbers of rows, and whole steps."""
    for depth, outs in SHAPES:
        weight = torch.randn(outs, depth, device=device(), dtype=torch.bfloat16)
        kinds = {"": quantize(weight, "fp8"), ", blocks": _in_blocks(weight)}
        for rows in ROWS:
            x = torch.randn(rows, depth, device=device(), dtype=torch.bfloat16)
            for suffix, codes in kinds.items():
                yield _product(x, weight, codes, suffix, rounds)
        del weight, kinds, x
        free()
    loaded = kernels.random_runner(QWEN3_8B, "fp8")
    yield from kernels.prefill_steps(loaded, rounds, ", FP8 weights")
    yield from kernels.decode_grid(loaded, (1024,), rounds, ", FP8 weights")
    del loaded
    free()


def kv(rounds: int) -> Iterator[GpuTableRow]:
    """Measure FP8 KV: attention alone, and whole steps with long contexts."""
    yield from kernels.prefill_attention(rounds, E4M3)
    yield from kernels.decode_attention(rounds, E4M3)
    loaded = kernels.random_runner(QWEN3_8B, kept=E4M3)
    yield from kernels.decode_grid(loaded, LONG_CONTEXTS, rounds, ", FP8 KV")
    del loaded
    free()


def _product(
    x: torch.Tensor, weight: torch.Tensor, codes: QuantizedCodes, suffix: str, rounds: int
) -> GpuTableRow:
    """Measure the error relative to the product with unquantized weights, and the speed relative to
    a plain copy (if there are few rows) or to a large BF16 product."""
    from baton.engine.cuda import fp8

    processors = torch.cuda.get_device_properties(device()).multi_processor_count
    product = partial(fp8.fp8_linear, x, codes, None, processors)
    exact = functional.linear(x[:BLOCK].float(), weight.float())
    lost = float((product()[:BLOCK].float() - exact).norm() / exact.norm())
    ours = kernel_seconds(product, rounds)
    peer = kernel_seconds(partial(functional.linear, x, weight), rounds)
    rows, (outs, depth) = x.shape[0], weight.shape
    what = f"product in FP8, {rows} x {depth} x {outs}{suffix}"
    if rows <= fp8.MAX_UNQUANTIZED_ROWS:
        rate = codes.values.nbytes / ours
        result, ratio, against = f"{rate / 1e9:.0f} GB/s", rate / copy_rate(), "a copy's bytes"
    else:
        rate = 2 * rows * outs * depth / ours
        ratio, against = rate / matrix_rate(), "products' rate"
        result = f"{rate / 1e12:.0f} TFLOP/s"
    result += f", {peer / ours:.2f} x BF16, loses {lost:.1%}"
    return GpuTableRow(what, result, ours, ratio, against, ok=lost <= MOST_LOST)


def _in_blocks(weight: torch.Tensor) -> QuantizedCodes:
    outs, ins = weight.shape
    grid = weight.float().view(outs // BLOCK, BLOCK, ins // BLOCK, BLOCK)
    scales = grid.abs().amax(dim=(1, 3)) / MAX_E4M3
    values = to_e4m3(grid / scales[:, None, :, None]).view(weight.shape)
    return QuantizedCodes(values, scales, BLOCK, BLOCK)
