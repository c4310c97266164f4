"""Blocks as arrays of float32 values, for the lossy codecs in NumPy."""

import numpy as np
import numpy.typing as npt

from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.host_memory import Bytes

Floats = npt.NDArray[np.float32]


def read_values(block: Bytes, block_format: BlockFormat) -> Floats:
    """Return the values of a block, [num_planes, block_tokens, kv_heads, head_dim]."""
    if block_format.dtype == "float32":
        values = block.view("<f4")
    else:
        values = (block.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return values.reshape(
        block_format.num_planes,
        block_format.block_tokens,
        block_format.kv_heads,
        block_format.head_dim,
    )


def write_values(values: Floats, block: Bytes, block_format: BlockFormat) -> None:
    """Write values to a block, rounded to its dtype."""
    if block_format.dtype == "float32":
        block.view("<f4")[:] = values.ravel()
    else:
        block.view("<u2")[:] = to_bfloat16(values).ravel()


def to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even, and return the bits. NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)
