"""Caches the block tables of a step's rows, which change little from one step to the next."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.core.ids import BlockId
from baton.engine.plan import Row

BlockIdArray = NDArray[np.int64]


class BlockTableCache:
    """Caches the last step's block tables as arrays, because converting a table from a tuple to an
    array costs 50 ns per block, and a context of 4,096 tokens has 256 blocks. A table is recognized
    by the identity of its tuple: a sequence whose blocks change gets a new tuple. Where a table has
    NO_BLOCK, the array has 0: attention does not read that block."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[tuple[BlockId, ...], BlockIdArray]] = {}
        """The array of each block table, by the table's ``id()``. The table itself is kept, too, so
        that no other object can get its id."""

    def pack(self, rows: Sequence[Row], used: Sequence[int]) -> BlockIdArray:
        """Return the rows' block tables as an array [num_rows, max(used)]. Row i of the array has
        the first ``used[i]`` blocks of ``rows[i]``, padded with 0."""
        self._arrays = {id(row.block_ids): self._array(row.block_ids) for row in rows}
        table = np.zeros((len(rows), max(used)), dtype=np.int64)
        for target, row, count in zip(table, rows, used, strict=True):
            target[:count] = self._arrays[id(row.block_ids)][1][:count]
        return table

    def _array(self, block_ids: tuple[BlockId, ...]) -> tuple[tuple[BlockId, ...], BlockIdArray]:
        known = self._arrays.get(id(block_ids))
        if known:
            return known
        array = np.array(block_ids, dtype=np.int64)
        return block_ids, np.maximum(array, 0, out=array)
