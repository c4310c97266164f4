"""Encodes blocks for the KV store in the worker's staging area."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockId, BlockKey
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.errors import DeadlineExceeded
from baton.kv_codec.base import BlockCodec
from baton.worker.kv_layout import KvLayout
from baton.worker.staging_area import StagingArea, StagingRange

CHUNK_BYTES = 16 * 1024 * 1024
"""Maximum size of blocks that are encoded together, before they are encoded."""

STAGING_WAIT_SECONDS = 1.0
"""The wait for space in the staging area before blocks are stored raw."""


@dataclass(frozen=True, slots=True)
class StagedBlocks:
    """References to blocks, some of which are encoded in the staging area, in ``ranges``. Whoever
    gets them calls :meth:`release` once the store has read the blocks."""

    refs: tuple[BlockRef, ...]
    staging: StagingArea | None = None
    ranges: tuple[StagingRange, ...] = ()

    def release(self) -> None:
        for each in self.ranges:
            assert self.staging is not None
            self.staging.release(each)


class StoreEncoder:
    """Encodes blocks in ``codec``. Exact blocks, and the first ``num_exact_blocks`` of a chain, get
    LOSSLESS instead of a lossy codec: later tokens attend most to a prompt's beginning. A block
    that would not become smaller stays raw."""

    def __init__(
        self,
        layout: KvLayout,
        codec: KvCodecName = KvCodecName.NONE,
        codecs: Mapping[KvCodecName, BlockCodec] | None = None,
        staging: StagingArea | None = None,
        num_exact_blocks: int = 1,
    ) -> None:
        self._layout = layout
        self._codec = codec
        self._codecs = codecs or {}
        self._staging = staging
        self._num_exact_blocks = num_exact_blocks

    def max_blocks(self, max_put_bytes: int) -> int:
        """Return how many blocks one put may have."""
        size = max_put_bytes if self._codec is KvCodecName.NONE else CHUNK_BYTES
        return max(size // self._layout.block_bytes, 1)

    async def stage(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], first: int, *, exact: bool
    ) -> StagedBlocks:
        """Encode the leading blocks, as many as there is space for in the staging area, and at
        least one. They begin at index ``first`` of their chain. If there is no space for long, all
        of them stay raw."""
        chosen = [
            self._codec_of(index, exact=exact) for index in range(first, first + len(block_ids))
        ]
        ranges = await self._allocate(chosen)
        if ranges is None or self._staging is None:
            return StagedBlocks(await self._layout.block_refs(block_ids, keys))
        try:
            encode = partial(self._encode, block_ids[: len(ranges)], keys, chosen, ranges)
            refs = await run_in_thread(encode)
        except BaseException:
            StagedBlocks((), self._staging, _present(ranges)).release()
            raise
        return StagedBlocks(refs, self._staging, _present(ranges))

    def _codec_of(self, index: int, *, exact: bool) -> BlockCodec | None:
        name = self._codec
        if name.is_lossy and (exact or index < self._num_exact_blocks):
            name = KvCodecName.LOSSLESS
        return self._codecs.get(name)

    async def _allocate(
        self, chosen: Sequence[BlockCodec | None]
    ) -> list[StagingRange | None] | None:
        """Allocate space for the leading blocks, which are to be encoded with the codecs
        ``chosen``. Return None if no block can be encoded."""
        staging = self._staging
        sizes = [codec.max_encoded_bytes if codec is not None else 0 for codec in chosen]
        if staging is None or not any(sizes):
            return None
        ranges: list[StagingRange | None] = []
        for size in sizes:
            taken = None
            if size and not any(ranges):
                if not staging.fits(size, for_reader=True):
                    return None
                try:
                    taken = await staging.allocate(size, STAGING_WAIT_SECONDS, for_reader=True)
                except DeadlineExceeded:
                    return None
            elif size:
                taken = staging.try_allocate(size, for_reader=True)
                if taken is None:
                    break
            ranges.append(taken)
        return ranges

    def _encode(
        self,
        block_ids: Sequence[BlockId],
        keys: Sequence[BlockKey],
        chosen: Sequence[BlockCodec | None],
        ranges: Sequence[StagingRange | None],
    ) -> tuple[BlockRef, ...]:
        """Encode blocks into ``ranges``, and return references to them, or to the raw blocks that
        did not become smaller. Takes as long as reading the blocks."""
        layout, refs = self._layout, []
        for block_id, key, codec, slot in zip(block_ids, keys, chosen, ranges, strict=False):
            size = 0
            if codec is not None and slot is not None:
                target = layout.address + slot.offset_bytes
                (size,) = codec.encode([layout.block_address(block_id)], [target])
            if codec is not None and slot is not None and size:
                (checksum,) = layout.compute_range_checksums([(slot.offset_bytes, size)])
                refs.append(BlockRef(slot.offset_bytes, size, checksum, key, codec.name))
                continue
            (checksum,) = layout.compute_checksums([block_id])
            size = layout.block_bytes
            refs.append(BlockRef(block_id * size, size, checksum, key))
        return tuple(refs)


def _present(ranges: Sequence[StagingRange | None]) -> tuple[StagingRange, ...]:
    return tuple(each for each in ranges if each is not None)
