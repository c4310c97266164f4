"""Rotary position embeddings (Su et al. 2021), with the scaling methods that checkpoints use."""

import math

import torch

from baton.checkpoints.checkpoint import ModelConfig
from baton.checkpoints.rope_config import RopeConfig, YarnConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the inverse frequencies, [head_dim / 2] in FP32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, frequencies)
    if rope.yarn is not None:
        return _yarn(rope, rope.yarn, head_dim, frequencies)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Scale as Llama 3 does: divide the frequencies of long wavelengths by ``factor``, keep those
    of short wavelengths, and blend the two in between."""
    long_wavelength = rope.original_max_position / rope.low_freq_factor
    short_wavelength = rope.original_max_position / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > long_wavelength, frequencies / rope.factor, frequencies)
    smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelengths >= short_wavelength) & (wavelengths <= long_wavelength)
    return torch.where(between, blended, scaled)


def _yarn(
    rope: RopeConfig, yarn: YarnConfig, head_dim: int, frequencies: torch.Tensor
) -> torch.Tensor:
    """Scale as YaRN does (Peng et al. 2023, section 3.2): keep high frequencies, divide low ones by
    ``factor``, and blend linearly, by the index of the dimension, in between."""

    def dimension_of(rotations: float) -> float:
        """Return the dimension that rotates so often within the original length."""
        wavelength = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.rounds_range:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    slowed_share = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
    kept_share = 1 - slowed_share
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    slowed = 1.0 / (rope.factor * rope.theta**exponents)
    return slowed * (1 - kept_share) + frequencies * kept_share


class RotaryTable:
    """Cosines and sines by position, times the attention factor, computed in FP32 and then rounded
    to the dtype of the computation, as in the library ``transformers``."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        angles = torch.outer(torch.arange(length).float(), inverse_frequencies(rope, head_dim))
        full = torch.cat((angles, angles), dim=-1)
        factor = rope.attention_factor
        self.cos = (full.cos() * factor).to(device=device, dtype=dtype)
        self.sin = (full.sin() * factor).to(device=device, dtype=dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [num_tokens, 1, head_dim] at ``positions`` [num_tokens]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


class RotaryTables:
    """The rotary tables of a model's layers: one, or a second one for layers with a window."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        local = config.traits.local_rope
        ropes = [config.rope] if local is None else [config.rope, local]
        length = config.max_position_embeddings
        self._traits = config.traits
        self.tables = [RotaryTable(rope, config.head_dim, length, device, dtype) for rope in ropes]

    def table_index(self, layer: int) -> int:
        is_local = self._traits.local_rope is not None and self._traits.window(layer) is not None
        return 1 if is_local else 0

    def of_layer(self, layer: int) -> RotaryTable:
        return self.tables[self.table_index(layer)]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` [num_tokens, heads, head_dim] by the cosines and sines of its positions."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin
