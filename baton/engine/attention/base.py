"""Attention over the paged KV pool: one interface, a backend per kind of device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from baton.engine.attention.tables import BlockTables
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


def make_batch(
    rows: Sequence[Row],
    block_tokens: int,
    device: torch.device,
    tables: BlockTables | None = None,
) -> Batch:
    """Tensors of a plan's rows; built on the host, moved once. Nothing is done token by token.
    ``tables`` are those of the steps before."""
    starts = np.array([row.start for row in rows])
    counts = np.array([len(row.token_ids) for row in rows])
    num_decodes = int(np.argmax(np.append(counts, 0) != 1))
    contexts = starts + counts
    offsets = np.concatenate(([0], np.cumsum(counts)))
    blocks = (tables or BlockTables()).join(rows, (-(-contexts // block_tokens)).tolist())
    if num_decodes == len(rows):
        owners, positions = np.arange(len(rows)), starts
    else:
        owners = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    slots = blocks[owners, positions // block_tokens] * block_tokens + positions % block_tokens
    return Batch(
        tuple(starts.tolist()),
        tuple(contexts.tolist()),
        tuple(offsets.tolist()),
        num_decodes,
        torch.from_numpy(positions).to(device),
        torch.from_numpy(slots).to(device),
        torch.from_numpy(blocks).to(device),
    )
