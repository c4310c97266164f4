"""A decode batch at fixed addresses, for a CUDA graph to read."""

from collections.abc import Sequence

import torch

from baton.engine.attention.base import PackedBatch
from baton.engine.attention.triton_cuda import DeviceBatch

TOKENS, POSITIONS, SLOTS, CONTEXTS = range(4)
NO_SLOT = -1
"""The slot of a padding row: its KV is not written."""


class StaticBatch:
    """A batch of ``rows`` decodes with contexts of up to ``max_context`` tokens.

    If :meth:`fill` gets fewer rows, the remaining ones are padding: they have no context and no
    slot, so they touch no block. The graph reads ``token_ids`` [rows] and ``device_batch``.
    """

    def __init__(
        self, rows: int, max_context: int, block_tokens: int, device: torch.device
    ) -> None:
        self.rows, self.max_context = rows, max_context
        max_blocks = -(-max_context // block_tokens)
        self._host_rows, self._rows = _host_and_device(4, rows, device)
        self._host_tables, self._tables = _host_and_device(rows, max_blocks, device)
        self.token_ids = self._rows[TOKENS]
        self.device_batch = DeviceBatch(
            rows,
            max_context,
            self._rows[POSITIONS],
            self._rows[SLOTS],
            self._tables,
            self._rows[CONTEXTS],
        )
        self.clear()

    def clear(self) -> None:
        """Turn all rows into padding."""
        self._clear_rows_from(0)
        self._rows.copy_(self._host_rows)

    def fits(self, batch: PackedBatch) -> bool:
        return batch.num_rows <= self.rows and max(batch.context_lengths) <= self.max_context

    def fill(self, token_ids: Sequence[int], batch: PackedBatch) -> None:
        """Copy ``batch`` (decodes only, on the host) into the static batch. The copies are
        asynchronous: the device must have finished them before the next call."""
        rows = batch.num_rows
        assert batch.num_decodes == rows == len(token_ids) and self.fits(batch)
        lines = self._host_rows
        lines[TOKENS, :rows] = torch.tensor(token_ids, dtype=torch.int32)
        lines[POSITIONS, :rows] = batch.positions
        lines[SLOTS, :rows] = batch.slots
        lines[CONTEXTS, :rows] = torch.tensor(batch.context_lengths, dtype=torch.int32)
        self._clear_rows_from(rows)
        used = batch.block_tables.shape[1]
        self._host_tables[:rows, :used] = batch.block_tables
        self._rows.copy_(lines, non_blocking=True)
        self._tables[:rows].copy_(self._host_tables[:rows], non_blocking=True)

    def _clear_rows_from(self, rows: int) -> None:
        """Turn the rows with index ``rows`` or higher into padding."""
        self._host_rows[:, rows:] = 0
        self._host_rows[SLOTS, rows:] = NO_SLOT


def _host_and_device(
    lines: int, columns: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two integer tensors, one on the host (pinned, for asynchronous copies) and one on the
    device."""
    on_host = torch.zeros((lines, columns), dtype=torch.int32, pin_memory=device.type == "cuda")
    return on_host, on_host.to(device, copy=True)
