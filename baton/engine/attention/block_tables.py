"""The block tables of a step's rows, which change little from one step to the next."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.core.ids import BlockId
from baton.engine.plan import Row

BlockIdArray = NDArray[np.int64]


class BlockTables:
    """Remembers those of the last step as numbers in memory: to make them of a tuple costs 50 ns a
    block, and 4,096 tokens have 256. Whose blocks change has another tuple."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[tuple[BlockId, ...], BlockIdArray]] = {}
        """By the tuple's identity, which is nobody else's as long as the tuple is kept here."""

    def join(self, rows: Sequence[Row], used: Sequence[int]) -> BlockIdArray:
        """[num_rows, most used]: of each row the first ``used`` blocks, padded with 0."""
        self._lines = {id(row.block_ids): self._line(row.block_ids) for row in rows}
        table = np.zeros((len(rows), max(used)), dtype=np.int64)
        for to, row, count in zip(table, rows, used, strict=True):
            to[:count] = self._lines[id(row.block_ids)][1][:count]
        return table

    def _line(self, block_ids: tuple[BlockId, ...]) -> tuple[tuple[BlockId, ...], BlockIdArray]:
        known = self._lines.get(id(block_ids))
        return known or (block_ids, np.array(block_ids, dtype=np.int64))
