"""The operations of a decoder layer on a GPU, with one fused kernel between two matrix products
where possible."""

from dataclasses import replace

import torch
from torch.nn import functional

from baton.checkpoints.checkpoint import ModelConfig
from baton.engine.attention.base import PackedBatch
from baton.engine.cuda import fp8, gemm, layer
from baton.engine.cuda.attention import DeviceBatch, TritonAttention
from baton.engine.kv_pool import KvPool
from baton.engine.loader import LayerWeights
from baton.engine.quantized_matrix import QuantizedMatrix
from baton.engine.rope import RotaryTables


class TritonOps:
    """Implements :class:`baton.engine.ops.LayerOps`.

    After :meth:`prepare` or :meth:`set_batch`, no operation waits for the device or copies to it,
    so a whole forward pass can be captured in a graph, unless the model has mixtures of experts."""

    def __init__(self, config: ModelConfig, pool: KvPool, rotary: RotaryTables) -> None:
        self._config = config
        self._pool, self._kv_scales = pool.tensor, pool.scales
        self._places = pool.groups.places
        self._rotary = rotary
        self._norm_style = layer.NormStyle.of(config)
        self.attention = self._make_attention(pool)

    def _make_attention(self, pool: KvPool) -> TritonAttention:
        return TritonAttention(pool, self._config.traits)

    def prepare(self, batch: PackedBatch) -> None:
        self.attention.prepare(batch)

    def set_batch(self, batch: DeviceBatch) -> None:
        """Like :meth:`prepare`, but for a batch that is already on the device."""
        self.attention.set_batch(batch)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight, QuantizedMatrix):
            return fp8.fp8_linear(x, weight.fp8, bias, self.attention.num_processors)
        return functional.linear(x, weight, bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return layer.norm(x, weight, self._norm_style)

    def add_norm(
        self, x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = layer.norm(x, weight, self._norm_style, update)
        return x, normed

    def attend(self, index: int, qkv: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        q = self.norm_rope_write_kv(index, qkv, weights)
        return self.attention.attend_cached(index, q, weights.sinks).flatten(1)

    def norm_rope_write_kv(
        self, index: int, qkv: torch.Tensor, weights: LayerWeights
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, and write keys and values to the pool: this is
        everything that :meth:`attend` does before the attention itself. Return the queries
        [num_tokens, heads, head_dim]."""
        q_norm, k_norm = weights.q_norm, weights.k_norm
        batch, rotary = self.attention.batch, self._rotary.of_layer(index)
        group, place = self._places[index]
        return layer.norm_rope_write_kv(
            qkv.view(qkv.shape[0], -1, self._config.head_dim),
            self._pool,
            place,
            None if q_norm is None or k_norm is None else (q_norm, k_norm),
            (rotary.cos, rotary.sin),
            batch.positions,
            batch.slots[group],
            self._norm_style,
            self._kv_scales[index],
        )

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return layer.activate(gate_up, self._config.traits.activation)


class BatchInvariantOps(TritonOps):
    """The operations for the setting ``deterministic``: a row's results have the same bits in any
    batch and chunking. All products use one tiling, and attention treats a decode as a prefill
    chunk of one token, so that its keys are summed in the same order as in a longer chunk."""

    def _make_attention(self, pool: KvPool) -> TritonAttention:
        return TritonAttention(pool, self._config.traits, one_loop=True)

    def prepare(self, batch: PackedBatch) -> None:
        super().prepare(replace(batch, num_decodes=0))

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        stored = weight.fp8 if isinstance(weight, QuantizedMatrix) else weight
        return gemm.gemm_linear(
            x, stored, bias, gemm.fixed_tiling(x.dtype), self.attention.num_processors
        )
