"""The interface of attention over the paged KV pool. Each kind of device has its own backend."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from baton.core.attention_window import MAX_WINDOW_TOKENS
from baton.engine.attention.block_tables import BlockTableCache
from baton.engine.plan import Row

ALL_TOKENS = MAX_WINDOW_TOKENS
"""As a number of recent tokens: all tokens of any context."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The rows of one step, packed: their tokens follow one another. Row i consists of tokens
    [offsets[i], offsets[i + 1]) of the batch.

    The request of row i has ``starts[i]`` tokens in the KV cache before this step, and
    ``context_lengths[i]`` after it. The first ``num_decodes`` rows have one token each. ``slots``
    [num_groups, num_tokens] say where each token's KV is stored in the layers of each group: block
    id * block_tokens + offset. ``block_tables`` is [num_groups, num_rows, max_spans] in int64,
    padded with 0. ``positions`` [num_tokens] are the tokens' positions in their requests.
    ``attention_windows`` has the sink tokens and the recent tokens of each row
    (:class:`baton.core.attention_window.AttentionWindow`; a row without one has 0 and ALL_TOKENS);
    it is empty if no row has an attention window.
    """

    starts: tuple[int, ...]
    context_lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    num_decodes: int
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    attention_windows: tuple[tuple[int, int], ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.starts)


class Attention(Protocol):
    """Attention over one KV pool.

    A query at position ``p`` of a layer with a window attends to the positions (``p`` - window,
    ``p``]; in a row with an attention window, to (``p`` - recent tokens, ``p``] and to the sink
    tokens. No model has both. Nothing is read from blocks that no query of the step attends to in
    any layer, so their entries in the block table may be stale."""

    def prepare(self, batch: PackedBatch) -> None:
        """Prepare for a batch. This must be called once per step, before the first layer."""
        ...

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write ``k`` and ``v`` [num_tokens, kv_heads, head_dim] to their slots, and compute causal
        attention over each row's context. ``q`` and the result are [num_tokens, heads, head_dim].
        ``sinks`` [heads] are scores that take part in each head's softmax and have no value."""
        ...


def pack_batch(
    rows: Sequence[Row],
    block_tokens: int,
    device: torch.device,
    tables: BlockTableCache | None = None,
    num_groups: int = 1,
) -> PackedBatch:
    """Pack a plan's rows into tensors. The tensors are built on the host, without loops over
    tokens, and then copied to ``device``. ``tables`` caches the rows' block tables from one step to
    the next; without it, ``num_groups`` is the number of groups of layers."""
    tables = tables or BlockTableCache(num_groups)
    if all(len(row.token_ids) == 1 for row in rows):
        return _decode_batch(rows, block_tokens, device, tables)
    starts = np.array([row.start for row in rows])
    counts = np.array([len(row.token_ids) for row in rows])
    contexts = starts + counts
    offsets = np.concatenate(([0], np.cumsum(counts)))
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    blocks = tables.pack(rows, (-(-contexts // block_tokens)).tolist())
    owners = np.repeat(np.arange(len(rows)), counts)
    block_ids = np.ascontiguousarray(blocks[:, owners, positions // block_tokens])
    slots = block_ids * block_tokens + positions % block_tokens
    return PackedBatch(
        tuple(starts.tolist()),
        tuple(contexts.tolist()),
        tuple(offsets.tolist()),
        int((counts != 1).argmax()),
        torch.from_numpy(positions).to(device),
        torch.from_numpy(slots).to(device),
        torch.from_numpy(blocks).to(device),
        _attention_windows(rows),
    )


def _attention_windows(rows: Sequence[Row]) -> tuple[tuple[int, int], ...]:
    windows = [row.attention_window for row in rows]
    if not any(windows):
        return ()
    return tuple(
        (0, ALL_TOKENS) if window is None else (window.sink_tokens, window.recent_tokens)
        for window in windows
    )


def _decode_batch(
    rows: Sequence[Row], block_tokens: int, device: torch.device, tables: BlockTableCache
) -> PackedBatch:
    """Pack a batch that has only decodes, as most batches do. This loops over the rows in Python,
    to save calls of NumPy and torch: a call takes 10 µs, more than such a loop, because reading the
    model's weights has evicted the code of NumPy and torch from the CPU's caches."""
    starts = tuple(row.start for row in rows)
    num_groups = tables.num_groups
    slots = [
        [
            row.block_ids[start // block_tokens * num_groups + group] * block_tokens
            + start % block_tokens
            for row, start in zip(rows, starts, strict=True)
        ]
        for group in range(num_groups)
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
        _attention_windows(rows),
    )
