"""Caches the block tables of a step's rows, which change little from one step to the next."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.core.ids import BlockId
from baton.engine.plan import Row

BlockIdArray = NDArray[np.int64]


class BlockTableCache:
    """Caches the last step's block tables as arrays, by group of layers. Converting a table from a
    tuple to an array costs 50 ns per block, and a context of 4,096 tokens has 256 blocks. A table
    is recognized by the identity of its tuple: a sequence whose blocks change gets a new tuple.
    Where a table has NO_BLOCK, the array has 0: attention does not read that block."""

    def __init__(self, num_groups: int = 1) -> None:
        self.num_groups = num_groups
        self._arrays: dict[int, tuple[tuple[BlockId, ...], BlockIdArray]] = {}
        """The array [num_groups, num_spans] of each block table, by the table's ``id()``. The table
        itself is kept, too, so that no other object can get its id."""

    def pack(self, rows: Sequence[Row], used: Sequence[int]) -> BlockIdArray:
        """Return the rows' block tables as an array [num_groups, num_rows, max(used)]. Row i of the
        array has the blocks of the first ``used[i]`` spans of ``rows[i]``, padded with 0."""
        self._arrays = {id(row.block_ids): self._array(row.block_ids) for row in rows}
        tables = np.zeros((self.num_groups, len(rows), max(used)), dtype=np.int64)
        for index, (row, count) in enumerate(zip(rows, used, strict=True)):
            tables[:, index, :count] = self._arrays[id(row.block_ids)][1][:, :count]
        return tables

    def _array(self, block_ids: tuple[BlockId, ...]) -> tuple[tuple[BlockId, ...], BlockIdArray]:
        known = self._arrays.get(id(block_ids))
        if known:
            return known
        array = np.array(block_ids, dtype=np.int64).reshape(-1, self.num_groups).T
        return block_ids, np.maximum(array, 0, out=array)
