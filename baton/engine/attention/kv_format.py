"""Converts keys and values to and from the pool's dtype, in torch."""

import torch

from baton.engine.kv_scale import KvScale
from baton.engine.quantization import E4M3, to_e4m3


def encode_kv(x: torch.Tensor, scale: float, pool: torch.Tensor) -> torch.Tensor:
    """Convert ``x`` to the pool's dtype. ``scale`` is the layer's key scale or value scale."""
    return to_e4m3(x.float() * (1 / scale)) if pool.dtype is E4M3 else x


def decode_kv(context: torch.Tensor, scale: KvScale, dtype: torch.dtype) -> torch.Tensor:
    """Decode ``context`` [..., 2, block_tokens, kv_heads, head_dim] to ``dtype`` if it is in FP8;
    otherwise return it unchanged."""
    if context.dtype is not E4M3:
        return context
    scales = torch.tensor([scale.key, scale.value], device=context.device)
    return (context.float() * scales.view(2, 1, 1, 1)).to(dtype)
