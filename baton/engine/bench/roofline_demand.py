"""What a work takes at least, whatever computes it: operations, and bytes that are read."""

from dataclasses import dataclass

import torch

from baton.checkpoint import ModelConfig
from baton.engine.bench.bench_case import BenchCase
from baton.engine.bench.ceilings import Ceilings
from baton.engine.quantization import INT4_GROUP_SIZE, head_quantization

QUANTIZED = {"int8": 1.0, "int4": 0.5 + 2 / INT4_GROUP_SIZE, "fp8": 1.0}
"""Bytes of a weight, scales that are shared by few among them."""


@dataclass(frozen=True, slots=True)
class ElementSizes:
    """Bytes of an element: of the layers' matrices, of the head's, and of the KV."""

    layers: float
    head: float
    kv: float

    @classmethod
    def of(
        cls, dtype: torch.dtype, quantization: str = "none", kv_dtype: torch.dtype | None = None
    ) -> "ElementSizes":
        """``quantization``: a name in ``baton.engine.quantization.FORMATS``; ``kv_dtype``: if not
        ``dtype``."""
        kept = {"none": float(dtype.itemsize), **QUANTIZED}
        kv = (kv_dtype or dtype).itemsize
        return cls(kept[quantization], kept[head_quantization(quantization)], kv)


@dataclass(frozen=True, slots=True)
class RooflineDemand:
    """``num_bytes``: weights, once for the whole work, and of the KV each token once."""

    flops: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """Operations for each byte: the roofline's x (Williams et al., CACM 2009)."""
        return self.flops / self.num_bytes

    def seconds_at(self, ceilings: Ceilings) -> float:
        """The roof: whatever is slower, computing or reading."""
        return max(
            self.flops / ceilings.flops_per_second, self.num_bytes / ceilings.bytes_per_second
        )

    def is_bound_by_memory(self, ceilings: Ceilings) -> bool:
        return self.intensity * ceilings.bytes_per_second < ceilings.flops_per_second


def roofline_demand(work: BenchCase, config: ModelConfig, widths: ElementSizes) -> RooflineDemand:
    """Logits are one row's of each request, as a scheduler asks for them."""
    pairs = 4 * work.num_pairs * config.num_layers * config.num_heads * config.head_dim
    layers = _each_token(config) * work.num_tokens
    head = config.vocab_size * config.hidden_size
    return RooflineDemand(
        flops=2 * layers + pairs + 2 * head * work.batch,
        num_bytes=_read(config, work.num_tokens) * widths.layers
        + head * widths.head
        + config.kv_elements_per_token * work.kv_tokens * widths.kv,
    )


def num_weights(config: ModelConfig) -> float:
    """All that is kept in memory, but for norms and biases."""
    tables = 1 if config.tie_word_embeddings else 2
    dense = config.num_layers - len(config.moe.layers if config.moe else ())
    experts = config.moe.num_experts * _experts(config) if config.moe else 0
    matrices = _common(config) + dense * _feed_forward(config) + experts
    return matrices + tables * config.vocab_size * config.hidden_size


def _each_token(config: ModelConfig) -> float:
    """Weights that a token is multiplied with, in all layers."""
    experts = _experts(config)
    dense = config.num_layers - len(config.moe.layers if config.moe else ())
    chosen = config.moe.experts_per_token if config.moe else 0
    return _common(config) + dense * _feed_forward(config) + chosen * experts


def _read(config: ModelConfig, num_tokens: int) -> float:
    """Weights that so many tokens need between them; of experts, those that are likely chosen, as
    if each token chose at random."""
    dense = config.num_layers - len(config.moe.layers if config.moe else ())
    common = _common(config) + dense * _feed_forward(config)
    if config.moe is None:
        return common
    missed = (1 - config.moe.experts_per_token / config.moe.num_experts) ** num_tokens
    return common + config.moe.num_experts * (1 - missed) * _experts(config)


def _common(config: ModelConfig) -> int:
    """Attention's matrices, and routers."""
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    routed = len(config.moe.layers) * config.moe.num_experts if config.moe else 0
    return config.hidden_size * (config.num_layers * heads + routed)


def _feed_forward(config: ModelConfig) -> int:
    """Of a dense layer."""
    return 3 * config.hidden_size * config.intermediate_size


def _experts(config: ModelConfig) -> int:
    """One expert of every layer that has any."""
    if config.moe is None:
        return 0
    return len(config.moe.layers) * 3 * config.hidden_size * config.moe.intermediate_size
