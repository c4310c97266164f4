"""Weights in fewer bits: what becomes of them, products with them, and who may share."""

import re

import numpy as np
import pytest
import torch
from torch.nn import functional

from baton.config import load_settings
from baton.engine.native.decoder import NativeDecoder, _attention_shape
from baton.engine.native.matrix import KernelThreadPool, PackedMatrix
from baton.engine.quantization import (
    INT4_GROUP_SIZE,
    PackedInt4Codes,
    check_format,
    head_quantization,
    quantize,
    quantized_digest,
)
from baton.engine.quantized_matrix import QuantizedMatrix
from baton.engine.shards import StoredTensor
from baton.errors import Invalid
from tests.unit.native_house import FORMATS, needs_kernels

SEED = 20261121
SHAPES = [(1, 2), (63, 30), (64, 32), (65, 60), (129, 256), (200, 700)]
"""Outputs and inputs: around a panel, a group, and a block of depth."""

ROWS = [1, 5, 6, 7, 47, 48, 193]
"""Around what is computed at once, what is unpacked for, and a block of rows."""

QUANTIZED = ["int8", "int4"]
ALL = [*QUANTIZED, "fp8"]
"""That the kernels know, and that torch does."""


def weights(outs: int, ins: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, outputs of very different sizes, and one that is all zeros."""
    chance = torch.Generator().manual_seed(SEED)
    weight = torch.randn(outs, ins, generator=chance) * torch.logspace(-6, 3, outs)[:, None]
    weight[outs // 2] = 0 if outs > 1 else 1
    return weight.to(dtype)


def test_int8_is_the_nearest_code() -> None:
    codes = quantize(torch.tensor([[-254.0, 1.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]]), "int8")
    assert codes.scales.tolist() == [[2.0], [0.0]]
    assert codes.values.tolist() == [[-127, 0, 2, 0], [0, 0, 0, 0]]  # ties go to even codes
    assert codes.decode().tolist() == [[-254.0, 0.0, 4.0, 0.0], [0.0] * 4]


def test_int8_is_off_by_half_a_step_at_most() -> None:
    weight = weights(65, 300)
    off = (quantize(weight, "int8").decode() - weight).abs()
    assert (off <= weight.abs().amax(dim=1, keepdim=True) / 254 * (1 + 1e-5)).all()


def test_int4_keeps_what_it_can_hold() -> None:
    """Groups of sixteen different values, of both signs, and one at the end that is shorter."""
    codes = torch.arange(-8, 8).repeat(2).repeat(2)[: INT4_GROUP_SIZE + 10]
    weight = torch.stack([codes * 0.5, codes * -3.0])
    assert torch.equal(quantize(weight, "int4").decode(), weight)


def test_int4_errs_least_of_the_scales_that_it_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """More scales never make a group worse. What is left of normal numbers is 8.2 % of them."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(SEED))

    def errors() -> torch.Tensor:
        off = quantize(weight, "int4").decode() - weight
        return off.square().view(64, -1, INT4_GROUP_SIZE).sum(dim=-1)

    all_tried = errors()
    assert round((all_tried.sum() / weight.square().sum()).sqrt().item(), 3) == 0.082
    for end in (-8.0, -7.0, -7.5, -8.5):
        monkeypatch.setattr("baton.engine.quantization.INT4_EXTREME_CODES", (end,))
        assert (all_tried <= errors() * (1 + 1e-5)).all(), end


@pytest.mark.parametrize("name", ALL)
def test_a_weight_that_is_not_finite_is_refused(name: str) -> None:
    for wrong in (float("inf"), float("-inf"), float("nan")):
        weight = torch.ones(70, 64)
        weight[69, 40] = wrong
        with pytest.raises(Invalid, match="one is not finite"):
            quantize(weight, name)


@needs_kernels
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_kernels_refuse_it_too(name: str) -> None:
    for wrong in (float("inf"), float("-inf"), float("nan")):
        weight = torch.ones(70, 64)
        weight[69, 40] = wrong
        with pytest.raises(Invalid, match="a weight is not finite"):
            PackedMatrix(KernelThreadPool(2), weight, quantization=name)


@needs_kernels
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_make_the_same_codes(shape: tuple[int, int], name: str) -> None:
    """Each weight alone, by a product with ones and zeros: bit by bit what torch's codes say, from
    whatever format they come."""
    for source in (torch.float32, torch.bfloat16, torch.float16):
        weight = weights(*shape, source)
        packed = PackedMatrix(KernelThreadPool(2), weight, dtype=torch.float32, quantization=name)
        assert torch.equal(packed(torch.eye(shape[1])).T, quantize(weight, name).decode()), source


@needs_kernels
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_near_those_of_fp64(
    shape: tuple[int, int], name: str, dtype: torch.dtype
) -> None:
    """Within what adding so many numbers in FP32, and a scale for each group, may lose, and one
    rounding to the format. A row's product has the same bits in any company."""
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(SEED)).to(dtype)
    x = torch.randn(200, shape[1], generator=torch.Generator().manual_seed(SEED + 1)).to(dtype)
    packed = PackedMatrix(KernelThreadPool(2), weight, quantization=name)
    got, stands_for = packed(x), quantize(weight, name).decode().double()
    exact, sizes = x.double() @ stands_for.T, x.double().abs() @ stands_for.abs().T
    bound = sizes * (shape[1] + 3) * 2.0**-24 + exact.abs() * torch.finfo(dtype).eps / 2
    assert ((got.double() - exact).abs() <= bound * 1.001).all()
    for count in ROWS:
        assert torch.equal(packed(x[:count]), got[:count]), f"{count} rows"


