"""Encodes the blocks of a KV export into the worker's staging area."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockId, BlockKey
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.errors import DeadlineExceeded, Unavailable
from baton.kv_codec.base import BlockCodec
from baton.worker.kv_layout import PARALLEL_CHECKSUM_BYTES, KvLayout
from baton.worker.staging_area import StagingArea, StagingRange

CHUNK_BYTES = 16 * 1024 * 1024
"""Blocks that are encoded and announced together: their size before they are encoded. The reader
reads one chunk while the next is encoded."""

STAGED_CHUNKS = 3
"""A chunk takes at most one part in this many of the staging area: one is read, one has been
announced, and one is being encoded."""

STAGING_WAIT_SECONDS = 0.5
"""The wait for space that other exports occupy, before blocks are announced raw."""


@dataclass(frozen=True, slots=True)
class ExportCodec:
    """The codec of one export. A lossy ``codec`` is not used for the first span of a prompt, nor
    for the spans from ``first_recent_span`` on; these blocks are in ``exact_codec``: LOSSLESS, or
    NONE if the reader does not accept it. Spans: see :class:`baton.engine.kv_window.KvWindow`."""

    codec: KvCodecName
    exact_codec: KvCodecName
    first_recent_span: int

    def of_span(self, span: int) -> KvCodecName:
        if self.codec.is_lossy and (span == 0 or span >= self.first_recent_span):
            return self.exact_codec
        return self.codec


class BlockEncoder:
    """Encodes the blocks of one export, in order. Encoded blocks occupy the staging area until they
    are acknowledged, or until the encoder is closed. If there is no space for long, blocks are
    announced as they are."""

    def __init__(
        self,
        layout: KvLayout,
        staging: StagingArea,
        codecs: Mapping[KvCodecName, BlockCodec],
        export_codec: ExportCodec,
    ) -> None:
        self._layout = layout
        self._staging = staging
        self._codecs = codecs
        self._export_codec = export_codec
        self._num_announced = 0
        self._held: deque[tuple[int, StagingRange]] = deque()  # with the index of the block
        self._closed = False

    async def block_refs(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], spans: Sequence[int]
    ) -> tuple[BlockRef, ...]:
        """Return references to the first of the blocks, which are the next ones of the export: to
        as many as a chunk has and as there is space for, and at least to one. ``spans`` are the
        spans of the blocks. Blocks beyond ``keys`` are partly filled and get an empty key. Raises
        Unavailable if the encoder was closed."""
        limit = max(1, CHUNK_BYTES // self._layout.block_bytes)
        chosen = [self._codecs.get(self._export_codec.of_span(span)) for span in spans[:limit]]
        slots = await self._allocate(chosen)
        block_ids = block_ids[: len(slots)]
        try:
            parts = await self._encode(block_ids, chosen, slots)
            if self._closed:
                raise Unavailable("the prefill worker aborted the request")
        except BaseException:
            for slot in slots:
                self._release(slot)
            raise
        padded = [*keys, *[BlockKey(b"")] * (len(slots) - len(keys))]
        refs = tuple(part.ref(key) for part, key in zip(parts, padded, strict=False))
        for index, (slot, ref) in enumerate(zip(slots, refs, strict=True), self._num_announced):
            if slot is not None and ref.codec is KvCodecName.NONE:
                self._release(slot)
            elif slot is not None:
                self._held.append((index, slot))
        self._num_announced += len(refs)
        return refs

    def acknowledge(self, num_blocks: int) -> None:
        """Free the space of the first ``num_blocks`` blocks, which have been read."""
        while self._held and self._held[0][0] < num_blocks:
            self._release(self._held.popleft()[1])

    def close(self) -> None:
        """Free the space of all blocks."""
        self._closed = True
        self.acknowledge(self._num_announced)

    def _release(self, slot: StagingRange | None) -> None:
        if slot is not None:
            self._staging.release(slot)

    async def _allocate(self, chosen: Sequence[BlockCodec | None]) -> list[StagingRange | None]:
        """Allocate space for the first of the blocks that are to be encoded with the codecs
        ``chosen``; None for blocks that stay as they are."""
        sizes = [0 if codec is None else codec.max_encoded_bytes for codec in chosen]
        if not any(sizes):
            return [None] * len(chosen)
        first = next(index for index, size in enumerate(sizes) if size)
        slot = await self._allocate_first(sizes[first])
        if slot is None:
            return [None] * len(chosen)
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

    async def _allocate_first(self, size_bytes: int) -> StagingRange | None:
        """Wait for space. Return None if other exports occupy it for long."""
        while True:
            try:
                return await self._staging.allocate(
                    size_bytes, STAGING_WAIT_SECONDS, for_reader=True
                )
            except DeadlineExceeded:
                if self._closed:
                    raise Unavailable("the prefill worker aborted the request") from None
                if not self._held:  # otherwise, the reader will acknowledge some of them
                    return None

    async def _encode(
        self,
        block_ids: Sequence[BlockId],
        chosen: Sequence[BlockCodec | None],
        slots: Sequence[StagingRange | None],
    ) -> "list[_EncodedBlock]":
        """Encode the blocks for which there are slots, in one or two threads."""
        blocks = [
            _EncodedBlock(self._layout, block_id, codec if slot else None, slot)
            for block_id, codec, slot in zip(block_ids, chosen, slots, strict=False)
        ]
        half = len(blocks) // 2
        is_small = half * self._layout.block_bytes < PARALLEL_CHECKSUM_BYTES
        parts = [blocks] if is_small else [blocks[:half], blocks[half:]]
        async with asyncio.TaskGroup() as tasks:
            for part in parts:
                tasks.create_task(run_in_thread(partial(_encode_blocks, self._layout, part)))
        return blocks


@dataclass(slots=True)
class _EncodedBlock:
    """A block, and what was made of it: ``size_bytes`` and ``checksum`` are those of its encoding
    in ``slot``. If it stays as it is, ``codec`` is None."""

    layout: KvLayout
    block_id: BlockId
    codec: BlockCodec | None
    slot: StagingRange | None
    size_bytes: int = 0
    checksum: int = 0

    def ref(self, key: BlockKey) -> BlockRef:
        if self.codec is None or self.slot is None:
            size = self.layout.block_bytes
            return BlockRef(self.block_id * size, size, self.checksum, key)
        offset = self.slot.offset_bytes
        return BlockRef(offset, self.size_bytes, self.checksum, key, self.codec.name)


def _encode_blocks(layout: KvLayout, blocks: Sequence[_EncodedBlock]) -> None:
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
    checksums = layout.compute_range_checksums([(at, each.size_bytes) for each, at in encoded])
    for (each, _), checksum in zip(encoded, checksums, strict=True):
        each.checksum = checksum
    checksums = layout.compute_checksums([each.block_id for each in raw])
    for each, checksum in zip(raw, checksums, strict=True):
        each.checksum = checksum
