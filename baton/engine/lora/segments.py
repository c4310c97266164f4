"""Which tokens of a step use which adapter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
