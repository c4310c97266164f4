"""Tests that weights in GGUF's blocks Q4_1 and Q4_0 are held exactly in int4: by torch and by the
kernels, also where the parts of a matrix differ."""

from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional

from baton.engine.native.matrix import KernelThreadPool, PackedMatrix
from baton.engine.quantization import Int4Codes, quantize_int4
from baton.engine.quantized_matrix import QuantizedMatrix, load_matrix
from baton.engine.shards import StoredTensor
from baton.errors import Invalid
from tests.unit.baton.engine.native_helpers import FORMATS, needs_kernels

SEED = 20261130
CPU = torch.device("cpu")
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20}


class StoredInt4(StoredTensor):
    """A matrix whose parts are float weights or int4 codes. As floats, they are decoded."""

    def __init__(self, parts: Sequence[torch.Tensor | Int4Codes], ins: int) -> None:
        self._given = parts
        plain = [part.decode() if isinstance(part, Int4Codes) else part.float() for part in parts]
        super().__init__(plain, (sum(len(part) for part in plain), ins))

    @property
    def int4_parts(self) -> Sequence[torch.Tensor | Int4Codes]:
        return self._given


def random_rows(outs: int, ins: int, block_type: str) -> torch.Tensor:
    """Return rows of a GGUF file: random codes, and scales and minimums of both signs over a wide
    range."""
    chance = torch.Generator().manual_seed(SEED)
    size = BLOCK_BYTES[block_type]
    blocks = torch.randint(256, (outs, ins // 32, size), dtype=torch.uint8, generator=chance)
    header = torch.randn(outs, ins // 32, size // 2 - 8, generator=chance)
    header *= torch.logspace(-7, 3, outs)[:, None, None]
    blocks[..., : size - 16] = header.half().view(torch.uint8)
    return blocks.flatten(1)


def decode_as_gguf(rows: torch.Tensor, block_type: str) -> torch.Tensor:
    """Decode in FP64, block by block and code by code."""
    decoded = []
    for row in rows:
        for block in row.view(-1, BLOCK_BYTES[block_type]):
            numbers = block[:-16].clone().view(torch.float16).double().tolist()
            scale, least = numbers if block_type == "Q4_1" else (numbers[0], -8 * numbers[0])
            codes = block[-16:].tolist()
            decoded += [scale * (byte & 15) + least for byte in codes]
            decoded += [scale * (byte >> 4) + least for byte in codes]
    return torch.tensor(decoded, dtype=torch.float64).view(len(rows), -1)


@needs_kernels
@pytest.mark.parametrize("block_type", ["Q4_0", "Q4_1"])
def test_blocks_are_held_exactly(block_type: str) -> None:
    """Nothing is rounded but the decoded weight, to FP32."""
    rows = random_rows(70, 96, block_type)
    codes = Int4Codes.from_gguf(rows, block_type)
    wanted = decode_as_gguf(rows, block_type).float()
    assert torch.equal(codes.decode(), wanted)
    stored = StoredInt4([codes], 96)
    packed = PackedMatrix(KernelThreadPool(2), stored, dtype=torch.float32, quantization="int4")
    assert torch.equal(packed(torch.eye(96)).T, wanted)
    assert torch.equal(functional.linear(torch.eye(96), load_int4(stored)).T, wanted)


def test_rows_of_q4_1_are_not_copied() -> None:
    rows = random_rows(3, 64, "Q4_1")
    stored = StoredInt4([Int4Codes.from_gguf(rows, "Q4_1")], 64)
    codes = load_int4(stored).codes
    assert isinstance(codes, Int4Codes) and codes.blocks.data_ptr() == rows.data_ptr()


@needs_kernels
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["stacked", "gated"])
def test_each_part_keeps_its_own_kind(gated: bool, dtype: torch.dtype) -> None:
    """The parts are in FP32, Q4_0, Q4_1 and FP16, and share panels of the packed matrix."""
    chance = torch.Generator().manual_seed(SEED)
    floats = torch.randn(20, 64, generator=chance), torch.randn(40, 64, generator=chance).half()
    blocks = [Int4Codes.from_gguf(random_rows(30, 64, kind), kind) for kind in BLOCK_BYTES]
    stored = StoredInt4([floats[0], *blocks, floats[1]], 64)
    wanted = torch.cat(
        [
            quantize_int4(floats[0].to(dtype)).decode(),
            *[codes.decode() for codes in blocks],
            quantize_int4(floats[1].to(dtype)).decode(),
        ]
    )
    assert torch.equal(load_int4(stored, dtype).codes.decode(), wanted)
    pool = KernelThreadPool(2)
    packed = PackedMatrix(pool, stored, gated=gated, dtype=dtype, quantization="int4")
    x = torch.randn(9, 64, generator=chance).to(dtype)
    sums = x.double() @ wanted.double().T
    gate, up = sums.to(dtype).chunk(2, dim=-1)
    torch.testing.assert_close(
        packed(x),
        functional.silu(gate) * up if gated else sums.to(dtype),
        rtol=4 * torch.finfo(dtype).eps,
        atol=1e-4 * sums.abs().max().item() ** (1 + gated),
    )


@needs_kernels
def test_blocks_that_are_not_finite_are_refused() -> None:
    """A Q4_0 block's minimum is -8 times its scale, and must be finite in FP16, too."""
    for block_type, scale in [("Q4_0", 8192.0), ("Q4_0", torch.inf), ("Q4_1", torch.nan)]:
        rows = random_rows(2, 32, block_type)
        rows[1, :2] = torch.tensor([scale]).half().view(torch.uint8)
        with pytest.raises(Invalid, match=f"a scale of the weights in {block_type} is NaN"):
            Int4Codes.from_gguf(rows, block_type)
    with pytest.raises(Invalid, match="a weight is not finite"):
        stored = StoredInt4([Int4Codes(rows, 32)], 32)
        PackedMatrix(KernelThreadPool(1), stored, dtype=torch.float32, quantization="int4")


def load_int4(stored: StoredTensor, dtype: torch.dtype = torch.float32) -> QuantizedMatrix:
    matrix = load_matrix(stored, CPU, dtype, "int4")
    assert isinstance(matrix, QuantizedMatrix)
    return matrix
