"""Reads leased blocks of the store into the KV pool. Encoded blocks are read into the staging area,
verified, and decoded."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from baton.core.ids import BlockId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.core.store import RAW_ONLY
from baton.kv_codec.base import BlockCodec
from baton.transport.base import TransferRange
from baton.worker.kv_layout import KvLayout
from baton.worker.staging_area import LOCAL_SHARE, StagingArea, StagingRange, align


class BlockReader:
    """Plans reads of blocks that may be encoded. Without ``codecs`` and a staging area, it reads
    only raw blocks."""

    def __init__(
        self,
        layout: KvLayout,
        codecs: Mapping[KvCodecName, BlockCodec] | None = None,
        staging: StagingArea | None = None,
    ) -> None:
        self._layout = layout
        self._codecs = dict(codecs or {}) if staging is not None else {}
        self._staging = staging

    @property
    def codecs(self) -> frozenset[KvCodecName]:
        """The codecs of blocks that can be read."""
        return RAW_ONLY | set(self._codecs)

    @property
    def max_staged_bytes(self) -> int | None:
        """Maximum size of blocks that are read together, as stored; None: no limit."""
        return None if self._staging is None else self._staging.size_bytes // LOCAL_SHARE

    def accepts(self, blocks: Sequence[BlockRef]) -> bool:
        """Return whether all blocks have possible sizes and codecs."""
        size = self._layout.block_bytes
        return all(
            block.size_bytes == size
            if block.codec is KvCodecName.NONE
            else block.codec in self._codecs and 0 < block.size_bytes < size
            for block in blocks
        )

    def num_fitting(self, blocks: Sequence[BlockRef]) -> int:
        """Return how many leading blocks fit in the staging area together."""
        limit = self.max_staged_bytes
        if limit is None:
            return len(blocks)
        total = 0
        for count, block in enumerate(blocks):
            total += _staged_bytes(block)
            if total > limit:
                return count
        return len(blocks)

    async def begin(
        self, blocks: Sequence[BlockRef], block_ids: Sequence[BlockId], timeout_seconds: float
    ) -> "StagedRead":
        """Allocate staging space for reading ``blocks`` into the pool's blocks ``block_ids``. The
        caller frees it with :meth:`StagedRead.release`. Raises DeadlineExceeded if there is no
        space in time."""
        total = sum(map(_staged_bytes, blocks))
        taken = None
        if total:
            assert self._staging is not None, "encoded blocks were not asked for"
            taken = await self._staging.allocate(total, timeout_seconds)
        return StagedRead(self._layout, self._codecs, self._staging, taken, blocks, block_ids)


class StagedRead:
    """One read of several blocks."""

    def __init__(
        self,
        layout: KvLayout,
        codecs: Mapping[KvCodecName, BlockCodec],
        staging: StagingArea | None,
        taken: StagingRange | None,
        blocks: Sequence[BlockRef],
        block_ids: Sequence[BlockId],
    ) -> None:
        self._layout = layout
        self._codecs = codecs
        self._staging = staging
        self._taken = taken
        self._blocks = blocks
        self._block_ids = block_ids
        base = taken.offset_bytes if taken is not None else 0
        self._offsets = list(accumulate(map(_staged_bytes, blocks), initial=base))

    def ranges(self) -> list[TransferRange]:
        """Return a range per block."""
        return [
            TransferRange(
                block.offset_bytes,
                block_id * self._layout.block_bytes
                if block.codec is KvCodecName.NONE
                else self._offsets[index],
                block.size_bytes,
            )
            for index, (block, block_id) in enumerate(
                zip(self._blocks, self._block_ids, strict=True)
            )
        ]

    def verify(self, algorithm: str, first: int, last: int) -> list[bool]:
        """For each index in [first, last), return whether the bytes that were read have the
        checksum of their block and, if they are encoded, could be decoded into the pool. This takes
        as long as reading the blocks, so don't call it in the event loop."""
        if algorithm != self._layout.checksum_algorithm:
            return [False] * (last - first)
        indexes = range(first, last)
        raw = [i for i in indexes if self._blocks[i].codec is KvCodecName.NONE]
        encoded = [i for i in indexes if self._blocks[i].codec is not KvCodecName.NONE]
        good = set(self._with_right_checksums(raw, encoded))
        for index in encoded:
            if index in good and not self._decode(index):
                good.discard(index)
        return [index in good for index in indexes]

    def _with_right_checksums(self, raw: Sequence[int], encoded: Sequence[int]) -> list[int]:
        layout, blocks = self._layout, self._blocks
        checksums = layout.compute_checksums([self._block_ids[i] for i in raw]) if raw else []
        if encoded:
            checksums = checksums + layout.compute_range_checksums(
                [(self._offsets[i], blocks[i].size_bytes) for i in encoded]
            )
        pairs = zip([*raw, *encoded], checksums, strict=True)
        return [index for index, checksum in pairs if checksum == blocks[index].checksum]

    def _decode(self, index: int) -> bool:
        block, layout = self._blocks[index], self._layout
        source = layout.address + self._offsets[index]
        target = layout.block_address(self._block_ids[index])
        return self._codecs[block.codec].decode([source], [block.size_bytes], [target])[0]

    def release(self) -> None:
        """Free the staging space. Nothing may write to it any more."""
        if self._taken is not None and self._staging is not None:
            self._staging.release(self._taken)
            self._taken = None


def _staged_bytes(block: BlockRef) -> int:
    return 0 if block.codec is KvCodecName.NONE else align(block.size_bytes)
