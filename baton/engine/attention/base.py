"""Attention over the paged KV pool: one interface, a backend per kind of device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
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
    """Tensors of a plan's rows; built on the host, moved once. Nothing is done token by token."""
    starts = np.array([row.start for row in rows])
    counts = np.array([row.num_tokens for row in rows])
    contexts = starts + counts
    offsets = np.concatenate(([0], np.cumsum(counts)))
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    used = -(-contexts // block_tokens)
    tables = np.zeros((len(rows), used.max()), dtype=np.int64)
    for table, row, count in zip(tables, rows, used.tolist(), strict=True):
        table[:count] = row.block_ids[:count]
    blocks = tables[np.repeat(np.arange(len(rows)), counts), positions // block_tokens]
    slots = blocks * block_tokens + positions % block_tokens
    return Batch(
        tuple(starts.tolist()),
        tuple(contexts.tolist()),
        tuple(offsets.tolist()),
        int((counts != 1).argmax()) if (counts != 1).any() else len(rows),
        torch.from_numpy(positions).to(device),
        torch.from_numpy(slots).to(device),
        torch.from_numpy(tables).to(device),
    )
