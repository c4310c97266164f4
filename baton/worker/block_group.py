"""Blocks that are read at once: the places of their bytes, their verification and decoding."""

from collections.abc import Iterable, Mapping, Sequence

from baton.core.ids import BlockId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.kv_codec.base import BlockCodec
from baton.transport.base import TransferRange
from baton.worker.kv_layout import KvLayout
from baton.worker.staging_area import align


class BlockGroup:
    """Blocks that are read at once: raw ones into the blocks ``block_ids`` of the KV pool, encoded
    ones into the staging area. Call :meth:`place` first if ``staged_bytes`` is not 0."""

    def __init__(
        self,
        layout: KvLayout,
        codecs: Mapping[KvCodecName, BlockCodec],
        blocks: Sequence[BlockRef],
        block_ids: Sequence[BlockId],
    ) -> None:
        self._layout = layout
        self._codecs = codecs
        self._blocks = blocks
        self._block_ids = block_ids
        self._places = [block_id * layout.block_bytes for block_id in block_ids]

    @property
    def staged_bytes(self) -> int:
        """The size of the range that the encoded blocks need in the staging area."""
        return sum(map(staged_bytes, self._blocks))

    def place(self, offset_bytes: int) -> None:
        """Read the encoded blocks to ``offset_bytes`` in the region, one after the other."""
        for index, block in enumerate(self._blocks):
            if block.codec is not KvCodecName.NONE:
                self._places[index] = offset_bytes
                offset_bytes += staged_bytes(block)

    def ranges(self) -> list[TransferRange]:
        """Return a range per block."""
        return [
            TransferRange(block.offset_bytes, place, block.size_bytes)
            for block, place in zip(self._blocks, self._places, strict=True)
        ]

    def verify(self, first: int, last: int) -> list[bool]:
        """Verify the checksums of the blocks in [first, last) and decode those that are encoded.
        Return which of the blocks are good. This takes as long as reading them."""
        indexes = range(first, last)
        good = self._matching(indexes)
        for name in dict.fromkeys(self._blocks[index].codec for index in indexes):
            if name is not KvCodecName.NONE:
                some = [i for i in indexes if i in good and self._blocks[i].codec is name]
                good.difference_update(self._undecodable(self._codecs[name], some))
        return [index in good for index in indexes]

    def _matching(self, indexes: Iterable[int]) -> set[int]:
        """Return the indexes of the blocks that have the announced checksums."""
        raw: list[int] = []
        encoded: list[int] = []
        for index in indexes:
            is_raw = self._blocks[index].codec is KvCodecName.NONE
            (raw if is_raw else encoded).append(index)
        checksums: list[int] = []
        if raw:
            checksums += self._layout.compute_checksums([self._block_ids[i] for i in raw])
        if encoded:
            ranges = [(self._places[i], self._blocks[i].size_bytes) for i in encoded]
            checksums += self._layout.compute_range_checksums(ranges)
        pairs = zip([*raw, *encoded], checksums, strict=True)
        return {index for index, checksum in pairs if checksum == self._blocks[index].checksum}

    def _undecodable(self, codec: BlockCodec, indexes: Sequence[int]) -> list[int]:
        """Decode blocks into the pool. Return the indexes of those that are no valid encodings."""
        if not indexes:
            return []
        valid = codec.decode(
            [self._layout.address + self._places[i] for i in indexes],
            [self._blocks[i].size_bytes for i in indexes],
            [self._layout.block_address(self._block_ids[i]) for i in indexes],
        )
        return [index for index, is_valid in zip(indexes, valid, strict=True) if not is_valid]


def staged_bytes(block: BlockRef) -> int:
    """Return the size that a block needs in the staging area; 0 for a raw block."""
    return 0 if block.codec is KvCodecName.NONE else align(block.size_bytes)
