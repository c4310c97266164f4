"""Rotary position embeddings (Su et al. 2021), with the scalings that checkpoints ask for."""

import math

import torch

from baton.checkpoint import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """[head_dim / 2], FP32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: Rope, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed by ``factor``, short ones kept, those between are blended."""
    long_wave = rope.original_max_position / rope.low_freq_factor
    short_wave = rope.original_max_position / rope.high_freq_factor
    waves = 2 * math.pi / frequencies
    slowed = torch.where(waves > long_wave, frequencies / rope.factor, frequencies)
    smooth = (rope.original_max_position / waves - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * slowed / rope.factor + smooth * slowed
    between = (waves >= short_wave) & (waves <= long_wave)
    return torch.where(between, blended, slowed)


class RotaryTable:
    """Cosines and sines by position, in the run's dtype, rounded as transformers rounds them."""

    def __init__(
        self, rope: Rope, head_dim: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        angles = torch.outer(torch.arange(length).float(), inverse_frequencies(rope, head_dim))
        full = torch.cat((angles, angles), dim=-1)
        self.cos = full.cos().to(device=device, dtype=dtype)
        self.sin = full.sin().to(device=device, dtype=dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [num_tokens, 1, head_dim] at ``positions`` [num_tokens]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [num_tokens, heads, head_dim], turned by its position."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin
