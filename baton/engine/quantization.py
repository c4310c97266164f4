"""Quantizes weights when they are loaded, and decodes quantized weights.

A weight is stored as a small number, its code, which is multiplied by a scale that several weights
share; in int4, a minimum that they share, too, is added to it:

- ``fp8``: codes in E4M3 (a sign, four bits of exponent, three of mantissa; Micikevicius et al.
  2022), and a scale in FP32 for each output: its largest weight divided by 448. A checkpoint that
  is in FP8 already keeps its own codes and scales.
- ``int8``: codes from -127 to 127, and a scale in FP32 for each output: its largest weight divided
  by 127. No weight changes by more than half of the scale: 1/254 of its output's largest weight.
- ``int4``: codes from 0 to 15, and a scale and a minimum in FP16 for every 32 of an output's
  weights. The two are chosen from a few candidates, for the least squared error. This is GGUF's
  format Q4_1, so weights that a checkpoint has in Q4_1 or Q4_0 keep their codes and scales.

Products are summed in FP32 before they are multiplied by the scale; activations are not quantized.
With ``int8`` and ``int4``, the head is stored in int8, and so is an embedding that is tied to it.
With ``fp8``, both keep their own format, as in FP8 checkpoints. Norms, biases and the routers of
experts always keep their format. The CPU kernels (native/kernels/quantize.h) compute the same codes
and scales, bit by bit; they don't support ``fp8``.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from baton.checkpoints.checkpoint import ModelConfig
from baton.errors import Invalid

QUANTIZATION_FORMATS = ("none", "int8", "int4", "fp8")
E4M3 = torch.float8_e4m3fn
MAX_E4M3 = 448.0
INT4_GROUP_SIZE = 32
"""Number of an output's weights that share a scale and a minimum in int4."""

INT4_BLOCK_BYTES = 4 + INT4_GROUP_SIZE // 2
INT4_BLOCK_TYPES = ("Q4_0", "Q4_1")
"""The types of GGUF's blocks that :class:`Int4Codes` hold exactly."""

MIN_FP8_CAPABILITY = (8, 9)
"""Minimum compute capability of GPUs that convert and multiply E4M3."""

INT4_CUTS = (0.0, 0.5)
"""Candidates for the range that an int4 group's codes span: each end is the smallest or largest
weight, or so many steps closer to the other end."""

INT4_REFINEMENTS = 2
"""How often the best candidate's scale and minimum are fitted to its codes by linear
regression."""

_PIECE_ELEMENTS = 2**20
"""Number of weights that are quantized at a time, to keep temporary tensors small."""

_NOT_FINITE = "the weights can't be quantized: at least one is NaN or infinite"
_TOO_LARGE = (
    "the weights can't be quantized: at least one is too large for int4, whose scales and minimums "
    "are in FP16 (at most 65504)"
)


@dataclass(frozen=True, slots=True)
class QuantizedCodes:
    """The codes and scales of a matrix [outs, ins]: ``values`` of that shape in INT8 or E4M3, and
    ``scales`` [outs / ``rows_per_scale``, ins / ``columns_per_scale``, both rounded up] in FP32."""

    values: torch.Tensor
    scales: torch.Tensor
    columns_per_scale: int
    rows_per_scale: int = 1

    @property
    def device(self) -> torch.device:
        return self.values.device

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
class Int4Codes:
    """The weights of a matrix [outs, ins] in int4: ``blocks`` is UINT8 [outs, 20 * groups], where
    each group of 32 weights has a block of GGUF's type Q4_1. These are its scale and its minimum in
    FP16, and 16 bytes with the codes: byte j has that of weight j in its lower bits, and that of
    weight j + 16 in its upper bits. A weight is scale * code + minimum."""

    blocks: torch.Tensor
    ins: int

    @staticmethod
    def from_gguf(rows: torch.Tensor, block_type: str) -> "Int4Codes":
        """Take the codes, scales and minimums of ``rows`` as they are: UINT8 [outs, bytes of a row]
        of a GGUF file, in blocks of ``block_type``, one of ``INT4_BLOCK_TYPES``. In Q4_0, a block
        has no minimum, which is -8 times the scale. Raises Invalid if a scale or minimum is not
        finite."""
        assert rows.dtype is torch.uint8 and block_type in INT4_BLOCK_TYPES, block_type
        outs = len(rows)
        if block_type == "Q4_0":
            blocks = rows.reshape(outs, -1, INT4_BLOCK_BYTES - 2)
            scales = blocks[..., :2].contiguous().view(torch.float16)
            minimums = (scales * -8).view(torch.uint8)
            rows = torch.cat((blocks[..., :2], minimums, blocks[..., 2:]), dim=-1).view(outs, -1)
        ins = rows.shape[1] // INT4_BLOCK_BYTES * INT4_GROUP_SIZE
        codes = Int4Codes(rows, ins)
        if not all(part.isfinite().all() for part in codes.scales_and_minimums()):
            raise Invalid(f"a scale of the weights in {block_type} is NaN, infinite or too large")
        return codes

    @staticmethod
    def join(parts: Sequence["Int4Codes"]) -> "Int4Codes":
        """Stack matrices along their outputs."""
        if len(parts) == 1:
            return parts[0]
        return Int4Codes(torch.cat([part.blocks for part in parts]), parts[0].ins)

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def select_rows(self, rows: slice | torch.Tensor) -> "Int4Codes":
        """Return the codes and scales of the outputs ``rows``."""
        return Int4Codes(self.blocks[rows], self.ins)

    def scales_and_minimums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both, each [outs, groups, 1] in FP32."""
        header = self._split_blocks()[..., :4].contiguous().view(torch.float16).float()
        return header[..., :1], header[..., 1:]

    def decode(self) -> torch.Tensor:
        """Return the weights that the codes stand for, [outs, ins] in FP32."""
        scales, minimums = self.scales_and_minimums()
        packed = self._split_blocks()[..., 4:]
        values = torch.cat((packed & 15, packed >> 4), dim=-1)
        return (values * scales + minimums).flatten(1)[:, : self.ins]

    def _split_blocks(self) -> torch.Tensor:
        return self.blocks.view(len(self.blocks), -1, INT4_BLOCK_BYTES)


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
    migrate requests. A format that has changed has another name here."""
    if name == "none":
        return model_digest
    stored = {"int4": "q4_1"}.get(name, name)
    return hashlib.blake2b(
        model_digest + stored.encode(), digest_size=16, person=b"baton.quant.v1"
    ).digest()


