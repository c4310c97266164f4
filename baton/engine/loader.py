"""Weights from safetensors, by mmap, straight to the run's dtype and device."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from baton.checkpoint import ModelConfig, list_shards, shard_header
from baton.errors import Invalid

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_FLOATS = {"F32", "BF16", "F16"}


class Tensors:
    """Named tensors of a checkpoint, each read once, when it is asked for."""

    def __init__(
        self, path: Path, device: torch.device, dtype: torch.dtype, progress: Progress | None
    ) -> None:
        self.path = path
        self.device = device
        self.dtype = dtype
        self._progress = progress
        self._files: dict[str, tuple[Path, dict[str, Any]]] = {}
        self._open: dict[Path, Any] = {}
        self._total_bytes = 0
        self._done_bytes = 0
        for shard in list_shards(self.path):
            header, _ = shard_header(shard)
            for name, entry in header.items():
                if name != "__metadata__":
                    self._files[name] = (shard, entry)
                    start, end = entry["data_offsets"]
                    self._total_bytes += end - start

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor, converted. Raises Invalid when it is missing or of another shape."""
        if name not in self._files:
            raise Invalid(f"{self.path}: no file has tensor {name}")
        shard, entry = self._files[name]
        if tuple(entry["shape"]) != shape:
            raise Invalid(f"{shard}: {name} has shape {entry['shape']}, and must have {[*shape]}")
        if entry["dtype"] not in _FLOATS:
            raise Invalid(
                f"{shard}: {name} has dtype {entry['dtype']}; supported are "
                f"{', '.join(sorted(_FLOATS))}"
            )
        try:
            if shard not in self._open:
                self._open[shard] = safe_open(shard, framework="pt", device="cpu")
            tensor = self._open[shard].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise Invalid(f"{shard}: can't read {name}: {error}") from error
        self._count(entry)
        converted: torch.Tensor = tensor.to(device=self.device, dtype=self.dtype)
        return converted

    def take_joined(self, names: list[str], rows: list[int], *rest: int) -> torch.Tensor:
        """Tensors of ``rows[i]`` rows each, one below the other."""
        joined = torch.empty((sum(rows), *rest), dtype=self.dtype, device=self.device)
        start = 0
        for name, count in zip(names, rows, strict=True):
            joined[start : start + count] = self.take(name, count, *rest)
            start += count
        return joined

    def _count(self, entry: dict[str, Any]) -> None:
        start, end = entry["data_offsets"]
        self._done_bytes += end - start
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Linear weights are [out, in]; ``qkv`` and ``gate_up`` are joined.

    A layer has either ``gate_up`` and ``down``, or ``router`` [num_experts, hidden] with
    ``expert_gate_up`` [num_experts, 2 * size, hidden], ``expert_down`` [.., hidden, size].
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    gate_up: torch.Tensor | None = None
    down: torch.Tensor | None = None
    router: torch.Tensor | None = None
    expert_gate_up: torch.Tensor | None = None
    expert_down: torch.Tensor | None = None


@dataclass(slots=True)
class Weights:
    embedding: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: torch.Tensor


def load_weights(
    path: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Weights:
    """Raises Invalid that names the file and the tensor."""
    tensors = Tensors(path, device, dtype, progress)
    embedding = tensors.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    tied = config.tie_word_embeddings
    return Weights(
        embedding=embedding,
        layers=[_layer(tensors, config, index) for index in range(config.num_layers)],
        norm=tensors.take("model.norm.weight", config.hidden_size),
        head=embedding
        if tied
        else tensors.take("lm_head.weight", config.vocab_size, config.hidden_size),
    )


def _layer(tensors: Tensors, config: ModelConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attention = prefix + "self_attn."
    hidden, head_dim = config.hidden_size, config.head_dim
    rows = [config.num_heads * head_dim, *[config.num_kv_heads * head_dim] * 2]
    names = [f"{attention}{part}_proj" for part in "qkv"]
    has_bias, has_norm = config.qkv_bias, config.qk_norm
    weights = LayerWeights(
        input_norm=tensors.take(prefix + "input_layernorm.weight", hidden),
        post_norm=tensors.take(prefix + "post_attention_layernorm.weight", hidden),
        qkv=tensors.take_joined([name + ".weight" for name in names], rows, hidden),
        qkv_bias=tensors.take_joined([f"{n}.bias" for n in names], rows) if has_bias else None,
        output=tensors.take(attention + "o_proj.weight", hidden, rows[0]),
        q_norm=tensors.take(attention + "q_norm.weight", head_dim) if has_norm else None,
        k_norm=tensors.take(attention + "k_norm.weight", head_dim) if has_norm else None,
    )
    if config.moe is not None and index in config.moe.layers:
        _take_experts(tensors, config, prefix + "mlp.", weights)
    else:
        weights.gate_up, weights.down = _mlp(
            tensors, prefix + "mlp.", hidden, config.intermediate_size
        )
    return weights


def _mlp(
    tensors: Tensors, prefix: str, hidden: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    names = [f"{prefix}{part}_proj.weight" for part in ("gate", "up")]
    gate_up = tensors.take_joined(names, [size, size], hidden)
    return gate_up, tensors.take(prefix + "down_proj.weight", hidden, size)


def _take_experts(
    tensors: Tensors, config: ModelConfig, prefix: str, weights: LayerWeights
) -> None:
    assert config.moe is not None
    num_experts, size = config.moe.num_experts, config.moe.intermediate_size
    hidden = config.hidden_size
    weights.router = tensors.take(prefix + "gate.weight", num_experts, hidden)
    weights.expert_gate_up = weights.router.new_empty((num_experts, 2 * size, hidden))
    weights.expert_down = weights.router.new_empty((num_experts, hidden, size))
    for expert in range(num_experts):
        gate_up, down = _mlp(tensors, f"{prefix}experts.{expert}.", hidden, size)
        weights.expert_gate_up[expert] = gate_up
        weights.expert_down[expert] = down
