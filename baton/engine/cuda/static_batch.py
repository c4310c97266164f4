"""A decode batch at addresses that never change, for a graph to read."""

from collections.abc import Sequence

import torch

from baton.engine.attention.base import PackedBatch
from baton.engine.attention.triton_cuda import DeviceBatch

TOKENS, POSITIONS, SLOTS, CONTEXTS = range(4)
NO_SLOT = -1
"""The slot of a row that only fills the batch up: its KV is written nowhere."""


class StaticBatch:
    """``rows`` decodes with contexts of up to ``max_context`` tokens.

    After :meth:`fill` with fewer, those left over have no context and no slot, so that they
    touch no block. ``token_ids`` [rows] and ``device`` are what the graph reads.
    """

    def __init__(
        self, rows: int, max_context: int, block_tokens: int, device: torch.device
    ) -> None:
        self.rows, self.max_context = rows, max_context
        max_blocks = -(-max_context // block_tokens)
        self._host_lines, self._lines = _host_and_device(4, rows, device)
        self._host_tables, self._tables = _host_and_device(rows, max_blocks, device)
        self.token_ids = self._lines[TOKENS]
        self.device = DeviceBatch(
            rows,
            max_context,
            self._lines[POSITIONS],
            self._lines[SLOTS],
            self._tables,
            self._lines[CONTEXTS],
        )
        self.clear()

    def clear(self) -> None:
        """No row is real."""
        self._set_lines(0)
        self._lines.copy_(self._host_lines)

    def fits(self, batch: PackedBatch) -> bool:
        return batch.num_rows <= self.rows and max(batch.contexts) <= self.max_context

    def fill(self, token_ids: Sequence[int], batch: PackedBatch) -> None:
        """``batch``: decodes alone, on the host. Copies go on after this returns: the device must
        have done them before the next call."""
        rows = batch.num_rows
        assert batch.num_decodes == rows == len(token_ids) and self.fits(batch)
        lines = self._host_lines
        lines[TOKENS, :rows] = torch.tensor(token_ids, dtype=torch.int32)
        lines[POSITIONS, :rows] = batch.positions
        lines[SLOTS, :rows] = batch.slots
        lines[CONTEXTS, :rows] = torch.tensor(batch.contexts, dtype=torch.int32)
        self._set_lines(rows)
        used = batch.block_tables.shape[1]
        self._host_tables[:rows, :used] = batch.block_tables
        self._lines.copy_(lines, non_blocking=True)
        self._tables[:rows].copy_(self._host_tables[:rows], non_blocking=True)

    def _set_lines(self, rows: int) -> None:
        """What lies beyond ``rows`` fills up."""
        self._host_lines[:, rows:] = 0
        self._host_lines[SLOTS, rows:] = NO_SLOT


def _host_and_device(
    lines: int, columns: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers on the host, from where they can be copied in the background, and on the device."""
    on_host = torch.zeros((lines, columns), dtype=torch.int32, pin_memory=device.type == "cuda")
    return on_host, on_host.to(device, copy=True)
