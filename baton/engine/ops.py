"""The interface of a decoder layer's operations, and its implementation in torch.
``baton.engine.cuda`` has an implementation for GPUs."""

from typing import Protocol

import torch
from torch.nn import functional

from baton.checkpoints.checkpoint import ModelConfig
from baton.engine.attention.base import Attention, PackedBatch
from baton.engine.loader import LayerWeights
from baton.engine.rope import RotaryTables, apply_rotary


class LayerOps(Protocol):
    """The operations of a decoder layer, bound to one model and one pool. Tensors are [num_tokens,
    …] in the dtype of the computation.

    All implementations round intermediate results where the library ``transformers`` does: in a
    norm, before the multiplication by the norm's weight (or only after it, if the model's traits
    say so); in a rotary embedding, the two products before they are added; and the activated gate
    before it is multiplied by up.
    """

    def prepare(self, batch: PackedBatch) -> None:
        """Prepare for a batch. This must be called once per step, before the first layer."""
        ...

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute ``x`` @ ``weight`` [out, in].T + ``bias``."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute RMSNorm over the last dimension, in FP32 (Zhang and Sennrich 2019)."""
        ...

    def add_norm(
        self, x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``x`` + ``update``, and the norm of the sum. ``x`` may be overwritten by the
        sum."""
        ...

    def attend(self, index: int, qkv: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        """Normalize queries and keys (if the layer has norms for them) and rotate them, write keys
        and values to the pool, and compute attention. ``qkv`` is [num_tokens, (heads + 2 *
        kv_heads) * head_dim], and the result is [num_tokens, heads * head_dim]."""
        ...

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return SiLU(gate) * up, or GELU(gate) * up, as the model's traits say. ``gate_up`` is
        [num_tokens, 2 * size]: the first half of its columns is gate, the second half is up."""
        ...


class TorchOps:
    """Implements :class:`LayerOps` with torch's own kernels, on any device."""

    def __init__(self, config: ModelConfig, attention: Attention, rotary: RotaryTables) -> None:
        self._config = config
        self._attention = attention
        self._rotary = rotary

    def prepare(self, batch: PackedBatch) -> None:
        self._attention.prepare(batch)
        self._cos_sin = [table.at(batch.positions) for table in self._rotary.tables]

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide, traits = x.float(), self._config.traits
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        if traits.norms_round_last:
            return (wide * scale * (weight.float() + traits.norm_offset)).to(x.dtype)
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
        cos, sin = self._cos_sin[self._rotary.table_index(index)]
        q, k = (apply_rotary(part, cos, sin) for part in (q, k))
        return self._attention.attend(index, q, k, v, weights.sinks).flatten(1)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self._config.traits.activation == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh") * up