@needs_kernels
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("size", [1, 31, 32, 33, 150])
def test_gate_and_up(size: int, name: str, dtype: torch.dtype) -> None:
    """Codes times small whole numbers, whose sums no format rounds before they are scaled."""
    chance = np.random.default_rng(SEED)
    whole = torch.from_numpy(chance.integers(-7, 8, size=(2 * size, 32))).float()
    whole[:, 0] = -8 if name == "int4" else 127
    x = torch.from_numpy(chance.integers(-1, 2, size=(9, 32))).to(dtype) / 64
    got = PackedMatrix(KernelThreadPool(2), whole.to(dtype), gated=True, quantization=name)(x)
    gate, up = functional.linear(x, whole.to(dtype)).chunk(2, dim=-1)
    torch.testing.assert_close(
        got, functional.silu(gate) * up, rtol=torch.finfo(dtype).eps * 2, atol=1e-30
    )


@needs_kernels
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_rows_of_an_embedding_that_is_the_head(dtype: torch.dtype) -> None:
    """Kept in int8, whatever the layers are kept in."""
    table = weights(130, 48, dtype)
    pool = torch.zeros(1, 1, 2, 4, 1, 4, dtype=dtype)
    shape = _attention_shape(pool, 1)
    shape.vocabulary, shape.hidden = table.shape
    core = NativeDecoder(shape, pool, KernelThreadPool(2), quantization="int4")
    core.set_head(
        StoredTensor([torch.ones(48, dtype=dtype)], [48]), StoredTensor([table], table.shape)
    )
    ids = torch.tensor([129, 0, 63, 64, 64, 127, 128])
    assert torch.equal(core.embed(ids), quantize(table, "int8").decode().to(dtype)[ids])


@needs_kernels
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_bytes_of_a_matrix(dtype: torch.dtype) -> None:
    """[3072, 1024]: a byte each and four per output; half a byte each and two per group."""
    weight, team = torch.zeros(3072, 1024, dtype=dtype), KernelThreadPool(2)
    sizes = {
        name: PackedMatrix(team, weight, quantization=name).tensor.numel()
        for name in ("none", *QUANTIZED)
    }
    assert sizes == {
        "none": 3072 * 1024 * dtype.itemsize,
        "int8": 3072 * (1024 + 4),
        "int4": 3072 * (1024 // 2 + 1024 // INT4_GROUP_SIZE * 2),
    }


@pytest.mark.parametrize("dtype", [*FORMATS, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_torch_multiplies_by_the_same_weights(name: str, dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(SEED)
    weight = torch.randn(96, 60, generator=chance).to(dtype)
    matrix = QuantizedMatrix.of(weight, name)
    stands_for = quantize(weight, name).decode().double()
    bias = torch.randn(96, generator=chance).to(dtype)
    for count in (1, 4, 5, 40):
        x = torch.randn(count, 60, generator=chance).to(dtype)
        exact = x.double() @ stands_for.T + bias.double()
        # Weights, sums and result are each rounded to the format once.
        near = 3 * torch.finfo(dtype).eps * (x.double().abs() @ stands_for.abs().T + bias.abs())
        got = functional.linear(x, matrix, bias)
        assert got.dtype is dtype
        assert ((got.double() - exact).abs() <= near).all()
    ids = torch.tensor([3, 0, 3])
    assert torch.equal(matrix[ids], stands_for[ids].to(dtype))


def test_torch_keeps_two_codes_of_int4_in_a_byte() -> None:
    """Also of an odd number, and at both ends of the codes."""
    weight = torch.arange(-8, 8).repeat(2, 5)[:, :77] * torch.tensor([[0.5], [-2.0]])
    kept = QuantizedMatrix.of(weight, "int4").codes
    assert isinstance(kept, PackedInt4Codes)
    assert kept.halves.shape == (2, 39) and kept.halves.dtype is torch.uint8
    assert kept.scales.shape == (2, 3) and kept.scales.dtype is torch.bfloat16
    assert torch.equal(kept.decode(), weight)


def test_torch_takes_one_of_many_matrices() -> None:
    stack = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(SEED))
    matrix, x = QuantizedMatrix.of(stack, "int4")[1], torch.eye(64)
    assert matrix.shape == (8, 64)
    assert torch.equal(functional.linear(x, matrix).T, quantize(stack[1], "int4").decode())


def test_nothing_else_is_done_with_it() -> None:
    with pytest.raises(AssertionError, match="of weights in fewer bits"):
        QuantizedMatrix.of(torch.ones(2, 2), "int8") + 1


def test_a_digest_tells_formats_apart() -> None:
    digests = {name: quantized_digest(b"m" * 16, name) for name in ("none", *ALL)}
    assert digests["none"] == b"m" * 16
    assert len(set(digests.values())) == 4 and {len(d) for d in digests.values()} == {16}
    assert quantized_digest(b"n" * 16, "int8") != digests["int8"]


def test_the_head_is_never_in_int4() -> None:
    assert [head_quantization(name) for name in ("none", *ALL)] == ["none", "int8", "int8", "none"]


def test_formats_that_there_are_not() -> None:
    with pytest.raises(Invalid, match="'int3', and must be one of none, int8, int4, fp8"):
        check_format("int3", torch.device("cpu"))
    told = "quantization is int4, which only CPUs compute with, and the device is cuda:0"
    with pytest.raises(Invalid, match=re.escape(told)):
        check_format("int4", torch.device("cuda:0"))
    check_format("none", torch.device("cuda:0"))


def test_the_setting() -> None:
    assert load_settings().quantization == "none"
    assert load_settings(quantization="int4").quantization == "int4"
    with pytest.raises(Invalid, match="quantization is 'fp4'"):
        load_settings(quantization="fp4")
