"""Rotary position embeddings (Su et al. 2021), with the scaling methods that checkpoints use."""

import math

import torch

from baton.checkpoint import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the inverse frequencies, [head_dim / 2] in FP32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, frequencies)
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


class RotaryTable:
    """Cosines and sines by position, computed in FP32 and then rounded to the dtype of the
    computation, as in the library ``transformers``."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        angles = torch.outer(torch.arange(length).float(), inverse_frequencies(rope, head_dim))
        full = torch.cat((angles, angles), dim=-1)
        self.cos = full.cos().to(device=device, dtype=dtype)
        self.sin = full.sin().to(device=device, dtype=dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [num_tokens, 1, head_dim] at ``positions`` [num_tokens]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` [num_tokens, heads, head_dim] by the cosines and sines of its positions."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin
