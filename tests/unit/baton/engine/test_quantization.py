"""Tests the codes of quantized weights, products with them, and which workers may share KV."""

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
    check_format,
    head_quantization,
    quantize,
    quantize_int4,
    quantized_digest,
)
from baton.engine.quantized_matrix import QuantizedMatrix
from baton.engine.shards import StoredTensor
from baton.errors import Invalid
from tests.unit.baton.engine.native_helpers import FORMATS, needs_kernels, pool_over

SEED = 20261121
SHAPES = [(1, 2), (63, 30), (64, 32), (65, 60), (129, 256), (200, 700)]
"""Numbers of outputs and inputs, close to the sizes of a panel, a group, and a block of depth."""

ROWS = [1, 5, 6, 7, 47, 48, 193]
"""Row counts, close to the number of rows computed at once, to the number from which codes are
unpacked first, and to a block of rows."""

QUANTIZED = ["int8", "int4"]
ALL = [*QUANTIZED, "fp8"]
"""All formats: those of the kernels, and FP8, which only torch supports."""


def weights(outs: int, ins: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed weights. The outputs' magnitudes differ widely, and one output's
    weights are all zero."""
    chance = torch.Generator().manual_seed(SEED)
    weight = torch.randn(outs, ins, generator=chance) * torch.logspace(-6, 3, outs)[:, None]
    weight[outs // 2] = 0 if outs > 1 else 1
    return weight.to(dtype)


def decoded(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return the weights that the codes of ``weight`` stand for, in FP32."""
    return QuantizedMatrix.quantize(weight, name).codes.decode()


def test_int8_chooses_the_nearest_code() -> None:
    codes = quantize(torch.tensor([[-254.0, 1.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]]), "int8")
    assert codes.scales.tolist() == [[2.0], [0.0]]
    assert codes.values.tolist() == [[-127, 0, 2, 0], [0, 0, 0, 0]]  # ties go to even codes
    assert codes.decode().tolist() == [[-254.0, 0.0, 4.0, 0.0], [0.0] * 4]


def test_int8_error_is_at_most_half_a_step() -> None:
    weight = weights(65, 300)
    off = (quantize(weight, "int8").decode() - weight).abs()
    assert (off <= weight.abs().amax(dim=1, keepdim=True) / 254 * (1 + 1e-5)).all()


def test_int4_represents_values_of_its_grid_exactly() -> None:
    """The weights have groups with sixteen different values of both signs, and a shorter group at
    the end."""
    codes = torch.arange(16).repeat(2).repeat(2)[: INT4_GROUP_SIZE + 16]
    weight = torch.stack([codes * 0.5 - 4, codes * -3.0, codes * 0.25 + 100, codes * 0.0 - 7])
    assert torch.equal(decoded(weight, "int4"), weight)


def test_int4_chooses_the_candidate_with_the_least_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each group, the chosen scale and minimum have the smallest error of all candidates. For
    normally distributed weights, the relative error is 7.0 %, and without refinement 7.3 %."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(SEED))

    def errors() -> torch.Tensor:
        off = decoded(weight, "int4") - weight
        return off.square().view(64, -1, INT4_GROUP_SIZE).sum(dim=-1)

    def relative(squares: torch.Tensor) -> float:
        return round((squares.sum() / weight.square().sum()).sqrt().item(), 3)

    refined = errors()
    monkeypatch.setattr("baton.engine.quantization.INT4_REFINEMENTS", 0)
    all_tried = errors()
    assert (relative(refined), relative(all_tried)) == (0.07, 0.073)
    assert (refined <= all_tried * (1 + 1e-5)).all()
    for cut in (0.0, 0.5):
        monkeypatch.setattr("baton.engine.quantization.INT4_CUTS", (cut,))
        assert (all_tried <= errors() * (1 + 1e-5)).all(), cut


@pytest.mark.parametrize("name", ALL)
def test_non_finite_weights_are_refused(name: str) -> None:
    for wrong in (float("inf"), float("-inf"), float("nan")):
        weight = torch.ones(70, 64)
        weight[69, 40] = wrong
        with pytest.raises(Invalid, match="at least one is NaN or infinite"):
            decoded(weight, name)


@needs_kernels
@pytest.mark.parametrize("wrong", [65536.0, -65536.0, 3e38])
def test_weights_beyond_fp16_are_refused_in_int4(wrong: float) -> None:
    weight = torch.full((70, 64), wrong)
    weight[:, 0] = 0
    message = re.escape("too large for int4, whose scales and minimums are in FP16 (at most 65504)")
    with pytest.raises(Invalid, match=message):
        decoded(weight, "int4")
    with pytest.raises(Invalid, match=message):
        PackedMatrix(KernelThreadPool(2), weight, quantization="int4")


@needs_kernels
@pytest.mark.parametrize("name", QUANTIZED)
def test_kernels_refuse_non_finite_weights(name: str) -> None:
    for wrong in (float("inf"), float("-inf"), float("nan")):
        weight = torch.ones(70, 64)
        weight[69, 40] = wrong
        with pytest.raises(Invalid, match="a weight is not finite"):
            PackedMatrix(KernelThreadPool(2), weight, quantization=name)


@needs_kernels
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_compute_the_same_codes_as_torch(shape: tuple[int, int], name: str) -> None:
    """Each weight is read back by a product with an identity matrix, and equals torch's decoded
    codes bit by bit, whatever the source format."""
    for source in (torch.float32, torch.bfloat16, torch.float16):
        weight = weights(*shape, source)
        packed = PackedMatrix(KernelThreadPool(2), weight, dtype=torch.float32, quantization=name)
        assert torch.equal(packed(torch.eye(shape[1])).T, decoded(weight, name)), source


@needs_kernels
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantized_products_are_close_to_fp64(
    shape: tuple[int, int], name: str, dtype: torch.dtype
) -> None:
    """The error bound covers accumulating and scaling each group in FP32, plus one rounding to the
    output dtype. A row's product is bitwise the same in any batch."""
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(SEED)).to(dtype)
    x = torch.randn(200, shape[1], generator=torch.Generator().manual_seed(SEED + 1)).to(dtype)
    packed = PackedMatrix(KernelThreadPool(2), weight, quantization=name)
    got, stands_for = packed(x), decoded(weight, name).double()
    exact, sizes = x.double() @ stands_for.T, x.double().abs() @ stands_for.abs().T
    bound = sizes * (shape[1] + 3) * 2.0**-24 + exact.abs() * torch.finfo(dtype).eps / 2
    assert ((got.double() - exact).abs() <= bound * 1.001).all()
    for count in ROWS:
        assert torch.equal(packed(x[:count]), got[:count]), f"{count} rows"


@needs_kernels
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("size", [1, 31, 32, 33, 150])
def test_gated_product_equals_silu_gate_times_up(size: int, name: str, dtype: torch.dtype) -> None:
    """Codes are multiplied by small whole numbers, so that the sums are exact in every format
    before they are scaled."""
    chance = np.random.default_rng(SEED)
    whole = torch.from_numpy(chance.integers(-7, 8, size=(2 * size, 32))).float()
    whole[:, 0] = 127 if name == "int8" else 8
    whole[:, 1] = -7
    x = torch.from_numpy(chance.integers(-1, 2, size=(9, 32))).to(dtype) / 64
    got = PackedMatrix(KernelThreadPool(2), whole.to(dtype), gated=True, quantization=name)(x)
    gate, up = functional.linear(x, whole.to(dtype)).chunk(2, dim=-1)
    torch.testing.assert_close(
        got, functional.silu(gate) * up, rtol=torch.finfo(dtype).eps * 2, atol=1e-30
    )


@needs_kernels
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_tied_embedding_is_kept_in_int8(dtype: torch.dtype) -> None:
    """The embedding is stored in int8 whatever the layers' format is."""
    table = weights(130, 48, dtype)
    pool = pool_over(torch.zeros(1, 1, 2, 4, 1, 4, dtype=dtype))
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
def test_packed_matrix_sizes(dtype: torch.dtype) -> None:
    """A matrix [3072, 1024] takes a byte per weight and four bytes per output in int8, and half a
    byte per weight and four bytes per group in int4."""
    weight, team = torch.zeros(3072, 1024, dtype=dtype), KernelThreadPool(2)
    sizes = {
        name: PackedMatrix(team, weight, quantization=name).tensor.numel()
        for name in ("none", *QUANTIZED)
    }
    assert sizes == {
        "none": 3072 * 1024 * dtype.itemsize,
        "int8": 3072 * (1024 + 4),
        "int4": 3072 * (1024 // 2 + 1024 // INT4_GROUP_SIZE * 4),
    }


@pytest.mark.parametrize("dtype", [*FORMATS, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_torch_products_use_the_decoded_weights(name: str, dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(SEED)
    weight = torch.randn(96, 60, generator=chance).to(dtype)
    matrix = QuantizedMatrix.quantize(weight, name)
    stands_for = decoded(weight, name).double()
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


def test_torch_stores_int4_as_blocks() -> None:
    """The matrix has rows with a shorter group at the end, and contains all codes."""
    weight = torch.arange(16).repeat(2, 5) * torch.tensor([[0.5], [-2.0]])
    codes = quantize_int4(weight)
    assert codes.blocks.shape == (2, 3 * 20) and codes.blocks.dtype is torch.uint8
    assert codes.blocks[0, :5].tolist() == [0x00, 0x38, 0, 0, 0x00]  # 0.5 and 0.0 in FP16
    assert codes.blocks[0, 4:20].tolist() == [17 * code for code in range(16)]
    assert torch.equal(codes.decode(), weight)


def test_quantized_stack_can_be_indexed() -> None:
    stack = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(SEED))
    matrix, x = QuantizedMatrix.quantize(stack, "int4")[1], torch.eye(64)
    assert matrix.shape == (8, 64)
    assert torch.equal(functional.linear(x, matrix).T, decoded(stack[1], "int4"))


def test_other_operations_on_quantized_weights_are_rejected() -> None:
    with pytest.raises(AssertionError, match="not supported for quantized weights"):
        QuantizedMatrix.quantize(torch.ones(2, 2), "int8") + 1


def test_digest_depends_on_the_format() -> None:
    digests = {name: quantized_digest(b"m" * 16, name) for name in ("none", *ALL)}
    assert digests["none"] == b"m" * 16
    assert len(set(digests.values())) == 4 and {len(d) for d in digests.values()} == {16}
    assert quantized_digest(b"n" * 16, "int8") != digests["int8"]


def test_head_is_never_in_int4() -> None:
    assert [head_quantization(name) for name in ("none", *ALL)] == ["none", "int8", "int8", "none"]


def test_unknown_or_unsupported_formats_are_rejected() -> None:
    with pytest.raises(Invalid, match="'int3', and must be one of none, int8, int4, fp8"):
        check_format("int3", torch.device("cpu"))
    message = "quantization is int4, which only CPUs support, but the device is cuda:0"
    with pytest.raises(Invalid, match=re.escape(message)):
        check_format("int4", torch.device("cuda:0"))
    check_format("none", torch.device("cuda:0"))


def test_quantization_setting_is_validated() -> None:
    assert load_settings().quantization == "auto"
    assert load_settings(quantization="int4").quantization == "int4"
    with pytest.raises(Invalid, match="quantization is 'fp4'"):
        load_settings(quantization="fp4")
