"""Tests products by tiles: the emulated ones against the order of sums that AMX defines, and the
real ones against the emulated ones; where the processor has no AMX, with trapped instructions."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.engine.native import processor
from baton.engine.native.matrix import KernelThreadPool, PackedMatrix
from baton.engine.native.processor import EMULATED_AMX, limit_instruction_set
from tests.unit.baton.engine.native_helpers import needs_kernels

pytestmark = needs_kernels

SEED = 20261126
STEP = 32
"""The depth of a tile."""

LEAST_NORMAL = 2.0**-126


def flushed(x: np.ndarray) -> np.ndarray:
    """Replace subnormal numbers by zeros."""
    return np.where(np.abs(x) < LEAST_NORMAL, np.float32(0), x).astype(np.float32)


def sums_in_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute x [rows, ins] times the transposed weight [outs, ins] as Intel's manual describes
    TDPBF16PS: for every 32 of depth, a chain of fused multiply-adds over the even depths and one
    over the odd ones, both from zero; then even + odd; then that plus the sum so far. FP64 holds a
    product of two BF16 numbers and its sum with an FP32 number that is not 2^29 times as large or
    as small exactly, so rounding it to FP32 is what a fused multiply-add does."""
    rows, outs = flushed(x.float().numpy()), flushed(weight.float().numpy())
    sums = np.zeros((len(rows), len(outs)), np.float32)
    for first in range(0, rows.shape[1], STEP):
        chains = []
        for parity in (0, 1):
            chain = np.zeros_like(sums)
            for depth in range(first + parity, min(first + STEP, rows.shape[1]), 2):
                product = np.multiply.outer(
                    rows[:, depth].astype(float), outs[:, depth].astype(float)
                )
                chain = flushed((product + chain).astype(np.float32))
            chains.append(chain)
        sums = flushed(sums + flushed(chains[0] + chains[1]))
    return torch.from_numpy(sums)


@pytest.mark.parametrize("ins", [2, 30, 32, 34, 512, 1058])
def test_emulated_products_have_the_order_of_sums_of_amx(ins: int) -> None:
    """The second half of each product is the first half with the opposite sign, in another order.
    So the exact result is zero, and what comes out are the rounding errors, which any other order
    of sums changes."""
    print(f"seed {SEED}")
    chance = np.random.default_rng(SEED)
    x, weight = (
        torch.from_numpy(chance.normal(size=size) * 2.0 ** chance.integers(-3, 4, size=size))
        for size in [(21, ins // 2), (70, ins // 2)]
    )
    order = chance.permutation(ins // 2)
    x = torch.cat([x, x[:, order]], dim=1).bfloat16()
    weight = torch.cat([weight, -weight[:, order]], dim=1).bfloat16()
    with limit_instruction_set(EMULATED_AMX):
        got = PackedMatrix(KernelThreadPool(2), weight)(x)
    wanted = sums_in_order(x, weight)
    assert torch.equal(got, wanted.bfloat16())
    assert ins == 2 or wanted.any(dim=1).all(), "without rounding errors this shows nothing"


def test_subnormal_numbers_count_as_zero() -> None:
    x = torch.full((3, 34), 2.0**-130).bfloat16()
    x[1], x[2] = 2.0**-100, 2.0**-60
    weight = torch.full((5, 34), 2.0**-30).bfloat16()
    with limit_instruction_set(EMULATED_AMX):
        got = PackedMatrix(KernelThreadPool(1), weight)(x)
    assert not got[:2].any() and (got[2].float() == 34 * 2.0**-90).all()


def test_rows_keep_their_bits_in_any_number_of_rows() -> None:
    torch.manual_seed(SEED)
    x, weight = torch.randn(400, 1058).bfloat16(), torch.randn(70, 1058).bfloat16()
    with limit_instruction_set(EMULATED_AMX):
        for quantization in ("none", "int8", "int4"):
            packed = PackedMatrix(KernelThreadPool(2), weight, quantization=quantization)
            together = packed(x)
            for first, count in [(0, 1), (5, 2), (16, 16), (100, 17), (33, 33), (7, 193)]:
                some = slice(first, first + count)
                assert torch.equal(packed(x[some]), together[some]), (quantization, count)


@pytest.mark.skipif(
    processor.has_tiles() or "avx512_bf16" not in processor.supported_instruction_sets(),
    reason="this processor has AMX, or lacks the other instructions of the kernels for AMX",
)
@pytest.mark.timeout(300)
def test_kernels_for_amx_have_the_bits_of_the_emulated_ones_when_trapped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.baton.engine.native.trapped_tiles", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = [int(line.rpartition(": ")[2]) for line in done.stdout.splitlines()]
    assert len(counts) == 5 and all(counts), done.stdout


@pytest.mark.skipif(not processor.has_tiles(), reason="this processor has no AMX")
@pytest.mark.parametrize("scale", [1.0, 2.0**-70], ids=["normal", "near subnormal"])
def test_real_tiles_have_the_bits_of_the_emulated_ones(scale: float) -> None:
    """Random bits with exponents over a wide range; products near the smallest normal number, too.
    A Linux kernel that refuses tiles makes this fail."""
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    assert processor.tiles_permitted()
    weight = (torch.randn(300, 1058) * torch.randn(300, 1058).mul(3).exp() * scale).bfloat16()
    x = (torch.randn(200, 1058) * torch.randn(200, 1058).mul(3).exp() * scale).bfloat16()
    results = []
    for name in ("amx", EMULATED_AMX):
        with limit_instruction_set(name):
            packed = PackedMatrix(KernelThreadPool(2), weight)
        results.append(torch.cat([packed(x[:count]) for count in (1, 16, 17, 48, 200)]))
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))
