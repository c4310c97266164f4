"""The matrices of a LoRA adapter, joined as the base model's are: one pair for each matrix of
:class:`baton.engine.loader.LayerOf`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from baton.checkpoints.adapter_checkpoint import StoredAdapter, StoredMatrix, StoredPair
from baton.checkpoints.checkpoint import ModelConfig
from baton.errors import Invalid

M = TypeVar("M")
N = TypeVar("N")

JOINED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The projections that each matrix of a layer consists of, in the order of their rows."""

RANK_MULTIPLE = 8
"""Ranks are padded with zeros to a multiple of this. The kernels multiply BF16 numbers in pairs,
and GPUs read eight of them at once."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(slots=True)
class LowRankOf(Generic[M]):
    """The addition to the product with a matrix [outs, ins]: x A^T B^T, where ``a`` is [rank, ins]
    and ``b`` is [outs, rank]. The adapter's scaling is part of ``b``.

    If the matrix consists of several projections, the rows of their A are stacked in ``a``, and
    ``b`` has their B on its diagonal; the rest of it is zero.
    """

    a: M
    b: M

    def map(self, change: Callable[[M], N]) -> "LowRankOf[N]":
        return LowRankOf(change(self.a), change(self.b))


@dataclass(slots=True)
class LoraLayerOf(Generic[M]):
    """An adapter's additions to the matrices of one layer. None: nothing is added."""

    qkv: LowRankOf[M] | None = None
    output: LowRankOf[M] | None = None
    gate_up: LowRankOf[M] | None = None
    down: LowRankOf[M] | None = None

    def map(self, change: Callable[[M], N]) -> "LoraLayerOf[N]":
        pairs = {name: getattr(self, name) for name in JOINED}
        return LoraLayerOf(
            **{name: None if pair is None else pair.map(change) for name, pair in pairs.items()}
        )


LowRank = LowRankOf[torch.Tensor]
LoraLayer = LoraLayerOf[torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """An adapter's additions to all layers of a model, as torch tensors."""

    layers: tuple[LoraLayer, ...]

    @property
    def size_bytes(self) -> int:
        pairs = [getattr(layer, name) for layer in self.layers for name in JOINED]
        return sum(pair.a.nbytes + pair.b.nbytes for pair in pairs if pair is not None)


def join_adapter(
    stored: StoredAdapter, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> LoraWeights:
    """Return the adapter's matrices on ``device`` in ``dtype``. Raises Invalid if a number is not
    finite."""
    pairs = {(pair.module.layer, pair.module.projection): pair for pair in stored.pairs}
    sizes = _projection_sizes(model)
    layers = []
    for index in range(model.num_layers):
        layer = LoraLayer()
        for name, projections in JOINED.items():
            parts = [pairs.get((index, each)) for each in projections]
            if any(parts):
                outs = [sizes[each] for each in projections]
                joined = _join(stored, parts, outs).map(lambda each: each.to(device, dtype))
                setattr(layer, name, joined)
        layers.append(layer)
    return LoraWeights(tuple(layers))


def _projection_sizes(model: ModelConfig) -> dict[str, int]:
    """Return the number of outputs of each projection."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, size = model.hidden_size, model.intermediate_size
    return {
        "q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden,
        "gate_proj": size, "up_proj": size, "down_proj": hidden,
    }  # fmt: skip


def _join(
    stored: StoredAdapter, parts: Sequence[StoredPair | None], outs: Sequence[int]
) -> LowRank:
    """Join the pairs of the projections of one matrix, in FP32. A projection that the adapter does
    not change is None."""
    present = [part for part in parts if part is not None]
    rank = sum(part.rank for part in present)
    padded = -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
    a = torch.zeros(padded, present[0].module.ins)
    b = torch.zeros(sum(outs), padded)
    row = column = 0
    for part, size in zip(parts, outs, strict=True):
        if part is not None:
            a[column : column + part.rank] = _read(stored, part, part.a)
            b[row : row + size, column : column + part.rank] = part.scaling * _read(
                stored, part, part.b
            )
            column += part.rank
        row += size
    return LowRank(a, b)


def _read(stored: StoredAdapter, pair: StoredPair, matrix: StoredMatrix) -> torch.Tensor:
    """Return a matrix in FP32. Raises Invalid if a number is not finite."""
    data = bytearray(stored.data[matrix.start : matrix.end])
    values = torch.frombuffer(data, dtype=_DTYPES[matrix.dtype]).view(matrix.shape).float()
    if not torch.isfinite(values).all():
        raise Invalid(f"{stored.path}: a weight of {pair.module.name} is not finite")
    return values
