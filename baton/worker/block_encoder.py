"""Encodes blocks of the KV pool into the staging area, for readers in other processes."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockId, BlockKey
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.kv_codec.base import BlockCodec
from baton.worker.kv_layout import PARALLEL_CHECKSUM_BYTES, KvLayout
from baton.worker.staging_area import StagingArea, StagingRange

CHUNK_BYTES = 16 * 1024 * 1024
"""Maximum size of blocks that are encoded together, before they are encoded. The reader reads one
chunk while the next is encoded."""

STAGED_CHUNKS = 3
"""A chunk takes at most one part in this many of the staging area: one is read, one has been
announced, and one is being encoded."""

STAGING_WAIT_SECONDS = 0.5
"""The wait for space that others occupy."""


@dataclass(frozen=True, slots=True)
class StagedBlocks:
    """References to blocks, some of which are encoded in ``ranges`` of ``staging``. Whoever gets
    them owns the ranges, and calls :meth:`release` once, after the blocks have been read."""

    refs: tuple[BlockRef, ...]
    ranges: tuple[StagingRange, ...] = ()
    staging: StagingArea | None = None

    def release(self) -> None:
        for each in self.ranges:
            assert self.staging is not None
            self.staging.release(each)


class BlockEncoder:
    """Encodes blocks in those of ``codecs`` whose blocks fit in the staging area; without one, it
    has no codecs. Until :meth:`encode` returns, the encoder owns the ranges that it allocates, and
    frees them if it is cancelled."""

    def __init__(
        self,
        layout: KvLayout,
        staging: StagingArea | None = None,
        codecs: Mapping[KvCodecName, BlockCodec] | None = None,
    ) -> None:
        self._layout = layout
        self._staging = staging
        self._codecs = {
            name: codec
            for name, codec in (codecs or {}).items()
            if staging is not None and staging.fits(codec.max_encoded_bytes, for_reader=True)
        }

    @property
    def codecs(self) -> frozenset[KvCodecName]:
        """The codecs in which blocks can be encoded."""
        return frozenset(self._codecs)

    @property
    def chunk_blocks(self) -> int:
        """Maximum number of blocks that are encoded together."""
        return max(1, CHUNK_BYTES // self._layout.block_bytes)

    async def encode(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], codecs: Sequence[KvCodecName]
    ) -> StagedBlocks:
        """Encode the first of the blocks, each in its codec of ``codecs``: as many as a chunk has
        and as there is space for, and at least one. Blocks that have no codec, or would not become
        smaller, stay raw. Blocks beyond ``keys`` are partly filled and get an empty key. Raises
        DeadlineExceeded if there is no space in time."""
        chosen = [self._codecs.get(name) for name in codecs[: self.chunk_blocks]]
        slots = await self._allocate(chosen)
        blocks = [
            _Block(block_id, codec, slot)
            for block_id, codec, slot in zip(block_ids, chosen, slots, strict=False)
        ]
        try:
            await self._encode(blocks)
        except BaseException:
            for each in blocks:
                self._release(each.slot)
            raise
        for each in blocks:
            if each.codec is None:
                self._release(each.slot)
        padded = [*keys, *[BlockKey(b"")] * (len(blocks) - len(keys))]
        refs = tuple(self._ref(each, key) for each, key in zip(blocks, padded, strict=False))
        taken = tuple(each.slot for each in blocks if each.slot and each.codec)
        return StagedBlocks(refs, taken, self._staging)

    async def stay_raw(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey]
    ) -> StagedBlocks:
        """Return references to all of the blocks as they are in the pool."""
        return StagedBlocks(await self._layout.block_refs(block_ids, keys))

    async def _allocate(self, chosen: Sequence[BlockCodec | None]) -> list[StagingRange | None]:
        """Allocate space for the first of the blocks, which are to be encoded with ``chosen``; None
        for blocks that stay as they are."""
        sizes = [0 if codec is None else codec.max_encoded_bytes for codec in chosen]
        if self._staging is None or not any(sizes):
            return [None] * len(sizes)
        first = next(index for index, size in enumerate(sizes) if size)
        slot = await self._staging.allocate(sizes[first], STAGING_WAIT_SECONDS, for_reader=True)
        slots: list[StagingRange | None] = [*[None] * first, slot]
        space = self._staging.readers_bytes // STAGED_CHUNKS - slot.size_bytes
        for size in sizes[first + 1 :]:
            more = None
            if size:
                fits = size <= space
                more = self._staging.try_allocate(size, for_reader=True) if fits else None
                if more is None:
                    break
                space -= more.size_bytes
            slots.append(more)
        return slots

    def _release(self, slot: StagingRange | None) -> None:
        if slot is not None:
            assert self._staging is not None
            self._staging.release(slot)

    async def _encode(self, blocks: "Sequence[_Block]") -> None:
        """Encode the blocks and compute their checksums, in one or two threads."""
        half = len(blocks) // 2
        is_small = half * self._layout.block_bytes < PARALLEL_CHECKSUM_BYTES
        parts = [blocks] if is_small else [blocks[:half], blocks[half:]]
        async with asyncio.TaskGroup() as tasks:
            for part in parts:
                tasks.create_task(run_in_thread(partial(_encode_blocks, self._layout, part)))

    def _ref(self, block: "_Block", key: BlockKey) -> BlockRef:
        if block.codec is None or block.slot is None:
            size = self._layout.block_bytes
            return BlockRef(block.block_id * size, size, block.checksum, key)
        offset = block.slot.offset_bytes
        return BlockRef(offset, block.size_bytes, block.checksum, key, block.codec.name)


@dataclass(slots=True)
class _Block:
    """A block to encode into ``slot``, and what was made of it: ``size_bytes`` and ``checksum`` are
    those of its encoding. If it stays as it is, ``codec`` is None."""

    block_id: BlockId
    codec: BlockCodec | None
    slot: StagingRange | None
    size_bytes: int = 0
    checksum: int = 0


def _encode_blocks(layout: KvLayout, blocks: Sequence[_Block]) -> None:
    """Encode blocks and compute their checksums. Blocks that do not become smaller stay as they
    are."""
    for codec in {id(each.codec): each.codec for each in blocks}.values():
        if codec is None:
            continue
        some = [(each, each.slot) for each in blocks if each.codec is codec and each.slot]
        sizes = codec.encode(
            [layout.block_address(each.block_id) for each, _ in some],
            [layout.address + slot.offset_bytes for _, slot in some],
        )
        for (each, _), size in zip(some, sizes, strict=True):
            each.size_bytes = size
            if not size:
                each.codec = None
    encoded = [(each, each.slot.offset_bytes) for each in blocks if each.codec and each.slot]
    raw = [each for each in blocks if each.codec is None]
    if encoded:
        ranges = [(at, each.size_bytes) for each, at in encoded]
        sums = layout.compute_range_checksums(ranges)
        for (each, _), checksum in zip(encoded, sums, strict=True):
            each.checksum = checksum
    if raw:
        sums = layout.compute_checksums([each.block_id for each in raw])
        for each, checksum in zip(raw, sums, strict=True):
            each.checksum = checksum
