"""What a decoder layer does, step by step; torch's way of it. ``baton.engine.cuda`` has another."""

from typing import Protocol

import torch
from torch.nn import functional

from baton.checkpoint import ModelConfig
from baton.engine.attention.base import Attention, PackedBatch
from baton.engine.loader import LayerWeights
from baton.engine.rope import RotaryTable, rotate


class LayerOps(Protocol):
    """Bound to one model and one pool. Tensors are [num_tokens, …] in the run's dtype.

    All round where transformers does: a norm before its weight, a turn's two products before
    their sum, SiLU(gate) before it is multiplied by up.
    """

    def prepare(self, batch: PackedBatch) -> None:
        """Once per step, before the first layer."""
        ...

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``weight`` [out, in]."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension, in FP32 (Zhang and Sennrich 2019)."""
        ...

    def add_norm(
        self, x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` + ``update``, and the norm of that. ``x`` is used up: it may hold the sum."""
        ...

    def attend(self, index: int, qkv: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        """``qkv`` [num_tokens, (heads + 2 * kv_heads) * head_dim]. Norms (where the layer has any)
        and turns queries and keys, writes keys and values to the pool, attends: [num_tokens,
        heads * head_dim]."""
        ...

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SiLU(gate) * up, of [num_tokens, 2 * size]."""
        ...


class TorchOps:
    """With torch's own kernels, wherever those run."""

    def __init__(self, config: ModelConfig, attention: Attention, rotary: RotaryTable) -> None:
        self._config = config
        self._attention = attention
        self._rotary = rotary

    def prepare(self, batch: PackedBatch) -> None:
        self._attention.prepare(batch)
        self._cos, self._sin = self._rotary.at(batch.positions)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return weight * (wide * scale).to(x.dtype)

    def add_norm(
        self, x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + update
        return x, self.norm(x, weight)

    def attend(self, index: int, qkv: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        config = self._config
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = torch.split(qkv.view(qkv.shape[0], -1, config.head_dim), heads, dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = self.norm(q, weights.q_norm), self.norm(k, weights.k_norm)
        q, k = (rotate(part, self._cos, self._sin) for part in (q, k))
        return self._attention.attend(index, q, k, v).flatten(1)

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
