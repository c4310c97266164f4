"""Weights in fewer bits: what is kept of a matrix at load, and what it stands for.

A weight becomes a small number, its code, times a scale that it shares:

- ``fp8``: codes in E4M3 (a sign, four bits of exponent, three of mantissa; Micikevicius et al.
  2022), a scale in FP32 for each output, which is its largest weight by 448. A checkpoint that
  comes in FP8 keeps its own codes and scales.
- ``int8``: codes from -127 to 127, a scale in FP32 for each output, which is its largest weight
  by 127. No weight is off by more than half of that: 1/254 of its output's largest.
- ``int4``: codes from -8 to 7, a scale in BF16 for every 32 of an output's weights, of a few that
  which makes the least squared error.

Products accumulate codes in FP32 before they are scaled, and what they are multiplied with stays as
it is. The head is kept in int8, and with it an embedding that is tied to it; beside ``fp8`` both
stay as they are, as in checkpoints that come so. So do norms, biases and the routers of experts.
The kernels (native/kernels/encode.h) make the same codes and scales, bit by bit; of ``fp8`` they
know nothing.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.checkpoint import ModelConfig
from baton.errors import Invalid

QUANTIZATION_FORMATS = ("none", "int8", "int4", "fp8")
E4M3 = torch.float8_e4m3fn
MAX_E4M3 = 448.0
INT4_GROUP_SIZE = 32
"""Weights of an output that share a scale in int4."""

MIN_FP8_CAPABILITY = (8, 9)
"""Of a GPU that converts and multiplies E4M3."""

INT4_EXTREME_CODES = (-8.0, -7.0, -7.5, -8.5)
"""What the largest weight of such a group is made to be, each tried."""

_LEAST_NORMAL = torch.finfo(torch.float32).tiny
_PIECE_ELEMENTS = 2**20
"""That are looked at together, so that what is made on the way stays small."""


@dataclass(frozen=True, slots=True)
class QuantizedCodes:
    """Of a matrix [outs, ins]: ``values`` of that shape in INT8 or E4M3, and in FP32 ``scales``
    [outs / tall, ins / group, both rounded up], each of ``tall`` by ``group`` values."""

    values: torch.Tensor
    scales: torch.Tensor
    group: int
    tall: int = 1

    @property
    def has_row_scales(self) -> bool:
        """One for each output."""
        return self.tall == 1 and self.scales.shape[1] == 1

    def take(self, rows: slice | torch.Tensor) -> "QuantizedCodes":
        """Of some outputs."""
        if self.tall == 1:
            return QuantizedCodes(self.values[rows], self.scales[rows], self.group)
        assert isinstance(rows, slice) and rows.start % self.tall == 0, f"{rows}"
        scales = self.scales[rows.start // self.tall : -(-rows.stop // self.tall)]
        return QuantizedCodes(self.values[rows], scales, self.group, self.tall)

    def decode(self) -> torch.Tensor:
        """The weights that they stand for, [outs, ins] in FP32."""
        outs, ins = self.values.shape
        scales = self.scales.repeat_interleave(self.tall, dim=0)[:outs]
        return self.values.float() * scales.repeat_interleave(self.group, dim=1)[:, :ins]

    @staticmethod
    def join(parts: Sequence["QuantizedCodes"]) -> "QuantizedCodes":
        """Of one matrix below another. They share scales alike."""
        tall = parts[0].tall
        if any(len(part.values) % tall for part in parts[:-1]):
            parts = [part._with_scales_for_each_row() for part in parts]
            tall = 1
        values = torch.cat([part.values.view(torch.uint8) for part in parts])
        scales = torch.cat([part.scales for part in parts])
        return QuantizedCodes(values.view(parts[0].values.dtype), scales, parts[0].group, tall)

    def _with_scales_for_each_row(self) -> "QuantizedCodes":
        scales = self.scales.repeat_interleave(self.tall, dim=0)[: len(self.values)]
        return QuantizedCodes(self.values, scales, self.group)


@dataclass(frozen=True, slots=True)
class PackedInt4Codes:
    """Codes of int4 where they are kept, two in a byte: ``halves`` [outs, ins / 2, rounded up] in
    UINT8, the first of a pair in the lower bits, and ``scales`` in BF16, as they were made."""

    halves: torch.Tensor
    scales: torch.Tensor
    ins: int

    @staticmethod
    def of(codes: QuantizedCodes) -> "PackedInt4Codes":
        ins = codes.values.shape[1]
        pairs = torch.nn.functional.pad(codes.values + 8, (0, ins % 2)).to(torch.uint8)
        return PackedInt4Codes(pairs[:, ::2] | pairs[:, 1::2] << 4, codes.scales.bfloat16(), ins)

    def take(self, rows: slice | torch.Tensor) -> "PackedInt4Codes":
        """Of some outputs."""
        return PackedInt4Codes(self.halves[rows], self.scales[rows], self.ins)

    def decode(self) -> torch.Tensor:
        """As :meth:`QuantizedCodes.decode`."""
        pairs = torch.stack((self.halves & 15, self.halves >> 4), dim=-1).flatten(1)
        values = pairs[:, : self.ins].to(torch.int8) - 8
        return QuantizedCodes(values, self.scales.float(), INT4_GROUP_SIZE).decode()


def check_format(name: str, device: torch.device) -> None:
    """Raises Invalid for a format that there is not, or not there."""
    if name not in QUANTIZATION_FORMATS:
        raise Invalid(
            f"quantization is {name!r}, and must be one of {', '.join(QUANTIZATION_FORMATS)}",
            param="quantization",
        )
    if name == "fp8":
        check_fp8(device, "quantization")
    elif name != "none" and device.type != "cpu":
        raise Invalid(
            f"quantization is {name}, which only CPUs compute with, and the device is {device}: "
            "use none or fp8, or device=cpu",
            param="quantization",
        )


def check_fp8(device: torch.device, setting: str) -> None:
    """Raises Invalid for a GPU that does not know E4M3. CPUs decode it."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_FP8_CAPABILITY:
        raise Invalid(
            f"{setting} is fp8, which takes a GPU of compute capability "
            f"{_dotted(MIN_FP8_CAPABILITY)} (L40S, H100), and {device} has {_dotted(capability)}",
            param=setting,
        )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def resolve_quantization(setting: str, config: ModelConfig, device: torch.device) -> str:
    """What weights are kept in: what the setting says, unless the checkpoint comes in FP8. Raises
    Invalid where both say something else, or the device does not know it."""
    check_format(setting, device)
    if config.fp8 is None:
        return setting
    if setting not in ("none", "fp8"):
        raise Invalid(
            f"quantization is {setting}, and the checkpoint comes in FP8: use none or fp8, or a "
            "checkpoint that is not quantized",
            param="quantization",
        )
    check_fp8(device, "quantization")
    return "fp8"


