"""In which encoding a stored block is, and what the node may do with it."""

from dataclasses import dataclass
from functools import lru_cache

from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.core.store import PutRequest
from baton.errors import Invalid
from baton.kv_codec.block_format import BlockFormat, parse_layout
from kvstore.limits import MAX_RAW_BYTES
from kvstore.slot_sizes import FIXED_SIZE_STEPS, STEPS_PER_DOUBLING, slot_bytes_for

MAX_DIMENSION = 2**16 - 1
"""Each dimension of a block's format has 16 bits in the records of the SSD tier."""


@dataclass(frozen=True, slots=True)
class BlockEncoding:
    """The encoding of a block's bytes. ``format`` is that of the raw block, None if it is unknown,
    which only raw blocks may have. If ``exact`` is set, the block must not get a lossy codec."""

    codec: KvCodecName = KvCodecName.NONE
    format: BlockFormat | None = None
    exact: bool = False

    def raw_bytes(self, size_bytes: int) -> int:
        """Return the size of the raw block, if the block as it is has ``size_bytes``."""
        return size_bytes if self.format is None else self.format.size_bytes

    def slot_bytes(self, size_bytes: int) -> int:
        """Return the size of the slot for a block of ``size_bytes`` in this encoding. Lossy codecs
        give all blocks of a format the same size."""
        steps = FIXED_SIZE_STEPS if self.codec.is_lossy else STEPS_PER_DOUBLING
        return slot_bytes_for(size_bytes, self.raw_bytes(size_bytes), steps)


RAW = BlockEncoding()


def encodings_of(request: PutRequest) -> list[BlockEncoding]:
    """Return the encoding of each block of a put. Raises Invalid if a block is encoded in a way
    that its layout or the request does not allow, or if its size is impossible for its layout."""
    format_ = _storable_format(request.layout)
    by_codec = {
        codec: BlockEncoding(codec, format_, request.exact)
        for codec in {block.codec for block in request.blocks}
    }
    for block in request.blocks:
        _check(block, by_codec[block.codec], request.layout)
    return [by_codec[block.codec] for block in request.blocks]


def _check(block: BlockRef, encoding: BlockEncoding, layout: str) -> None:
    codec, format_ = encoding.codec, encoding.format
    if format_ is None:
        if codec is not KvCodecName.NONE:
            raise Invalid(
                f"a block is encoded in codec {codec}, but its layout {layout!r} has no codecs; it "
                "must be like bfloat16[28x2x16x8x128]",
                param="layout",
            )
        return
    if codec.is_lossy and encoding.exact:
        raise Invalid(
            f"a block is encoded in codec {codec}, which is lossy, although the put is exact",
            param="exact",
        )
    raw = format_.size_bytes
    if codec is KvCodecName.NONE and block.size_bytes != raw:
        raise Invalid(
            f"a raw block has {block.size_bytes} bytes; in layout {layout} it must have {raw}",
            param="blocks",
        )
    if codec is not KvCodecName.NONE and block.size_bytes >= raw:
        raise Invalid(
            f"a block encoded in codec {codec} has {block.size_bytes} bytes; in layout {layout} it "
            f"must have fewer than {raw}, the size of a raw block",
            param="blocks",
        )


@lru_cache(maxsize=64)
def _storable_format(layout: str) -> BlockFormat | None:
    """Return the format of blocks with that layout; None for a layout that has no codecs, or whose
    raw blocks would be too large to be encoded."""
    format_ = parse_layout(layout)
    if format_ is None or format_.size_bytes > MAX_RAW_BYTES:
        return None
    dimensions = (
        format_.num_layers,
        format_.block_tokens,
        format_.kv_heads,
        format_.head_dim,
    )
    return format_ if all(0 < size <= MAX_DIMENSION for size in dimensions) else None
