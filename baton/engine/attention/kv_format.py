"""Keys and values as the pool keeps them, where torch reads and writes it."""

import torch

from baton.engine.kv_scale import KvScale
from baton.engine.quantization import E4M3, to_e4m3


def encode_kv(x: torch.Tensor, scale: float, pool: torch.Tensor) -> torch.Tensor:
    """In the pool's dtype. ``scale``: of keys, or of values."""
    return to_e4m3(x.float() * (1 / scale)) if pool.dtype is E4M3 else x


def decode_kv(context: torch.Tensor, scale: KvScale, dtype: torch.dtype) -> torch.Tensor:
    """What ``context`` [..., 2, block_tokens, kv_heads, head_dim] stands for, in ``dtype``."""
    if context.dtype is not E4M3:
        return context
    scales = torch.tensor([scale.key, scale.value], device=context.device)
    return (context.float() * scales.view(2, 1, 1, 1)).to(dtype)