def quantize(weight: torch.Tensor, name: str) -> QuantizedCodes:
    """Quantize ``weight`` [outs, ins], in any float format, to int8 or fp8. Raises Invalid if a
    weight is not finite."""
    make = {"int8": _int8, "fp8": _fp8}[name]
    pieces = [make(part) for part in _pieces(weight)]
    values, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    if not scales.isfinite().all():
        raise Invalid(_NOT_FINITE)
    return QuantizedCodes(values, scales, weight.shape[1])


def quantize_int4(weight: torch.Tensor) -> Int4Codes:
    """Quantize ``weight`` [outs, ins], in any float format. Raises Invalid if a weight is not
    finite, or too large for a scale and minimum in FP16."""
    return Int4Codes(torch.cat([_int4(part) for part in _pieces(weight)]), weight.shape[1])


def _pieces(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield some rows of ``weight`` at a time, in FP32."""
    rows = max(1, _PIECE_ELEMENTS // weight.shape[1])
    return (part.float() for part in torch.split(weight, rows))


def _fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / MAX_E4M3
    return to_e4m3(torch.where(scales == 0, 0.0, weight / scales)), scales


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E4M3 numbers, ties to even. Numbers that are too large are clamped."""
    return x.clamp(-MAX_E4M3, MAX_E4M3).to(E4M3)


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return _nearest(weight, scales, -127, 127).to(torch.int8), scales


def _int4(weight: torch.Tensor) -> torch.Tensor:
    """Quantize to blocks, [outs, 20 * groups]. The last group is filled up with its last weight."""
    outs, ins = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -ins % INT4_GROUP_SIZE), mode="replicate")
    fit = _Int4Fit(filled.reshape(outs, -1, INT4_GROUP_SIZE))
    least, most = fit.weights.amin(-1, keepdim=True), fit.weights.amax(-1, keepdim=True)
    step = (most - least) / 15
    for above in INT4_CUTS:
        for below in INT4_CUTS:
            low, high = least + above * step, most - below * step
            fit.attempt((high - low) / 15, low)
    for _ in range(INT4_REFINEMENTS):
        fit.refine()
    if not fit.error.isfinite().all():
        raise Invalid(_TOO_LARGE if weight.isfinite().all() else _NOT_FINITE)
    low_codes, high_codes = fit.codes.to(torch.uint8).chunk(2, dim=-1)
    header = torch.cat((fit.scale, fit.minimum), dim=-1).half().view(torch.uint8)
    return torch.cat((header, low_codes | high_codes << 4), dim=-1).view(outs, -1)


class _Int4Fit:
    """The codes with the least squared error so far for ``weights`` [outs, groups, 32]."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights, self.codes = weights, torch.zeros_like(weights)
        self.scale = self.minimum = torch.zeros_like(weights[..., :1])
        self.error = torch.full_like(self.scale, torch.inf)

    def attempt(self, scale: torch.Tensor, minimum: torch.Tensor) -> None:
        """Take this scale and minimum, rounded to FP16, in each group where they are better."""
        scale, minimum = scale.half().float(), minimum.half().float()
        codes = _nearest(self.weights - minimum, scale, 0, 15)
        error = _sum((self.weights - (codes * scale + minimum)).square())
        is_better = error < self.error
        self.codes = torch.where(is_better, codes, self.codes)
        self.scale = torch.where(is_better, scale, self.scale)
        self.minimum = torch.where(is_better, minimum, self.minimum)
        self.error = torch.where(is_better, error, self.error)

    def refine(self) -> None:
        """Attempt the scale and minimum that suit the codes best: a linear regression."""
        count = float(INT4_GROUP_SIZE)
        x, y = _sum(self.codes), _sum(self.weights)
        xx, xy = _sum(self.codes.square()), _sum(self.codes * self.weights)
        slope = (count * xy - x * y) / (count * xx - x * x)
        self.attempt(slope, (y - slope * x) / count)


def _nearest(weight: torch.Tensor, scales: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Round ``weight`` / ``scales`` to integers between ``least`` and ``most``, in FP32, ties to
    even."""
    quotients = torch.where(scales == 0, 0.0, weight / scales)
    return quotients.round().clamp(least, most)


def _sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension in the same order as the CPU kernels: repeatedly add the second
    half to the first half."""
    while (half := terms.shape[-1] // 2) > 0:
        terms = terms[..., :half] + terms[..., half:]
    return terms
