"""Imports blocks from the KV store into the prefix cache, and pins cached blocks while the store
reads them. These blocks belong to no request."""

from collections.abc import Sequence

from baton.core.ids import BlockId, BlockKey
from baton.engine.block_pool import BlockPool
from baton.engine.scheduler import Scheduler


class CacheTransfers:
    """Allocates and seals the blocks of imports, and pins the blocks that are being read.

    An import owns its FILLING blocks. It also pins the cached prefix that its blocks continue:
    otherwise, allocating the new blocks could evict that prefix."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._pinned_prefixes: dict[tuple[BlockId, ...], list[BlockId]] = {}
        self._pinned_for_reading: list[list[BlockId]] = []

    def begin_import(
        self, keys: Sequence[BlockKey], preceding_keys: Sequence[BlockKey]
    ) -> list[BlockId] | None:
        """Allocate one FILLING block per key. ``preceding_keys`` are the keys of blocks that must
        not be evicted for them, if they are cached. Return None if the running sequences leave too
        few blocks."""
        if not keys:
            return []
        prefix = self._pool.find_all_cached(preceding_keys)
        if not self._scheduler.can_allocate_new(prefix, len(keys)):
            return None
        self._pool.reference(prefix)
        block_ids = self._pool.allocate(len(keys))
        self._pinned_prefixes[tuple(block_ids)] = prefix
        return block_ids

    def finish_import(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[BlockId],
        num_valid: int,
        *,
        quarantine: bool,
    ) -> None:
        """Seal the first ``num_valid`` blocks, and release the others or, if ``quarantine`` is set,
        quarantine them."""
        if not block_ids:
            return
        prefix = self._pinned_prefixes.pop(tuple(block_ids))
        for key, block_id in zip(keys[:num_valid], block_ids[:num_valid], strict=True):
            self._pool.seal(block_id, key)
        if quarantine:
            self._pool.quarantine(block_ids[num_valid:])
            block_ids = block_ids[:num_valid]
        self._pool.release([*prefix, *block_ids])
        self._scheduler.retry_admission()

    def pin(self, block_ids: list[BlockId]) -> list[BlockId]:
        """Pin sealed blocks until :meth:`unpin` is called, and return them."""
        self._pool.reference(block_ids)
        self._pinned_for_reading.append(block_ids)
        return block_ids

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        self._pinned_for_reading.remove(list(block_ids))
        self._pool.release(block_ids)
        self._scheduler.retry_admission()

    def referenced_blocks(self) -> list[BlockId]:
        """Return every block referenced by an import or a reader, once per reference, for
        ``check_integrity``."""
        return [
            block_id
            for block_ids, prefix in self._pinned_prefixes.items()
            for block_id in (*prefix, *block_ids)
        ] + [block_id for block_ids in self._pinned_for_reading for block_id in block_ids]
