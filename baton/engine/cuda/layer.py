"""Functions that run the fused kernels of a layer on tensors. They neither wait for the device nor
copy to the host."""

from dataclasses import dataclass

import torch

from baton.checkpoints.checkpoint import ModelConfig
from baton.engine.cuda import layer_kernels as kernels
from baton.engine.cuda.launch import KernelLauncher, ceil_div, power_of_2
from baton.engine.kv_scale import KvScale
from baton.engine.quantization import E4M3

_norm, _activate, _norm_rope_write_kv = map(
    KernelLauncher, (kernels.norm, kernels.activate, kernels.norm_rope_write_kv)
)

HEADS_PER_PROGRAM = 8
"""Heads per program of ``norm_rope_write_kv``: 16 bytes per thread, if heads have 128 dimensions
and a program has four warps."""

COLUMNS_PER_PROGRAM = 1024
"""Columns per program of ``activate``."""

MAX_COLUMNS_PER_WARP = 512
"""Maximum number of columns per warp of the norm kernel, which makes 16 per thread."""


@dataclass(frozen=True, slots=True)
class NormStyle:
    """How a model's norms are computed: see ``DecoderTraits``."""

    epsilon: float
    offset: float = 0.0
    rounds_last: bool = False

    @staticmethod
    def of(config: ModelConfig) -> "NormStyle":
        traits = config.traits
        return NormStyle(config.rms_norm_eps, traits.norm_offset, traits.norms_round_last)


def norm(
    x: torch.Tensor, weight: torch.Tensor, style: NormStyle, update: torch.Tensor | None = None
) -> torch.Tensor:
    """Return RMSNorm of ``x`` [num_tokens, size]. If ``update`` is given, it is first added to
    ``x`` in place."""
    assert x.is_contiguous() and (update is None or update.is_contiguous())
    num_tokens, size = x.shape
    out = torch.empty_like(x)
    padded = power_of_2(size)
    _norm[(num_tokens,)](
        x,
        x if update is None else update,
        weight,
        out,
        style.epsilon,
        SIZE=size,
        PADDED=padded,
        ADD=update is not None,
        OFFSET=style.offset,
        ROUNDS_LAST=style.rounds_last,
        num_warps=min(16, max(1, padded // MAX_COLUMNS_PER_WARP)),
    )
    return out


def activate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up. ``gate_up`` is [num_tokens, 2 * size]: the first half of its
    columns is gate, the second half is up."""
    assert gate_up.is_contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, size))
    _activate[(num_tokens, ceil_div(size, COLUMNS_PER_PROGRAM))](
        gate_up, out, SIZE=size, N=COLUMNS_PER_PROGRAM, GELU=activation != "silu"
    )
    return out


def norm_rope_write_kv(
    qkv: torch.Tensor,
    pool: torch.Tensor,
    place: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    rotary: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    style: NormStyle,
    scale: KvScale,
) -> torch.Tensor:
    """Normalize and rotate queries and keys, write keys and values to the pool, and return the
    queries [num_tokens, heads, dim].

    ``qkv`` is [num_tokens, heads + 2 * kv_heads, dim]. ``norms`` are the norm weights [dim] of
    queries and of keys, ``rotary`` are cosines and sines [positions, dim], and ``scale`` has the
    layer's scales of a pool in FP8. In the pool's blocks, the layer has the
    index ``place``. Keys and values of a token with slot -1 are not written.
    """
    assert qkv.is_contiguous()
    block_tokens, kv_heads, dim = pool.shape[3:]
    heads = qkv.shape[1] - 2 * kv_heads
    q = qkv.new_empty((qkv.shape[0], heads, dim))
    parts = ceil_div(heads, HEADS_PER_PROGRAM) + ceil_div(kv_heads, HEADS_PER_PROGRAM)
    _norm_rope_write_kv[(qkv.shape[0], parts)](
        qkv,
        q,
        pool[0, place],
        *(norms or (qkv, qkv)),
        *rotary,
        positions,
        slots,
        pool.stride(0),
        pool.stride(2),
        1 / scale.key,
        1 / scale.value,
        style.epsilon,
        NUM_HEADS=heads,
        NUM_KV_HEADS=kv_heads,
        DIM=dim,
        DIM_PADDED=power_of_2(dim),
        BLOCK_TOKENS=block_tokens,
        HEADS=HEADS_PER_PROGRAM,
        NORMED=norms is not None,
        OFFSET=style.offset,
        ROUNDS_LAST=style.rounds_last,
        FP8=pool.dtype is E4M3,
    )
    return q
