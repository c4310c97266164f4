"""Attention over the paged KV pool: one interface, a backend per kind of device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from baton.engine.attention.block_tables import BlockTables
from baton.engine.plan import Row


@dataclass(frozen=True, slots=True)
class PackedBatch:
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

    def prepare(self, batch: PackedBatch) -> None:
        """Once per step, before the first layer."""
        ...

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes ``k`` and ``v`` [num_tokens, kv_heads, head_dim] to their slots, and attends
        causally over each row's context. ``q`` and the result: [num_tokens, heads, head_dim].
        """
        ...


def pack_batch(
    rows: Sequence[Row],
    block_tokens: int,
    device: torch.device,
    tables: BlockTables | None = None,
) -> PackedBatch:
    """Tensors of a plan's rows; built on the host, moved once. Nothing is done token by token.
    ``tables`` are those of the steps before."""
    tables = tables or BlockTables()
    if all(len(row.token_ids) == 1 for row in rows):
        return _decode_batch(rows, block_tokens, device, tables)
    starts = np.array([row.start for row in rows])
    counts = np.array([len(row.token_ids) for row in rows])
    contexts = starts + counts
    offsets = np.concatenate(([0], np.cumsum(counts)))
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    blocks = tables.join(rows, (-(-contexts // block_tokens)).tolist())
    owners = np.repeat(np.arange(len(rows)), counts)
    slots = blocks[owners, positions // block_tokens] * block_tokens + positions % block_tokens
    return PackedBatch(
        tuple(starts.tolist()),
        tuple(contexts.tolist()),
        tuple(offsets.tolist()),
        int((counts != 1).argmax()),
        torch.from_numpy(positions).to(device),
        torch.from_numpy(slots).to(device),
        torch.from_numpy(blocks).to(device),
    )


def _decode_batch(
    rows: Sequence[Row], block_tokens: int, device: torch.device, tables: BlockTables
) -> PackedBatch:
    """Most steps are such. A model has just swept the caches, so each kind of operation that is not
    needed spares 10 µs, more than a loop over rows takes."""
    starts = tuple(row.start for row in rows)
    slots = [
        row.block_ids[start // block_tokens] * block_tokens + start % block_tokens
        for row, start in zip(rows, starts, strict=True)
    ]
    blocks = tables.join(rows, [start // block_tokens + 1 for start in starts])
    return PackedBatch(
        starts,
        tuple(start + 1 for start in starts),
        tuple(range(len(rows) + 1)),
        len(rows),
        torch.tensor(starts, dtype=torch.int64, device=device),
        torch.tensor(slots, dtype=torch.int64, device=device),
        torch.from_numpy(blocks).to(device),
    )
