"""The interface of attention over the paged KV pool, with one backend per kind of device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from baton.engine.attention.block_tables import BlockTableCache
from baton.engine.plan import Row


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The packed rows of one step. Row i consists of tokens [offsets[i], offsets[i + 1]).

    ``starts[i]`` tokens of row i are in the cache before this step and ``context_lengths[i]`` after
    it. The first ``num_decodes`` rows have one token each. ``slots`` [num_tokens] say where each
    token's KV is stored: block id * block_tokens + offset. ``block_tables`` [num_rows, max_blocks]
    int64, padded with 0. ``positions`` [num_tokens].
    """

    starts: tuple[int, ...]
    context_lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    num_decodes: int
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor

    @property
    def num_rows(self) -> int:
        return len(self.starts)


class Attention(Protocol):
    """Attention over one KV pool."""

    def prepare(self, batch: PackedBatch) -> None:
        """Prepare for a batch. Must be called once per step, before the first layer."""
        ...

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write ``k`` and ``v`` [num_tokens, kv_heads, head_dim] to their slots, and compute causal
        attention over each row's context. ``q`` and the result are [num_tokens, heads, head_dim].
        """
        ...


def pack_batch(
    rows: Sequence[Row],
    block_tokens: int,
    device: torch.device,
    tables: BlockTableCache | None = None,
) -> PackedBatch:
    """Pack a plan's rows into tensors. The tensors are built on the host, without loops over
    tokens, and then copied to ``device``. ``tables`` is the cache of block tables from earlier
    steps."""
    tables = tables or BlockTableCache()
    if all(len(row.token_ids) == 1 for row in rows):
        return _decode_batch(rows, block_tokens, device, tables)
    starts = np.array([row.start for row in rows])
    counts = np.array([len(row.token_ids) for row in rows])
    contexts = starts + counts
    offsets = np.concatenate(([0], np.cumsum(counts)))
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    blocks = tables.pack(rows, (-(-contexts // block_tokens)).tolist())
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
    rows: Sequence[Row], block_tokens: int, device: torch.device, tables: BlockTableCache
) -> PackedBatch:
    """Pack a batch that has only decodes, as most batches do. By the time this runs, the model's
    weights have evicted its code from the CPU's caches, so each NumPy or torch call that is avoided
    saves 10 µs, which is more than a Python loop over the rows costs."""
    starts = tuple(row.start for row in rows)
    slots = [
        row.block_ids[start // block_tokens] * block_tokens + start % block_tokens
        for row, start in zip(rows, starts, strict=True)
    ]
    blocks = tables.pack(rows, [start // block_tokens + 1 for start in starts])
    return PackedBatch(
        starts,
        tuple(start + 1 for start in starts),
        tuple(range(len(rows) + 1)),
        len(rows),
        torch.tensor(starts, dtype=torch.int64, device=device),
        torch.tensor(slots, dtype=torch.int64, device=device),
        torch.from_numpy(blocks).to(device),
    )
