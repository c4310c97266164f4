"""Runs products with weights in FP8 in Triton's interpreter, or on a GPU, and compares them with
torch's products with the decoded weights; called by :mod:`tests.unit.baton.engine.cuda_cases`."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from baton.engine.cuda import fp8
from baton.engine.cuda.weight_only import WeightOnlyTiling, weight_only_linear
from baton.engine.quantization import MAX_E4M3, QuantizedCodes, quantize, to_e4m3
from tests.unit.baton.engine.cuda_cases import (
    SEED,
    DeviceUnderTest,
    assert_near,
    assert_neighbouring_codes,
    quantize_in_blocks,
)


def all_checks(place: DeviceUnderTest) -> dict[str, Iterator[str]]:
    return {
        "products in FP8": fp8_products_agree(place),
        "products in FP8 with split depth": fp8_products_with_split_depth_agree(place),
        "rows in FP8": fp8_row_quantization_agrees(place),
        "FP8 by FP8": fp8_by_fp8_products_agree(place),
    }


def fp8_products_agree(place: DeviceUnderTest) -> Iterator[str]:
    """Check that matrix products with FP8 weights agree with products with the decoded weights.
    Weights with a scale for each output or for large blocks are multiplied with the smallest and
    the largest number of rows of several tilings, and with so many rows that the weights are
    decoded first. The others, and FP32, which compile slowly, are multiplied with fewer numbers of
    rows."""
    most = fp8.MAX_WEIGHT_ONLY_ROWS
    chance = torch.Generator().manual_seed(SEED)
    for dtype in place.dtypes:
        for number, (codes, bias) in enumerate(fp8_weights(70, 100, chance)):
            thorough = number % 2 == 0 and dtype is not torch.float32
            worst = 0.0
            for rows in (1, 5, 16, 17, 64, 128, most, most + 3) if thorough else (5, 128):
                x = torch.randn(rows, 100, generator=chance).to(dtype)
                given = (x.to(place.device), codes_at(place, codes), bias.to(place.device, dtype))
                exact = functional.linear(x.float(), codes.decode(), bias.to(dtype).float())
                worst = max(worst, assert_near(fp8.fp8_linear(*given, 3), exact.to(dtype)))
            shape = f"{[*codes.scales.shape]} scales"
            yield f"product in FP8, {dtype}, {shape}: within {worst:.1e}"


def fp8_products_with_split_depth_agree(place: DeviceUnderTest) -> Iterator[str]:
    """Check products with FP8 weights whose depth is split among several programs, evenly or not:
    without bias, with a scale for each output, and with bias and a scale for each block. A row must
    have the same bits beside other rows."""
    chance = torch.Generator().manual_seed(SEED)
    for dtype in place.dtypes:
        for depth, splits in ((512, 4), (300, 3), (100, 8)):
            worst = 0.0
            tiling = WeightOnlyTiling(64, 16, 64, 4, 2, splits)
            for number, (codes, bias) in enumerate(fp8_weights(70, depth, chance)):
                if number % 2:
                    continue
                offset = bias.to(dtype) if number else None
                x = torch.randn(21, depth, generator=chance).to(dtype)
                exact = functional.linear(
                    x.float(), codes.decode(), None if offset is None else offset.float()
                )
                x, weight = x.to(place.device), codes_at(place, codes)
                offset = None if offset is None else offset.to(place.device)
                got = weight_only_linear(x, weight, offset, tiling)
                worst = max(worst, assert_near(got, exact.to(dtype)))
                for some in (slice(0, 1), slice(7, 21)):
                    alone = weight_only_linear(x[some], weight, offset, tiling)
                    assert torch.equal(alone, got[some])
            yield f"product in FP8, {dtype}, {depth} inputs in {splits}: within {worst:.1e}"


def fp8_weights(
    outs: int, depth: int, chance: torch.Generator
) -> Iterator[tuple[QuantizedCodes, torch.Tensor]]:
    """Yield matrices [outs, depth] in FP8, with biases [outs] in FP32: with a scale for each
    output, for each block of weights (smaller and larger than a tile's outputs), and for all."""
    weight, bias = torch.randn(outs, depth, generator=chance), torch.randn(outs, generator=chance)
    yield quantize(weight, "fp8"), bias
    for block in (16, 64, 2 * max(outs, depth)):
        yield quantize_in_blocks(weight, block), bias


def codes_at(place: DeviceUnderTest, codes: QuantizedCodes) -> QuantizedCodes:
    values, scales = (part.to(place.device) for part in (codes.values, codes.scales))
    return replace(codes, values=values, scales=scales)


def fp8_row_quantization_agrees(place: DeviceUnderTest) -> Iterator[str]:
    """Check the FP8 codes and the scales of quantized rows: rows of very different magnitudes, and
    a row of zeros."""
    chance = torch.Generator().manual_seed(SEED)
    x = torch.randn(6, 96, generator=chance) * torch.logspace(-4, 4, 6)[:, None]
    x[2] = 0
    for dtype in place.dtypes:
        wide = x.to(dtype).float()
        largest = wide.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        codes, scales = fp8.quantize_rows(x.to(place.device, dtype))
        assert_near(scales.cpu(), largest / MAX_E4M3)
        assert_neighbouring_codes(codes.cpu(), to_e4m3(wide * (MAX_E4M3 / largest)))
        yield f"rows in FP8, {dtype}: the nearest codes"


def fp8_by_fp8_products_agree(place: DeviceUnderTest) -> Iterator[str]:
    """Check products of FP8 weights with rows that are quantized to FP8. Without a GPU, the
    replacement of ``torch._scaled_mm`` in ``interpreter.py`` also checks its
    operands."""
    chance = torch.Generator().manual_seed(SEED)
    weight = torch.randn(64, 96, generator=chance) * torch.logspace(-2, 2, 64)[:, None]
    x, bias = torch.randn(150, 96, generator=chance), torch.randn(64, generator=chance)
    dtype = torch.bfloat16
    codes = quantize(weight, "fp8")
    there = codes_at(place, codes)
    rounded = x.to(dtype).float()
    largest = rounded.abs().amax(dim=1, keepdim=True)
    kept = to_e4m3(rounded * (MAX_E4M3 / largest)).float() * (largest / MAX_E4M3)
    wanted = functional.linear(kept, codes.decode(), bias.to(dtype).float())
    assert fp8.supports_scaled_mm(there)
    got = fp8.scaled_linear(x.to(place.device, dtype), there, bias.to(place.device, dtype))
    # The division is computed in another order, so that a code may be the neighbouring code, which
    # differs by an eighth.
    worst = assert_near(got.cpu().float(), wanted, dtype=torch.bfloat16)
    exact = functional.linear(rounded, codes.decode(), bias.to(dtype).float())
    lost = float((wanted - exact).norm() / exact.norm())
    assert lost <= 0.04, "quantizing the rows to FP8 must change the products by at most 4 %"
    yield f"FP8 by FP8: within {worst:.1e}; rows in FP8 lose {lost:.1%}"
