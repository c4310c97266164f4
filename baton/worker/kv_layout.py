"""The layout of a worker's paged KV pool for transfers: offsets, ranges, checksums."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockId, BlockKey
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef
from baton.transport.reads import INLINE_BYTES

PARALLEL_CHECKSUM_BYTES = 4 * 1024 * 1024
"""Minimum number of bytes per thread: from twice this size on, two threads compute checksums faster
than one."""


def no_range_checksums(ranges: Sequence[tuple[int, int]]) -> list[int]:
    raise AssertionError("the pool has no staging area")


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of KV blocks. ``name`` is equal on two workers iff their blocks have the same
    binary format.

    ``compute_checksums`` computes one 64-bit checksum per block with ``checksum_algorithm``, and
    ``compute_range_checksums`` one per range of the pool's memory (its offset and size in bytes).
    They take as long as reading the bytes, so only small calls are made in the event loop.

    ``address`` is the pool's address in this process, or on its GPU. It and
    ``compute_range_checksums`` are used only if the pool has a staging area."""

    name: str
    block_bytes: int
    checksum_algorithm: str
    compute_checksums: Callable[[Sequence[BlockId]], list[int]]
    address: int = 0
    compute_range_checksums: Callable[[Sequence[tuple[int, int]]], list[int]] = no_range_checksums

    def block_address(self, block_id: BlockId) -> int:
        return self.address + block_id * self.block_bytes

    async def block_refs(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey]
    ) -> tuple[BlockRef, ...]:
        """Return references to blocks for a reader. Blocks beyond ``keys`` are partly filled and
        get an empty key."""
        checksums = await self._block_checksums(block_ids)
        padded = [*keys, *[BlockKey(b"")] * (len(block_ids) - len(keys))]
        return tuple(
            BlockRef(block_id * self.block_bytes, self.block_bytes, checksum, key)
            for block_id, checksum, key in zip(block_ids, checksums, padded, strict=True)
        )

    async def _block_checksums(self, block_ids: Sequence[BlockId]) -> list[int]:
        half = len(block_ids) // 2
        if half * self.block_bytes >= PARALLEL_CHECKSUM_BYTES:
            halves = (block_ids[:half], block_ids[half:])
            summing = [run_in_thread(partial(self.compute_checksums, part)) for part in halves]
            return [checksum for part in await asyncio.gather(*summing) for checksum in part]
        few = len(block_ids) * self.block_bytes <= INLINE_BYTES
        if few and self.checksum_algorithm == CHECKSUM_XXH3:
            return self.compute_checksums(block_ids)  # faster than switching to a thread
        return await run_in_thread(partial(self.compute_checksums, block_ids))
