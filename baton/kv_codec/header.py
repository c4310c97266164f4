"""The header of an encoded block, and which blocks can be encoded."""

import struct

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.block_format import BYTES_PER_VALUE, BlockFormat

HEADER_BYTES = 16

CHUNK_VALUES = 64
"""Codecs handle values in chunks of this size, so a plane must have a multiple of them."""

MAX_BLOCK_VALUES = 2**30
"""Offsets in an encoded block are integers of 32 bits."""

CODEC_CODES = {
    KvCodecName.LOSSLESS: 1,
    KvCodecName.FP8: 2,
    KvCodecName.INT4: 3,
    KvCodecName.INT2: 4,
}
DTYPE_CODES = {"float32": 0, "bfloat16": 1}

_MAGIC = b"K1"
_HEADER = struct.Struct("<2sBBIHHHH")
_MAX_DIMENSION = 2**16 - 1


def make_header(name: KvCodecName, block_format: BlockFormat) -> bytes:
    """Return the HEADER_BYTES with which a block of this format in this codec begins. They are the
    same for all such blocks, so a reader compares them with those it expects."""
    shape = (block_format.block_tokens, block_format.kv_heads, block_format.head_dim)
    return _HEADER.pack(
        _MAGIC,
        CODEC_CODES[name],
        DTYPE_CODES[block_format.dtype],
        block_format.num_layers,
        *shape,
        0,
    )


def has_codecs(block_format: BlockFormat) -> bool:
    """Return whether blocks of this format can be encoded: the dtype is one of BYTES_PER_VALUE, a
    plane is a multiple of CHUNK_VALUES, and all sizes fit in the header."""
    shape = (block_format.block_tokens, block_format.kv_heads, block_format.head_dim)
    values = block_format.num_planes * block_format.plane_values
    return (
        block_format.dtype in BYTES_PER_VALUE
        and 0 < values <= MAX_BLOCK_VALUES
        and block_format.plane_values % CHUNK_VALUES == 0
        and max(shape) <= _MAX_DIMENSION
    )
