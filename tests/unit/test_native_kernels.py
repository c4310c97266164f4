"""The kernels one by one, against what torch and FP64 say."""

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
from baton.engine.shards import StoredTensor
from tests.unit.native_house import FORMATS, each_processor, needs_kernels

__all__ = ["each_processor"]

pytestmark = [needs_kernels, pytest.mark.usefixtures("each_processor")]

SEED = 20261121
SHAPES = [(1, 2), (63, 30), (64, 16), (65, 18), (129, 256), (200, 700)]
"""Outputs and inputs: around a panel, a vector, and a block of depth."""

ROWS = [1, 2, 5, 6, 7, 13, 193, 400]
"""Around what is computed at once, and around a block of rows."""


def whole(chance: np.random.Generator, *shape: int) -> torch.Tensor:
    """Small whole numbers, whose sums of products no format rounds before its end."""
    return torch.from_numpy(chance.integers(-4, 5, size=shape)).double()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_exact_where_sums_are(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    chance = np.random.default_rng(SEED)
    team = KernelThreadPool(3)
    weight = whole(chance, *shape)
    packed = PackedMatrix(team, weight.to(dtype))
    for count in ROWS:
        x = whole(chance, count, shape[1])
        assert torch.equal(packed(x.to(dtype)), (x @ weight.T).to(dtype)), f"{count} rows"


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_products_are_near_those_of_fp64(dtype: torch.dtype) -> None:
    """Within what adding 700 numbers in FP32 may lose, and one rounding to the format."""
    torch.manual_seed(SEED)
    x, weight = torch.randn(37, 700).to(dtype), torch.randn(100, 700).to(dtype)
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    got = PackedMatrix(KernelThreadPool(2), weight)(x).double()
    bound = sizes * 700 * 2.0**-24 + exact.abs() * torch.finfo(dtype).eps / 2
    assert ((got - exact).abs() <= bound * 1.001).all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("size", [1, 31, 32, 33, 150])
def test_gate_and_up(dtype: torch.dtype, size: int) -> None:
    """SiLU of exact sums, times exact sums: all that differs is the exponential's last place."""
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


def test_the_exponential_is_within_one_unit_in_the_last_place() -> None:
    near = torch.from_numpy(np.random.default_rng(SEED).uniform(-87, 88, size=2_000_003)).float()
    exact = near.double().exp()
    ulp = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    worst = ((exponentials(near).double() - exact).abs() / ulp).max()
    print(f"worst {worst:.3f} units, seed {SEED}")
    assert worst < 1.0


def test_the_exponential_at_its_ends() -> None:
    inf = float("inf")
    x = torch.tensor([0.0, -0.0, -inf, -200.0, 200.0, inf, float("nan"), -100.0, 88.7])
    got = exponentials(x)
    assert got[:6].tolist() == [1.0, 1.0, 0.0, 0.0, inf, inf]
    assert got[6].isnan()
    torch.testing.assert_close(got[7:].double(), x[7:].double().exp(), rtol=2e-7, atol=1e-45)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_rows_come_back_out_of_a_packed_matrix(dtype: torch.dtype) -> None:
    """Where the head is the embedding, too."""
    table = torch.randn(130, 48).to(dtype)
    pool = torch.zeros(1, 1, 2, 4, 1, 4, dtype=dtype)
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
    """As it is told, right or wrong; the kernels look at these fields alone."""
    places = offsets or [0, *np.cumsum(counts).tolist()]
    unused = torch.empty(0, dtype=torch.int64)
    ends = tuple(s + c for s, c in zip(starts, counts, strict=True))
    return PackedBatch(tuple(starts), ends, tuple(places), 0, unused, unused, torch.tensor(tables))


@pytest.mark.parametrize(
    ("wrong", "told"),
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
def test_a_wrong_batch_touches_nothing(wrong: PackedBatch, told: str) -> None:
    pool = torch.zeros(4, 2, 2, 16, 1, 8)
    core = NativeDecoder(_attention_shape(pool, 2), pool, KernelThreadPool(1))
    q, k = torch.ones(2, 2, 8), torch.ones(2, 1, 8)
    with pytest.raises(AssertionError, match=told):
        core.attend(wrong, 0, q, k, k)
    with pytest.raises(AssertionError, match="no such layer"):
        core.attend(batch([0], [2], [[0]]), 2, q, k, k)
    assert not pool.any()


def test_a_later_key_does_not_exist_yet() -> None:
    """Of two queries in one tile the earlier one must not feel the later one's infinite score."""
    pool = torch.full((4, 1, 2, 16, 1, 8), float("nan"))
    attention = NativeAttention(_pool(pool))
    attention.prepare(batch([0], [2], [[2]]))
    q, k = torch.ones(2, 1, 8), torch.tensor([0.0, 1e30]).view(2, 1, 1).expand(2, 1, 8).clone()
    v = torch.tensor([3.0, 5.0]).view(2, 1, 1).expand(2, 1, 8).clone()
    assert attention.attend(0, q, k, v)[:, 0, 0].tolist() == [3.0, 5.0]


def _pool(tensor: torch.Tensor) -> "object":
    from types import SimpleNamespace

    return SimpleNamespace(tensor=tensor, block_tokens=tensor.shape[3])


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_team_serves_many_callers(size: int) -> None:
    """Teams larger than the machine, callers that come at once, and teams that end."""
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


def test_the_ceilings_are_real_work() -> None:
    """Ones added up cannot be left out by a compiler."""
    assert load().baton_products_only(1, 1000) == 24 * 16 * 2 * 1000
    numbers = torch.arange(64, dtype=torch.int32)
    assert load().baton_reads_only(numbers.data_ptr(), 256) == 0 ^ _folded(numbers)


def _folded(numbers: torch.Tensor) -> int:
    """Four vectors of sixteen, folded by exclusive or, and added up."""
    folded = np.bitwise_xor.reduce(numbers.numpy().reshape(4, 16), axis=0)
    return ctypes.c_int32(int(folded.sum())).value


def test_what_is_wrong_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="so it was told"):
        call_checked(lambda: b"so it was told")
