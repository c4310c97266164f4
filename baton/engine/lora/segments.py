"""Which tokens of a step use which adapter, and what the adapters add to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from baton.engine.lora.adapter import LoraWeights, LowRank
from baton.engine.plan import Row


@dataclass(slots=True)
class LoraSegment:
    """Tokens [first, first + num_tokens) of a packed batch, which use the same adapter.
    ``adapter`` is the adapter as the model has prepared it (``DecoderModel.prepare_adapter``)."""

    first: int
    num_tokens: int
    adapter: Any


def lora_segments(rows: Sequence[Row], find: Callable[[bytes], Any]) -> list[LoraSegment]:
    """Return the segments of a step, in order. Rows without an adapter are in none of them, and
    neighbours with the same adapter share one. ``find`` returns the prepared adapter with a
    digest."""
    segments: list[LoraSegment] = []
    first, previous = 0, b""
    for row in rows:
        num_tokens = len(row.token_ids)
        if row.adapter:
            if row.adapter == previous:
                segments[-1].num_tokens += num_tokens
            else:
                segments.append(LoraSegment(first, num_tokens, find(row.adapter)))
        first, previous = first + num_tokens, row.adapter
    return segments


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
