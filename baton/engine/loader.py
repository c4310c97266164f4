"""Finds a model's weights in a checkpoint by name, as mapped file views or as torch tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from baton.checkpoints.checkpoint import Fp8Format, ModelConfig, is_gguf
from baton.checkpoints.decoder_traits import MoeConfig
from baton.engine.fused_experts import fused_experts
from baton.engine.gguf_shards import GgufShards
from baton.engine.kv_scale import KvScale
from baton.engine.quantization import head_quantization
from baton.engine.quantized_matrix import load_matrix
from baton.engine.shards import CheckpointShards, Progress, StoredTensor
from baton.errors import Invalid

M = TypeVar("M")
N = TypeVar("N")

QUANTIZED_MATRICES = ("qkv", "output", "gate_up", "down", "expert_gate_up", "expert_down")
"""The matrices of a layer that are quantized."""


@dataclass(slots=True)
class LayerOf(Generic[M]):
    """The weights of one decoder layer. Linear weights are [out, in]. The weights of queries, keys
    and values are joined in ``qkv``, and the weights of gate and up in ``gate_up``.

    A dense layer has ``gate_up`` and ``down``. A layer with experts has ``router`` [num_experts,
    hidden], ``expert_gate_up`` [num_experts, 2 * size, hidden] and ``expert_down`` [num_experts,
    hidden, size] instead. ``post_norm`` is the norm before the feed-forward. What else a layer may
    have is described in ``DecoderTraits``: ``sinks`` is [num_heads], and
    the biases of experts are [num_experts, outs].
    """

    input_norm: M
    post_norm: M
    qkv: M
    qkv_bias: M | None
    output: M
    q_norm: M | None
    k_norm: M | None
    gate_up: M | None = None
    down: M | None = None
    router: M | None = None
    expert_gate_up: M | None = None
    expert_down: M | None = None
    output_bias: M | None = None
    sinks: M | None = None
    attention_output_norm: M | None = None
    feed_forward_output_norm: M | None = None
    gate_up_bias: M | None = None
    down_bias: M | None = None
    router_bias: M | None = None
    expert_gate_up_bias: M | None = None
    expert_down_bias: M | None = None

    def map(self, change: Callable[[str, M], N]) -> "LayerOf[N]":
        """Return a layer with ``change(name, weight)`` applied to each weight."""
        weights = {name: getattr(self, name) for name in self.__slots__}
        changed: dict[str, Any] = {
            name: None if weight is None else change(name, weight)
            for name, weight in weights.items()
        }
        return LayerOf(**changed)


@dataclass(slots=True)
class WeightsOf(Generic[M]):
    """All weights of a model. ``head`` is the same object as ``embedding`` if the two are tied."""

    embedding: M
    layers: list[LayerOf[M]]
    norm: M
    head: M


LayerWeights = LayerOf[torch.Tensor]
Weights = WeightsOf[torch.Tensor]


class CheckpointWeights(WeightsOf[StoredTensor]):
    """Weights in the mapped checkpoint files. They are checked at construction, but read only when
    they are used.

    ``layer_order`` are the layer indices in the order of the files; loading layers in this order
    reads the files sequentially. ``kv_scales`` are the layers' scales for a KV pool in FP8."""

    def __init__(self, path: Path, config: ModelConfig, progress: Progress | None = None) -> None:
        """Map the files and check the tensors. Raises Invalid, with the names of the file and the
        tensor, if a tensor is missing or not as expected."""
        shards = open_shards(path, progress, config.fp8)
        shape = (config.vocab_size,), config.hidden_size
        embedding = shards.stack(["model.embed_tokens.weight"], *shape)
        if embedding.is_fp8:
            raise Invalid(
                f"{path}: model.embed_tokens.weight is in FP8; only the weights of linear "
                "layers may be in FP8"
            )
        tied = config.tie_word_embeddings
        super().__init__(
            embedding=embedding,
            layers=[_layer(shards, config, index) for index in range(config.num_layers)],
            norm=shards.stack(["model.norm.weight"], [config.hidden_size]),
            head=embedding if tied else shards.stack(["lm_head.weight"], *shape),
        )
        self.kv_scales = [_kv_scale(shards, index) for index in range(config.num_layers)]
        shards.check_all_read()
        places = [shards.file_position(layer.input_norm) for layer in self.layers]
        self.layer_order = sorted(range(config.num_layers), key=places.__getitem__)

    def to_torch(
        self, device: torch.device, dtype: torch.dtype, quantization: str = "none"
    ) -> Weights:
        """Load all weights as torch tensors. At any time, at most one matrix is in memory twice, in
        its stored and its loaded form."""

        def join(name: str, stack: StoredTensor) -> torch.Tensor:
            return load_matrix(
                stack, device, dtype, quantization if name in QUANTIZED_MATRICES else "none"
            )

        head = load_matrix(self.head, device, dtype, head_quantization(quantization))
        is_tied = self.head is self.embedding
        layers = {index: self.layers[index].map(join) for index in self.layer_order}
        return WeightsOf(
            embedding=head if is_tied else self.embedding.join(device, dtype),
            layers=[layers[index] for index in range(len(layers))],
            norm=self.norm.join(device, dtype),
            head=head,
        )


