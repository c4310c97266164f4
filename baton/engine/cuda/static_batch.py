"""A decode batch at fixed addresses, for a CUDA graph to read."""

import torch

from baton.engine.attention.base import PackedBatch
from baton.engine.cuda.attention import DeviceBatch
from baton.engine.executor import MAX_INFLIGHT_PLANS
from baton.engine.step_tokens import StepTokens

TOKENS, POSITIONS, CONTEXTS, SLOTS = range(4)
"""The lines of a batch's integers for each row; from ``SLOTS`` on, there is one for each group of
layers."""

NO_SLOT = -1
"""The slot of a padding row: its KV is not written."""

NUM_STAGED = MAX_INFLIGHT_PLANS
"""Number of the host's copies, which are filled in turn: the copy of one step may still be on its
way to the device while the next step's is filled in."""


class StaticBatch:
    """A batch of ``rows`` decodes with contexts of up to ``max_context`` tokens.

    If :meth:`fill` gets fewer rows, the remaining ones are padding: they have no context and no
    slot, so they touch no block. The graph reads ``token_ids`` [rows] and ``device_batch``.
    """

    def __init__(
        self,
        rows: int,
        max_context: int,
        block_tokens: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        self.rows, self.max_context = rows, max_context
        max_spans = -(-max_context // block_tokens)
        shape = (num_groups, rows, max_spans)
        self._rows = torch.zeros((SLOTS + num_groups, rows), dtype=torch.int32, device=device)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._staged = [_HostCopy(shape, device) for _ in range(NUM_STAGED)]
        self.token_ids = self._rows[TOKENS]
        self.device_batch = DeviceBatch(
            rows,
            max_context,
            self._rows[POSITIONS],
            self._rows[SLOTS:],
            self._tables,
            self._rows[CONTEXTS],
        )
        self.clear()

    def clear(self) -> None:
        """Turn all rows into padding."""
        staged = self._staged[0]
        staged.clear_rows_from(0)
        self._rows.copy_(staged.rows)

    def fits(self, batch: PackedBatch) -> bool:
        return batch.num_rows <= self.rows and max(batch.context_lengths) <= self.max_context

    def fill(self, tokens: StepTokens, batch: PackedBatch) -> None:
        """Copy ``batch`` (decodes only, on the host) and its tokens into the static batch. The
        copies are asynchronous, in the order of the current stream: the device must have finished
        those of the call before the previous one."""
        rows = batch.num_rows
        assert batch.num_decodes == rows == len(tokens.on_host) and self.fits(batch)
        self._staged.reverse()
        staged = self._staged[0]
        lines = staged.rows
        lines[TOKENS, :rows] = torch.tensor(tokens.on_host, dtype=torch.int32)
        lines[POSITIONS, :rows] = batch.positions
        lines[SLOTS:, :rows] = batch.slots
        lines[CONTEXTS, :rows] = torch.tensor(batch.context_lengths, dtype=torch.int32)
        staged.clear_rows_from(rows)
        used = batch.block_tables.shape[2]
        staged.tables[:, :rows, :used] = batch.block_tables
        self._rows.copy_(lines, non_blocking=True)
        for tables, filled in zip(self._tables, staged.tables, strict=True):
            tables[:rows].copy_(filled[:rows], non_blocking=True)
        if tokens.previous is not None:
            self.token_ids[:rows] = tokens.to_device(self.token_ids.device)


class _HostCopy:
    """The host's copy of a static batch, in pinned memory, so that copies to a GPU are
    asynchronous."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        num_groups, rows, _ = shape
        pinned = device.type == "cuda"
        lines = (SLOTS + num_groups, rows)
        self.rows = torch.zeros(lines, dtype=torch.int32, pin_memory=pinned)
        self.tables = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)

    def clear_rows_from(self, rows: int) -> None:
        """Turn the rows with index ``rows`` or higher into padding."""
        self.rows[:, rows:] = 0
        self.rows[SLOTS:, rows:] = NO_SLOT
