"""Blocks on their way in from the store, and out to it: whole blocks, of no request."""

from collections.abc import Sequence

from baton.core.ids import BlockId, BlockKey
from baton.engine.block_pool import BlockPool
from baton.engine.scheduler import Scheduler


class CacheTransfers:
    """Each import owns its FILLING blocks, and pins the cached prefix that it extends: else
    making room for the tail could evict the head. Readers on behalf of the store pin, too."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._pinned: dict[tuple[BlockId, ...], list[BlockId]] = {}
        self._read: list[list[BlockId]] = []

    def begin(self, keys: Sequence[BlockKey], after: Sequence[BlockKey]) -> list[BlockId] | None:
        """One FILLING block per key, or None when they don't fit beside what runs."""
        if not keys:
            return []
        prefix = self._pool.find(after)
        if not self._scheduler.fits(prefix, len(keys)):
            return None
        self._pool.reference(prefix)
        block_ids = self._pool.allocate(len(keys))
        self._pinned[tuple(block_ids)] = prefix
        return block_ids

    def finish(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[BlockId],
        num_good: int,
        *,
        quarantine: bool,
    ) -> None:
        """Seals the first ``num_good`` blocks, gives up the others."""
        if not block_ids:
            return
        prefix = self._pinned.pop(tuple(block_ids))
        for key, block_id in zip(keys[:num_good], block_ids[:num_good], strict=True):
            self._pool.seal(block_id, key)
        if quarantine:
            self._pool.quarantine(block_ids[num_good:])
            block_ids = block_ids[:num_good]
        self._pool.release([*prefix, *block_ids])
        self._scheduler.wake()

    def pin(self, block_ids: list[BlockId]) -> list[BlockId]:
        """Whoever reads sealed blocks has a share in them."""
        self._pool.reference(block_ids)
        self._read.append(block_ids)
        return block_ids

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        self._read.remove(list(block_ids))
        self._pool.release(block_ids)
        self._scheduler.wake()

    def owned(self) -> list[BlockId]:
        """Every reference that imports hold, for the accounts of ``check_integrity``."""
        return [
            block_id
            for block_ids, prefix in self._pinned.items()
            for block_id in (*prefix, *block_ids)
        ] + [block_id for block_ids in self._read for block_id in block_ids]