def open_shards(
    path: Path, progress: Progress | None = None, fp8: Fp8Format | None = None
) -> CheckpointShards:
    """Open the files with a model's weights, in safetensors or GGUF."""
    return GgufShards(path, progress) if is_gguf(path) else CheckpointShards(path, progress, fp8)


def _layer(shards: CheckpointShards, config: ModelConfig, index: int) -> LayerOf[StoredTensor]:
    prefix = f"model.layers.{index}."
    attention = prefix + "self_attn."
    hidden, head_dim = config.hidden_size, config.head_dim
    rows = [config.num_heads * head_dim, *[config.num_kv_heads * head_dim] * 2]
    names = [f"{attention}{part}_proj" for part in "qkv"]

    def norm(name: str, size: int) -> StoredTensor:
        return shards.stack([name + ".weight"], [size])

    traits = config.traits
    post_norm = "pre_feedforward" if traits.has_output_norms else "post_attention"
    layer = LayerOf(
        input_norm=norm(prefix + "input_layernorm", hidden),
        post_norm=norm(f"{prefix}{post_norm}_layernorm", hidden),
        qkv=shards.stack([name + ".weight" for name in names], rows, hidden),
        qkv_bias=shards.stack([f"{n}.bias" for n in names], rows) if config.qkv_bias else None,
        output=shards.stack([attention + "o_proj.weight"], [hidden], rows[0]),
        q_norm=norm(attention + "q_norm", head_dim) if config.qk_norm else None,
        k_norm=norm(attention + "k_norm", head_dim) if config.qk_norm else None,
    )
    if traits.output_bias:
        layer.output_bias = shards.stack([attention + "o_proj.bias"], [hidden])
    if traits.has_sinks:
        layer.sinks = shards.stack([attention + "sinks"], [config.num_heads])
    if traits.has_output_norms:
        layer.attention_output_norm = norm(prefix + "post_attention_layernorm", hidden)
        layer.feed_forward_output_norm = norm(prefix + "post_feedforward_layernorm", hidden)
    if config.moe is None or index not in config.moe.layers:
        _dense(shards, config, prefix + "mlp.", layer)
    elif config.moe.clamped is not None:
        _gpt_oss_experts(shards, config.moe, hidden, prefix + "mlp.", layer)
    else:
        _experts(shards, config, prefix + "mlp.", layer)
    return layer


def _dense(
    shards: CheckpointShards, config: ModelConfig, prefix: str, layer: LayerOf[StoredTensor]
) -> None:
    size, hidden = config.intermediate_size, config.hidden_size
    names = [f"{prefix}{part}_proj" for part in ("gate", "up")]
    layer.gate_up = shards.stack([name + ".weight" for name in names], [size, size], hidden)
    layer.down = shards.stack([f"{prefix}down_proj.weight"], [hidden], size)
    if config.traits.mlp_bias:
        layer.gate_up_bias = shards.stack([name + ".bias" for name in names], [size, size])
        layer.down_bias = shards.stack([f"{prefix}down_proj.bias"], [hidden])


def _kv_scale(shards: CheckpointShards, index: int) -> KvScale:
    prefix = f"model.layers.{index}.self_attn."
    return KvScale(*(shards.scalar(f"{prefix}{part}_scale", 1.0) for part in "kv"))


def _experts(
    shards: CheckpointShards, config: ModelConfig, prefix: str, layer: LayerOf[StoredTensor]
) -> None:
    assert config.moe is not None
    size, hidden = config.moe.intermediate_size, config.hidden_size
    each = [f"{prefix}experts.{expert}." for expert in range(config.moe.num_experts)]
    layer.router = shards.stack([prefix + "gate.weight"], [len(each)], hidden)
    pairs = [[f"{name}gate_proj.weight", f"{name}up_proj.weight"] for name in each]
    layer.expert_gate_up = shards.stack_experts(pairs, 2 * size, hidden)
    layer.expert_down = shards.stack_experts(
        [[f"{name}down_proj.weight"] for name in each], hidden, size
    )


def _gpt_oss_experts(
    shards: CheckpointShards, moe: MoeConfig, hidden: int, prefix: str, layer: LayerOf[StoredTensor]
) -> None:
    """Find the weights of gpt-oss' experts. Gate and up alternate in the rows of
    ``expert_gate_up``."""
    count, size, experts = moe.num_experts, moe.intermediate_size, prefix + "experts."
    layer.router = shards.stack([prefix + "router.weight"], [count], hidden)
    layer.router_bias = shards.stack([prefix + "router.bias"], [count])
    layer.expert_gate_up = fused_experts(shards, experts + "gate_up_proj", count, 2 * size, hidden)
    layer.expert_gate_up_bias = shards.stack([experts + "gate_up_proj_bias"], [count], 2 * size)
    layer.expert_down = fused_experts(shards, experts + "down_proj", count, hidden, size)
    layer.expert_down_bias = shards.stack([experts + "down_proj_bias"], [count], hidden)
