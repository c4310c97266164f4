"""The paged pool of this worker as its hand-off sees it: offsets, spans, checksums."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockId, BlockKey
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef
from baton.transport.base import TransferRange
from baton.transport.reads import INLINE_BYTES

PARALLEL_CHECKSUM_BYTES = 4 * 1024 * 1024
"""From twice as much on, two threads sum faster than one."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """``name`` is equal on two workers iff their blocks mean the same bytes.

    ``checksums`` gives one 64-bit checksum per block, by ``checksum_algorithm``; it takes as
    long as reading the blocks, so it is called off the event loop.
    """

    name: str
    block_bytes: int
    checksum_algorithm: str
    checksums: Callable[[Sequence[BlockId]], list[int]]

    async def refs(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey]
    ) -> tuple[BlockRef, ...]:
        """What a reader needs of these blocks. A block beyond ``keys`` is partial."""
        checksums = await self._summed(block_ids)
        padded = [*keys, *[BlockKey(b"")] * (len(block_ids) - len(keys))]
        return tuple(
            BlockRef(block_id * self.block_bytes, self.block_bytes, checksum, key)
            for block_id, checksum, key in zip(block_ids, checksums, padded, strict=True)
        )

    async def _summed(self, block_ids: Sequence[BlockId]) -> list[int]:
        half = len(block_ids) // 2
        if half * self.block_bytes >= PARALLEL_CHECKSUM_BYTES:
            halves = (block_ids[:half], block_ids[half:])
            summing = [run_in_thread(partial(self.checksums, part)) for part in halves]
            return [checksum for part in await asyncio.gather(*summing) for checksum in part]
        few = len(block_ids) * self.block_bytes <= INLINE_BYTES
        if few and self.checksum_algorithm == CHECKSUM_XXH3:
            return self.checksums(block_ids)  # takes less than the way to a thread
        return await run_in_thread(partial(self.checksums, block_ids))

    def spans(
        self, blocks: Sequence[BlockRef], block_ids: Sequence[BlockId]
    ) -> list[TransferRange]:
        """Reads of ``blocks`` into ``block_ids``."""
        return [
            TransferRange(block.offset_bytes, block_id * self.block_bytes, self.block_bytes)
            for block, block_id in zip(blocks, block_ids, strict=True)
        ]

    def good(
        self,
        algorithm: str,
        blocks: Sequence[BlockRef],
        block_ids: Sequence[BlockId],
        first: int,
        last: int,
    ) -> list[bool]:
        """Of [first, last), whether the bytes in each of ``block_ids`` are those that ``blocks``
        announce. Reads them: not in the event loop. What was summed otherwise than here can't be
        told, and is not good."""
        if algorithm != self.checksum_algorithm:
            return [False] * (last - first)
        checksums = self.checksums(block_ids[first:last])
        announced = [block.checksum for block in blocks[first:last]]
        return [a == b for a, b in zip(checksums, announced, strict=True)]
