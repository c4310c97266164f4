"""Quantizes weights when they are loaded, and decodes quantized weights.

A weight is stored as a small number, its code, which is multiplied by a scale that several weights
share:

- ``fp8``: codes in E4M3 (a sign, four bits of exponent, three of mantissa; Micikevicius et al.
  2022), and a scale in FP32 for each output: its largest weight divided by 448. A checkpoint that
  is in FP8 already keeps its own codes and scales.
- ``int8``: codes from -127 to 127, and a scale in FP32 for each output: its largest weight divided
  by 127. No weight changes by more than half of the scale: 1/254 of its output's largest weight.
- ``int4``: codes from -8 to 7, and a scale in BF16 for every 32 of an output's weights. The scale
  is chosen from a few candidates, for the least squared error.

Products are summed in FP32 before they are multiplied by the scale; activations are not quantized.
With ``int8`` and ``int4``, the head is stored in int8, and so is an embedding that is tied to it.
With ``fp8``, both keep their own format, as in FP8 checkpoints. Norms, biases and the routers of
experts always keep their format. The CPU kernels (native/kernels/quantize.h) compute the same codes
and scales, bit by bit; they don't support ``fp8``.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.checkpoints.checkpoint import ModelConfig
from baton.errors import Invalid

QUANTIZATION_FORMATS = ("none", "int8", "int4", "fp8")
E4M3 = torch.float8_e4m3fn
MAX_E4M3 = 448.0
INT4_GROUP_SIZE = 32
"""Number of an output's weights that share a scale in int4."""

MIN_FP8_CAPABILITY = (8, 9)
"""Minimum compute capability of GPUs that convert and multiply E4M3."""

INT4_EXTREME_CODES = (-8.0, -7.0, -7.5, -8.5)
"""Candidate codes for the largest weight of an int4 group. Each determines a scale; all are
tried."""

_LEAST_NORMAL = torch.finfo(torch.float32).tiny
_PIECE_ELEMENTS = 2**20
"""Number of weights that are quantized at a time, to keep temporary tensors small."""


@dataclass(frozen=True, slots=True)
class QuantizedCodes:
    """The codes and scales of a matrix [outs, ins]: ``values`` of that shape in INT8 or E4M3, and
    ``scales`` [outs / ``rows_per_scale``, ins / ``columns_per_scale``, both rounded up] in FP32."""

    values: torch.Tensor
    scales: torch.Tensor
    columns_per_scale: int
    rows_per_scale: int = 1

    @property
    def has_row_scales(self) -> bool:
        """Whether there is one scale for each output."""
        return self.rows_per_scale == 1 and self.scales.shape[1] == 1

    def select_rows(self, rows: slice | torch.Tensor) -> "QuantizedCodes":
        """Return the codes and scales of the outputs ``rows``."""
        if self.rows_per_scale == 1:
            return QuantizedCodes(self.values[rows], self.scales[rows], self.columns_per_scale)
        assert isinstance(rows, slice) and rows.start % self.rows_per_scale == 0, f"{rows}"
        scales = self.scales[
            rows.start // self.rows_per_scale : -(-rows.stop // self.rows_per_scale)
        ]
        return QuantizedCodes(
            self.values[rows], scales, self.columns_per_scale, self.rows_per_scale
        )

    def decode(self) -> torch.Tensor:
        """Return the weights that the codes stand for, [outs, ins] in FP32."""
        outs, ins = self.values.shape
        scales = self.scales.repeat_interleave(self.rows_per_scale, dim=0)[:outs]
        return (
            self.values.float() * scales.repeat_interleave(self.columns_per_scale, dim=1)[:, :ins]
        )

    @staticmethod
    def join(parts: Sequence["QuantizedCodes"]) -> "QuantizedCodes":
        """Stack matrices along their outputs. They must have the same ``rows_per_scale`` and
        ``columns_per_scale``."""
        tall = parts[0].rows_per_scale
        if any(len(part.values) % tall for part in parts[:-1]):
            parts = [part._with_scales_for_each_row() for part in parts]
            tall = 1
        values = torch.cat([part.values.view(torch.uint8) for part in parts])
        scales = torch.cat([part.scales for part in parts])
        return QuantizedCodes(
            values.view(parts[0].values.dtype), scales, parts[0].columns_per_scale, tall
        )

    def _with_scales_for_each_row(self) -> "QuantizedCodes":
        scales = self.scales.repeat_interleave(self.rows_per_scale, dim=0)[: len(self.values)]
        return QuantizedCodes(self.values, scales, self.columns_per_scale)


@dataclass(frozen=True, slots=True)
class PackedInt4Codes:
    """Int4 codes as they are stored, two per byte: ``packed`` is UINT8 [outs, ceil(ins / 2)] with
    the first code of each pair in the lower bits. ``scales`` are BF16, which represents the scales
    of :class:`QuantizedCodes` exactly."""

    packed: torch.Tensor
    scales: torch.Tensor
    ins: int

    @staticmethod
    def pack(codes: QuantizedCodes) -> "PackedInt4Codes":
        ins = codes.values.shape[1]
        pairs = torch.nn.functional.pad(codes.values + 8, (0, ins % 2)).to(torch.uint8)
        return PackedInt4Codes(pairs[:, ::2] | pairs[:, 1::2] << 4, codes.scales.bfloat16(), ins)

    def select_rows(self, rows: slice | torch.Tensor) -> "PackedInt4Codes":
        """Return the codes and scales of the outputs ``rows``."""
        return PackedInt4Codes(self.packed[rows], self.scales[rows], self.ins)

    def decode(self) -> torch.Tensor:
        """Return the weights that the codes stand for, [outs, ins] in FP32."""
        pairs = torch.stack((self.packed & 15, self.packed >> 4), dim=-1).flatten(1)
        values = pairs[:, : self.ins].to(torch.int8) - 8
        return QuantizedCodes(values, self.scales.float(), INT4_GROUP_SIZE).decode()


def check_format(name: str, device: torch.device) -> None:
    """Raise Invalid for a format that is unknown or that the device does not support."""
    if name not in QUANTIZATION_FORMATS:
        raise Invalid(
            f"quantization is {name!r}, and must be one of {', '.join(QUANTIZATION_FORMATS)}",
            param="quantization",
        )
    if name == "fp8":
        check_fp8(device, "quantization")
    elif name != "none" and device.type != "cpu":
        raise Invalid(
            f"quantization is {name}, which only CPUs support, but the device is {device}: "
            "use none or fp8, or device=cpu",
            param="quantization",
        )


def check_fp8(device: torch.device, setting: str) -> None:
    """Raise Invalid for a GPU that does not support E4M3. Every CPU is accepted, because CPUs
    decode E4M3."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_FP8_CAPABILITY:
        raise Invalid(
            f"{setting} is fp8, which needs a GPU of compute capability "
            f"{_dotted(MIN_FP8_CAPABILITY)} (L40S, H100), but {device} has {_dotted(capability)}",
            param=setting,
        )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def resolve_quantization(setting: str, config: ModelConfig, device: torch.device) -> str:
    """Return the format that weights are stored in: the setting, unless the checkpoint is in FP8.
    Raises Invalid if the setting and the checkpoint conflict, or if the device does not support the
    format."""
    check_format(setting, device)
    if config.fp8 is None:
        return setting
    if setting not in ("none", "fp8"):
        raise Invalid(
            f"quantization is {setting}, but the checkpoint is in FP8: use none or fp8, or a "
            "checkpoint that is not quantized",
            param="quantization",
        )
    check_fp8(device, "quantization")
    return "fp8"


def head_quantization(name: str) -> str:
    """Return the format of the head in a model whose layers have the format ``name``: "int8" for
    the integer formats, else "none". The head is never in int4, because no later layer can even out
    its errors."""
    return "int8" if name in ("int8", "int4") else "none"


def quantized_digest(model_digest: bytes, name: str) -> bytes:
    """Return a digest (16 bytes) of a model and its quantization format; for the format ``none``,
    this is the model's digest. Workers with different formats must not exchange KV blocks or
    migrate requests."""
    if name == "none":
        return model_digest
    return hashlib.blake2b(
        model_digest + name.encode(), digest_size=16, person=b"baton.quant.v1"
    ).digest()


def quantize(weight: torch.Tensor, name: str) -> QuantizedCodes:
    """Quantize ``weight`` [outs, ins], in any float format. Raises Invalid if a weight is not
    finite."""
    ins = weight.shape[1]
    rows = max(1, _PIECE_ELEMENTS // ins)
    make = {"int8": _int8, "int4": _int4, "fp8": _fp8}[name]
    pieces = [make(part.float()) for part in torch.split(weight, rows)]
    values, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    if not scales.isfinite().all():
        raise Invalid("the weights can't be quantized: at least one is NaN or infinite")
    return QuantizedCodes(values, scales, INT4_GROUP_SIZE if name == "int4" else ins)


def _fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / MAX_E4M3
    return to_e4m3(torch.where(scales == 0, 0.0, weight / scales)), scales


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E4M3 numbers, ties to even. Numbers that are too large are clamped."""
    return x.clamp(-MAX_E4M3, MAX_E4M3).to(E4M3)


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return _nearest(weight, scales, -127, 127).to(torch.int8), scales


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize in groups [outs, groups, INT4_GROUP_SIZE]. The last group is padded with zeros,
    which add no error."""
    outs, ins = weight.shape
    padding = -ins % INT4_GROUP_SIZE
    groups = torch.nn.functional.pad(weight, (0, padding)).view(outs, -1, INT4_GROUP_SIZE)
    most, least = groups.amax(dim=-1, keepdim=True), groups.amin(dim=-1, keepdim=True)
    end = torch.where(most >= -least, most, least)
    best, scales = torch.zeros_like(groups), torch.zeros_like(end)
    least_error = torch.full_like(end, torch.inf)
    for code in INT4_EXTREME_CODES:
        scale = _nearest_bf16(end / code)
        values = _nearest(groups, scale, -8, 7)
        error = _sum((groups - values * scale).square())
        is_better = error < least_error
        best, scales = torch.where(is_better, values, best), torch.where(is_better, scale, scales)
        least_error = torch.where(is_better, error, least_error)
    scales = torch.where(end.isfinite(), scales, torch.nan)
    return best.view(outs, -1)[:, :ins].to(torch.int8).contiguous(), scales.squeeze(-1)


def _nearest(weight: torch.Tensor, scales: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Round ``weight`` / ``scales`` to integers between ``least`` and ``most``, in FP32, ties to
    even."""
    quotients = torch.where(scales == 0, 0.0, weight / scales)
    return quotients.round().clamp(least, most)


def _nearest_bf16(scales: torch.Tensor) -> torch.Tensor:
    """Round to BF16. Subnormal numbers become zero, because products treat them as zero."""
    nearest = scales.to(torch.bfloat16).float()
    return torch.where(nearest.abs() < _LEAST_NORMAL, 0.0, nearest)


def _sum(errors: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension in the same order as the CPU kernels: repeatedly add the second
    half to the first half."""
    while (half := errors.shape[-1] // 2) > 0:
        errors = errors[..., :half] + errors[..., half:]
    return errors
