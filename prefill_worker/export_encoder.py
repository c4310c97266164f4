"""Encodes the blocks of one KV export, and keeps them until they have been read."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import BlockId, BlockKey
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.errors import DeadlineExceeded, Unavailable
from baton.worker.block_encoder import BlockEncoder, StagedBlocks


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


class ExportEncoder:
    """Encodes the blocks of one export, in order, a chunk at a time. It owns the space of a chunk
    until all of the chunk's blocks are acknowledged, or until it is closed. If others occupy the
    staging area for long, blocks are announced as they are."""

    def __init__(self, encoder: BlockEncoder, export_codec: ExportCodec) -> None:
        self._encoder = encoder
        self._export_codec = export_codec
        self._num_announced = 0
        self._held: deque[tuple[int, StagedBlocks]] = deque()  # with the index of the chunk's end
        self._closed = False

    async def block_refs(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], spans: Sequence[int]
    ) -> tuple[BlockRef, ...]:
        """Return references to the first of the blocks, which are the next ones of the export: to
        as many as a chunk has and as there is space for, and at least to one. ``spans`` are the
        spans of the blocks. Blocks beyond ``keys`` are partly filled and get an empty key. Raises
        Unavailable if the encoder was closed."""
        size = self._encoder.chunk_blocks
        chunk = await self._encode(block_ids[:size], keys[:size], spans[:size])
        if self._closed:
            chunk.release()
            raise Unavailable("the prefill worker aborted the request")
        self._num_announced += len(chunk.refs)
        if chunk.ranges:
            self._held.append((self._num_announced, chunk))
        return chunk.refs

    def acknowledge(self, num_blocks: int) -> None:
        """Free the space of the chunks within the first ``num_blocks`` blocks, which have been
        read."""
        while self._held and self._held[0][0] <= num_blocks:
            self._held.popleft()[1].release()

    def close(self) -> None:
        """Free the space of all blocks."""
        self._closed = True
        self.acknowledge(self._num_announced)

    async def _encode(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], spans: Sequence[int]
    ) -> StagedBlocks:
        codecs = [self._export_codec.of_span(span) for span in spans]
        while True:
            waits_for_reader = bool(self._held)
            try:
                return await self._encoder.encode(block_ids, keys, codecs)
            except DeadlineExceeded:
                if not waits_for_reader:  # otherwise, the reader acknowledges some of them
                    return await self._encoder.stay_raw(block_ids, keys)
