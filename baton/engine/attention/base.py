"""Attention over the paged KV pool: one interface, a backend per kind of device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.engine.plan import Row


@dataclass(frozen=True, slots=True)
class Batch:
    """The packed rows of one step: row i owns tokens [offsets[i], offsets[i + 1]).

    Of row i, ``starts[i]`` tokens are in the cache before this step and ``contexts[i]`` after
    it. ``num_decodes`` leading rows have one token each. ``slots`` [num_tokens] says where
    each token's KV goes: block id * block_tokens + offset. ``block_tables`` [num_rows,
    max_blocks] int64, padded with 0. ``positions`` [num_tokens].
    """

    starts: tuple[int, ...]
    contexts: tuple[int, ...]
    offsets: tuple[int, ...]
    num_decodes: int
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor

    @property
    def num_rows(self) -> int:
        return len(self.starts)


class Attention(Protocol):
    """Bound to one pool."""

    def prepare(self, batch: Batch) -> None:
        """Once per step, before the first layer."""
        ...

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes ``k`` and ``v`` [num_tokens, kv_heads, head_dim] to their slots, and attends
        causally over each row's context. ``q`` and the result: [num_tokens, heads, head_dim].
        """
        ...


def make_batch(rows: Sequence[Row], block_tokens: int, device: torch.device) -> Batch:
    """Tensors of a plan's rows; built on the host, moved once."""
    starts = tuple(row.start for row in rows)
    contexts = tuple(row.context_tokens for row in rows)
    offsets = [0]
    positions: list[int] = []
    slots: list[int] = []
    for row in rows:
        offsets.append(offsets[-1] + row.num_tokens)
        positions.extend(range(row.start, row.context_tokens))
        for position in range(row.start, row.context_tokens):
            block_id = row.block_ids[position // block_tokens]
            slots.append(block_id * block_tokens + position % block_tokens)
    used = [-(-context // block_tokens) for context in contexts]
    longest = max(used)
    tables = [
        [*row.block_ids[:count], *[0] * (longest - count)]
        for row, count in zip(rows, used, strict=True)
    ]
    num_decodes = next((index for index, row in enumerate(rows) if row.num_tokens != 1), len(rows))
    return Batch(
        starts,
        contexts,
        tuple(offsets),
        num_decodes,
        torch.tensor(positions, dtype=torch.int64, device=device),
        torch.tensor(slots, dtype=torch.int64, device=device),
        torch.tensor(tables, dtype=torch.int64, device=device),
    )
