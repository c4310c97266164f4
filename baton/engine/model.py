"""One decoder for every supported architecture; what differs is in its ModelConfig."""

from typing import Protocol

import torch
from torch.nn import functional

from baton.checkpoint import ModelConfig
from baton.engine.attention.base import Attention, Batch
from baton.engine.loader import LayerWeights, Weights
from baton.engine.moe import gated, mixture
from baton.engine.rope import RotaryTable, rotate


class Decoder(Protocol):
    """What a runner asks of a model, on whatever it computes."""

    def hidden(self, token_ids: torch.Tensor, batch: Batch) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor: ...


class Model:
    """Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE; pre-norm, rotary, grouped-query attention."""

    def __init__(
        self, config: ModelConfig, weights: Weights, attention: Attention, max_tokens: int
    ) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        embedding = weights.embedding
        self._rotary = RotaryTable(
            config.rope, config.head_dim, max_tokens, embedding.device, embedding.dtype
        )

    def forward(self, token_ids: torch.Tensor, batch: Batch, wanted: torch.Tensor) -> torch.Tensor:
        """:meth:`logits` of :meth:`hidden`."""
        return self.logits(self.hidden(token_ids, batch), wanted)

    def hidden(self, token_ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What the last layer says of each token, [num_tokens, hidden_size].

        ``token_ids`` [num_tokens] are the packed rows of ``batch``, whose KV is written.
        """
        self._attention.prepare(batch)
        cos, sin = self._rotary.at(batch.positions)
        x = self._weights.embedding[token_ids]
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attend(index, layer, self._norm(x, layer.input_norm), cos, sin)
            x = x + self._feed_forward(index, layer, self._norm(x, layer.post_norm))
        return x

    def logits(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Logits [num_wanted, vocab] in FP32 of the tokens with indices ``wanted``."""
        if wanted.numel() == 0:
            return torch.empty((0, self._config.vocab_size), device=hidden.device)
        x = self._norm(hidden[wanted], self._weights.norm)
        return functional.linear(x, self._weights.head).float()

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        config = self._config
        qkv = functional.linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, config.head_dim)
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = torch.split(qkv, heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        attended = self._attention.attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return functional.linear(attended.flatten(1), layer.output)

    def _feed_forward(self, index: int, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        moe = self._config.moe
        if moe is not None and index in moe.layers:
            return mixture(x, layer, moe)
        assert layer.gate_up is not None and layer.down is not None
        return functional.linear(gated(x, layer.gate_up), layer.down)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm in FP32 (Zhang and Sennrich 2019), then back, then the weight."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return weight * (wide * scale).to(x.dtype)
