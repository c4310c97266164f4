"""Computes the least work that a case needs on any hardware: the number of arithmetic operations,
and the number of bytes read."""

from dataclasses import dataclass

import torch

from baton.checkpoints.checkpoint import ModelConfig
from baton.engine.bench.bench_case import BenchCase
from baton.engine.bench.ceilings import Ceilings
from baton.engine.quantization import INT4_BLOCK_BYTES, INT4_GROUP_SIZE, head_quantization

QUANTIZED_WEIGHT_BYTES = {"int8": 1.0, "int4": INT4_BLOCK_BYTES / INT4_GROUP_SIZE, "fp8": 1.0}
"""Bytes per weight, including int4's scales and minimums (the other formats' scales are
negligible)."""


@dataclass(frozen=True, slots=True)
class ElementSizes:
    """Bytes per element of the layers' matrices, of the output head, and of the KV."""

    layers: float
    head: float
    kv: float

    @classmethod
    def for_formats(
        cls, dtype: torch.dtype, quantization: str = "none", kv_dtype: torch.dtype | None = None
    ) -> "ElementSizes":
        """Return the sizes for a model whose weights are in ``dtype`` before they are quantized.
        ``quantization`` is one of ``baton.engine.quantization.QUANTIZATION_FORMATS``. ``kv_dtype``
        is the KV pool's dtype (default: ``dtype``)."""
        sizes = {"none": float(dtype.itemsize), **QUANTIZED_WEIGHT_BYTES}
        kv = (kv_dtype or dtype).itemsize
        return cls(sizes[quantization], sizes[head_quantization(quantization)], kv)


@dataclass(frozen=True, slots=True)
class RooflineDemand:
    """The least numbers of operations and of bytes that a case needs. ``num_bytes`` counts the
    weights once for the whole case, and each token's KV once."""

    flops: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, operations per byte: the roofline's x axis (Williams et al., CACM
        2009)."""
        return self.flops / self.num_bytes

    def seconds_at(self, ceilings: Ceilings) -> float:
        """Return the least possible time: either the time to compute or the time to read, whichever
        is longer."""
        return max(
            self.flops / ceilings.flops_per_second, self.num_bytes / ceilings.bytes_per_second
        )

    def is_bound_by_memory(self, ceilings: Ceilings) -> bool:
        return self.intensity * ceilings.bytes_per_second < ceilings.flops_per_second


def roofline_demand(
    work: BenchCase, config: ModelConfig, element_sizes: ElementSizes
) -> RooflineDemand:
    """Return the demand of a case. Logits are computed for one token of each request, as in
    serving."""
    pairs = 4 * work.num_pairs * config.num_layers * config.num_heads * config.head_dim
    layers = _weights_per_token(config) * work.num_tokens
    head = config.vocab_size * config.hidden_size
    return RooflineDemand(
        flops=2 * layers + pairs + 2 * head * work.batch,
        num_bytes=_weights_read(config, work.num_tokens) * element_sizes.layers
        + head * element_sizes.head
        + config.kv_elements_per_token * work.kv_tokens * element_sizes.kv,
    )


def num_weights(config: ModelConfig) -> float:
    """Return the number of weights in memory, except norms and biases."""
    tables = 1 if config.tie_word_embeddings else 2
    dense = config.num_layers - len(config.moe.layers if config.moe else ())
    experts = config.moe.num_experts * _experts(config) if config.moe else 0
    matrices = _attention_and_moe_routers(config) + dense * _feed_forward(config) + experts
    return matrices + tables * config.vocab_size * config.hidden_size


def _weights_per_token(config: ModelConfig) -> float:
    """Return the number of weights by which the activations of one token are multiplied, in all
    layers."""
    experts = _experts(config)
    dense = config.num_layers - len(config.moe.layers if config.moe else ())
    chosen = config.moe.experts_per_token if config.moe else 0
    return _attention_and_moe_routers(config) + dense * _feed_forward(config) + chosen * experts


def _weights_read(config: ModelConfig, num_tokens: int) -> float:
    """Return the expected number of distinct weights that ``num_tokens`` tokens need, assuming that
    each token chooses its experts at random."""
    dense = config.num_layers - len(config.moe.layers if config.moe else ())
    common = _attention_and_moe_routers(config) + dense * _feed_forward(config)
    if config.moe is None:
        return common
    unused = (1 - config.moe.experts_per_token / config.moe.num_experts) ** num_tokens
    return common + config.moe.num_experts * (1 - unused) * _experts(config)


def _attention_and_moe_routers(config: ModelConfig) -> int:
    """Return the number of weights of attention and of the MoE routers, in all layers."""
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    routed = len(config.moe.layers) * config.moe.num_experts if config.moe else 0
    return config.hidden_size * (config.num_layers * heads + routed)


def _feed_forward(config: ModelConfig) -> int:
    """Return the number of feed-forward weights of one dense layer."""
    return 3 * config.hidden_size * config.intermediate_size


def _experts(config: ModelConfig) -> int:
    """Return the number of weights of one expert per layer, summed over the layers that have
    experts."""
    if config.moe is None:
        return 0
    return len(config.moe.layers) * 3 * config.hidden_size * config.moe.intermediate_size