def head_quantization(name: str) -> str:
    """How the head is kept, whose errors no later layer evens out."""
    return "int8" if name in ("int8", "int4") else "none"


def quantized_digest(model_digest: bytes, name: str) -> bytes:
    """16 bytes that are equal iff model and format are: what one format has computed (blocks,
    answers on their way) is nothing to another's workers."""
    if name == "none":
        return model_digest
    return hashlib.blake2b(
        model_digest + name.encode(), digest_size=16, person=b"baton.quant.v1"
    ).digest()


def quantize(weight: torch.Tensor, name: str) -> QuantizedCodes:
    """Of ``weight`` [outs, ins], in any float format. Raises Invalid if one is not finite."""
    ins = weight.shape[1]
    rows = max(1, _PIECE_ELEMENTS // ins)
    make = {"int8": _int8, "int4": _int4, "fp8": _fp8}[name]
    pieces = [make(part.float()) for part in torch.split(weight, rows)]
    values, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    if not scales.isfinite().all():
        raise Invalid("the weights can't be quantized: one is not finite")
    return QuantizedCodes(values, scales, INT4_GROUP_SIZE if name == "int4" else ins)


def _fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / MAX_E4M3
    return to_e4m3(torch.where(scales == 0, 0.0, weight / scales)), scales


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest codes, ties to even ones. What is too large becomes the largest."""
    return x.clamp(-MAX_E4M3, MAX_E4M3).to(E4M3)


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return _nearest(weight, scales, -127, 127).to(torch.int8), scales


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In groups [outs, groups, GROUP], the last one filled up with zeros, which cost no error."""
    outs, ins = weight.shape
    padding = -ins % INT4_GROUP_SIZE
    groups = torch.nn.functional.pad(weight, (0, padding)).view(outs, -1, INT4_GROUP_SIZE)
    most, least = groups.amax(dim=-1, keepdim=True), groups.amin(dim=-1, keepdim=True)
    end = torch.where(most >= -least, most, least)
    best, scales = torch.zeros_like(groups), torch.zeros_like(end)
    least_error = torch.full_like(end, torch.inf)
    for code in INT4_EXTREME_CODES:
        tried = _nearest_bf16(end / code)
        values = _nearest(groups, tried, -8, 7)
        error = _sum((groups - values * tried).square())
        is_better = error < least_error
        best, scales = torch.where(is_better, values, best), torch.where(is_better, tried, scales)
        least_error = torch.where(is_better, error, least_error)
    scales = torch.where(end.isfinite(), scales, torch.nan)
    return best.view(outs, -1)[:, :ins].to(torch.int8).contiguous(), scales.squeeze(-1)


def _nearest(weight: torch.Tensor, scales: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Whole numbers, in FP32. Ties go to even ones."""
    quotients = torch.where(scales == 0, 0.0, weight / scales)
    return quotients.round().clamp(least, most)


def _nearest_bf16(scales: torch.Tensor) -> torch.Tensor:
    """What is below all normal numbers is zero, as products take it."""
    nearest = scales.to(torch.bfloat16).float()
    return torch.where(nearest.abs() < _LEAST_NORMAL, 0.0, nearest)


def _sum(errors: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, in the order of the kernels: halves upon halves."""
    while (half := errors.shape[-1] // 2) > 0:
        errors = errors[..., :half] + errors[..., half:]
    return errors
