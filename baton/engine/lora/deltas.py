"""Adds the adapters' products to those of the base model, with torch, on any device."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from baton.engine.lora.adapter import LoraWeights, LowRank
from baton.engine.lora.segments import LoraSegment


def add_deltas(
    y: torch.Tensor, x: torch.Tensor, index: int, name: str, segments: Sequence[LoraSegment]
) -> torch.Tensor:
    """Add x A^T B^T to ``y`` [num_tokens, outs], in place, for the tokens of each segment, and
    return ``y``. A and B are those of the segment's adapter for the matrix ``name`` (a field of
    :class:`LoraLayerOf`) of layer ``index``; ``x`` is [num_tokens, ins]."""
    for segment in segments:
        weights: LoraWeights = segment.adapter
        pair: LowRank | None = getattr(weights.layers[index], name)
        if pair is not None:
            tokens = slice(segment.first, segment.first + segment.num_tokens)
            y[tokens] += functional.linear(functional.linear(x[tokens], pair.a), pair.b)
    return y
