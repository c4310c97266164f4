"""Tests the native kernels one by one, against torch and FP64."""

import ctypes
import threading

import numpy as np
import pytest
import torch
from torch.nn import functional

from baton.engine.attention.base import PackedBatch
from baton.engine.native.decoder import NativeAttention, NativeDecoder, _attention_shape
from baton.engine.native.library import call_checked, load
from baton.engine.native.matrix import KernelThreadPool, PackedMatrix
from baton.engine.native.processor import EMULATED_AMX, best_instruction_set
from baton.engine.shards import StoredTensor
from tests.unit.baton.engine.native_helpers import (
    FORMATS,
    each_instruction_set,
    needs_kernels,
    pool_over,
)

__all__ = ["each_instruction_set"]

pytestmark = [needs_kernels, pytest.mark.usefixtures("each_instruction_set")]

SEED = 20261121
SHAPES = [(1, 2), (63, 30), (64, 16), (65, 18), (129, 256), (200, 700)]
"""Numbers of outputs and inputs, close to the sizes of a panel, a vector, and a block of depth."""

ROWS = [1, 2, 5, 6, 7, 13, 193, 400]
"""Row counts, close to the number of rows computed at once and to a block of rows."""


def whole(chance: np.random.Generator, *shape: int) -> torch.Tensor:
    """Return small whole numbers, whose sums of products are exact in every format."""
    return torch.from_numpy(chance.integers(-4, 5, size=shape)).double()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_small_whole_numbers_are_exact(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    chance = np.random.default_rng(SEED)
    team = KernelThreadPool(3)
    weight = whole(chance, *shape)
    packed = PackedMatrix(team, weight.to(dtype))
    for count in ROWS:
        x = whole(chance, count, shape[1])
        assert torch.equal(packed(x.to(dtype)), (x @ weight.T).to(dtype)), f"{count} rows"


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_products_are_close_to_fp64(dtype: torch.dtype) -> None:
    """The tolerance is the worst-case rounding error of summing 700 products in FP32, plus one
    rounding to ``dtype``."""
    torch.manual_seed(SEED)
    x, weight = torch.randn(37, 700).to(dtype), torch.randn(100, 700).to(dtype)
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    got = PackedMatrix(KernelThreadPool(2), weight)(x).double()
    bound = sizes * 700 * 2.0**-24 + exact.abs() * torch.finfo(dtype).eps / 2
    assert ((got - exact).abs() <= bound * 1.001).all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("size", [1, 31, 32, 33, 150])
def test_gated_product_equals_silu_gate_times_up(dtype: torch.dtype, size: int) -> None:
    """The gate and up products are exact sums. Only the last place of the exponential in SiLU may
    differ from torch's."""
    chance = np.random.default_rng(SEED)
    weight, x = whole(chance, 2 * size, 20), whole(chance, 9, 20) / 8
    got = PackedMatrix(KernelThreadPool(2), weight.to(dtype), gated=True)(x.to(dtype))
    gate, up = functional.linear(x.to(dtype), weight.to(dtype)).chunk(2, dim=-1)
    torch.testing.assert_close(
        got, functional.silu(gate) * up, rtol=torch.finfo(dtype).eps * 2, atol=1e-30
    )


def exponentials(x: torch.Tensor) -> torch.Tensor:
    got = torch.empty_like(x)
    load().baton_exponential(x.data_ptr(), x.numel(), got.data_ptr())
    return got


def test_exponential_is_within_one_unit_in_the_last_place() -> None:
    near = torch.from_numpy(np.random.default_rng(SEED).uniform(-87, 88, size=2_000_003)).float()
    exact = near.double().exp()
    ulp = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    worst = ((exponentials(near).double() - exact).abs() / ulp).max()
    print(f"worst {worst:.3f} units, seed {SEED}")
    assert worst < 1.0


def test_exponential_of_special_values() -> None:
    inf = float("inf")
    x = torch.tensor([0.0, -0.0, -inf, -200.0, 200.0, inf, float("nan"), -100.0, 88.7])
    got = exponentials(x)
    assert got[:6].tolist() == [1.0, 1.0, 0.0, 0.0, inf, inf]
    assert got[6].isnan()
    torch.testing.assert_close(got[7:].double(), x[7:].double().exp(), rtol=2e-7, atol=1e-45)


def powers_of_two(x: torch.Tensor) -> torch.Tensor:
    got = torch.empty_like(x)
    load().baton_power_of_two(x.data_ptr(), x.numel(), got.data_ptr())
    return got


def test_power_of_two_is_within_its_relative_error() -> None:
    x = torch.from_numpy(np.random.default_rng(SEED).uniform(-126, 127, size=2_000_003)).float()
    exact = x.double().exp2()
    worst = ((powers_of_two(x).double() - exact) / exact).abs().max().item()
    print(f"worst {worst:.2e}, seed {SEED}")
    assert worst < 2**-22
    whole = torch.arange(-126.0, 128.0)
    assert torch.equal(powers_of_two(whole), whole.double().exp2().float())


def test_power_of_two_of_special_values() -> None:
    inf = float("inf")
    got = powers_of_two(torch.tensor([-0.0, 0.0, -inf, -200.0, -126.5, 128.0, inf, float("nan")]))
    assert got[:7].tolist() == [1.0, 1.0, *[2.0**-126] * 3, inf, inf]
    assert got[7].isnan()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_embedding_reads_rows_of_a_packed_matrix(dtype: torch.dtype) -> None:
    """Models with tied embeddings read the rows of the embedding from the packed matrix of the
    head."""
    table = torch.randn(130, 48).to(dtype)
    pool = pool_over(torch.zeros(1, 1, 2, 4, 1, 4, dtype=dtype))
    shape = _attention_shape(pool, 1)
    shape.vocabulary, shape.hidden = table.shape
    core = NativeDecoder(shape, pool, KernelThreadPool(2))
    core.set_head(
        StoredTensor([torch.ones(48, dtype=dtype)], [48]), StoredTensor([table], table.shape)
    )
    ids = torch.tensor([129, 0, 63, 64, 64, 127, 128])
    assert torch.equal(core.embed(ids), table[ids])
    for wrong in (-1, 130):
        with pytest.raises(AssertionError, match="not in the vocabulary"):
            core.embed(torch.tensor([0, wrong]))


def batch(
    starts: list[int], counts: list[int], tables: list[list[int]], offsets: list[int] | None = None
) -> PackedBatch:
    """Return a batch with exactly these fields, valid or not; the kernels read no other fields."""
    places = offsets or [0, *np.cumsum(counts).tolist()]
    unused = torch.empty(0, dtype=torch.int64)
    ends = tuple(s + c for s, c in zip(starts, counts, strict=True))
    return PackedBatch(
        tuple(starts), ends, tuple(places), 0, unused, unused, torch.tensor([tables])
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (batch([0], [2], [[4]]), "a block is not in the pool"),
        (batch([0], [2], [[-1]]), "a block is not in the pool"),
        (batch([15], [2], [[0]]), "a block table is shorter than its context"),
        (batch([63], [2], [[0, 1, 2, 3, 0]]), "a context is longer than there are positions"),
        (batch([-1], [2], [[0]]), "a row starts before 0"),
        (batch([0, 0], [2, 0], [[0], [1]]), "a row has no tokens"),
        (batch([0], [2], [[0]], offsets=[1, 2]), "offsets don't begin with 0"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_invalid_batch_writes_nothing(wrong: PackedBatch, message: str) -> None:
    pool = torch.zeros(4, 2, 2, 16, 1, 8)
    held = pool_over(pool)
    core = NativeDecoder(_attention_shape(held, 2), held, KernelThreadPool(1))
    q, k = torch.ones(2, 2, 8), torch.ones(2, 1, 8)
    with pytest.raises(AssertionError, match=message):
        core.attend(wrong, 0, q, k, k)
    with pytest.raises(AssertionError, match="no such layer"):
        core.attend(batch([0], [2], [[0]]), 2, q, k, k)
    assert not pool.any()


def test_later_keys_are_masked() -> None:
    """The earlier of two queries in a tile must not be affected by the huge score of the later
    query's key."""
    pool = torch.full((4, 1, 2, 16, 1, 8), float("nan"))
    attention = NativeAttention(pool_over(pool))
    attention.prepare(batch([0], [2], [[2]]))
    q, k = torch.ones(2, 1, 8), torch.tensor([0.0, 1e30]).view(2, 1, 1).expand(2, 1, 8).clone()
    v = torch.tensor([3.0, 5.0]).view(2, 1, 1).expand(2, 1, 8).clone()
    assert attention.attend(0, q, k, v)[:, 0, 0].tolist() == [3.0, 5.0]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_thread_pool_serves_concurrent_callers(size: int) -> None:
    """Three threads call one pool concurrently, and get right results. The pool may have more
    threads than the machine has processors, and is deleted at the end."""
    chance = np.random.default_rng(SEED)
    team = KernelThreadPool(size)
    weight = whole(chance, 300, 64)
    packed, x = PackedMatrix(team, weight.float()), whole(chance, 3, 64)
    wanted = (x @ weight.T).float()
    right: list[bool] = []

    def ask() -> None:
        right.extend(torch.equal(packed(x.float()), wanted) for _ in range(50))

    callers = [threading.Thread(target=ask) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True] * 150


def test_thread_pool_changes_its_size() -> None:
    """The number of threads changes between runs, some of which another thread starts. Products
    stay right throughout."""
    chance = np.random.default_rng(SEED)
    team = KernelThreadPool(4)
    weight = whole(chance, 300, 64)
    packed, x = PackedMatrix(team, weight.float()), whole(chance, 3, 64)
    wanted = (x @ weight.T).float()
    right: list[bool] = []

    def ask() -> None:
        right.extend(torch.equal(packed(x.float()), wanted) for _ in range(300))

    other = threading.Thread(target=ask)
    other.start()
    for _ in range(300):
        team.use(int(chance.integers(1, 6)))
        right.append(torch.equal(packed(x.float()), wanted))
    other.join()
    assert right == [True] * 600


def test_ceiling_probes_are_not_optimized_away() -> None:
    """The probes return sums of all that they compute or read, so that the compiler can't omit the
    work."""
    assert load().baton_peak_products(1, 1000) == 24 * 16 * 2 * 1000
    has_tiles = best_instruction_set() in ("amx", EMULATED_AMX)
    assert load().baton_peak_tile_products(10) == (320 if has_tiles else 0)
    numbers = torch.arange(64, dtype=torch.int32)
    assert load().baton_peak_reads(numbers.data_ptr(), 256) == 0 ^ _folded(numbers)


def _folded(numbers: torch.Tensor) -> int:
    """Combine four vectors of sixteen numbers by exclusive or, and return the sum of the result."""
    folded = np.bitwise_xor.reduce(numbers.numpy().reshape(4, 16), axis=0)
    return ctypes.c_int32(int(folded.sum())).value


def test_kernel_error_raises_an_assertion() -> None:
    with pytest.raises(AssertionError, match="so it was told"):
        call_checked(lambda: b"so it was told")
