"""Where the parts of a losslessly encoded block are.

A BF16 value has a sign, 8 bits of exponent and 7 of mantissa. Sign and mantissa are nearly random,
but most exponents of a plane are among a few neighbours. So each exponent is written with 3 bits:
its distance from the first exponent of the plane's *window*, or 7 if it is not among the window's
7 exponents. The exponents outside the windows, the *escapes*, follow at the end.

    header        HEADER_BYTES
    ends          uint32[num_planes]      the number of escapes up to the end of each plane
    firsts        uint8[num_planes]       the first exponent of each plane's window; padded to 16
    codes         uint64[num_planes, num_chunks, 3]  bit i of word j: bit j of the code of value i
    rests         uint8[num_planes, plane_values]    (mantissa << 1) | sign
    low halves    uint16[num_planes, plane_values]   the low 16 bits of each value, if float32
    escapes       uint8[ends[-1]]

Integers are little-endian. A float32 value is a BF16 value followed by 16 more bits of mantissa.
"""

from dataclasses import dataclass

from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.header import CHUNK_VALUES, HEADER_BYTES

WINDOW = 7
"""The exponents that have a code of their own."""

CODE_BITS = 3
MAX_FIRST = 256 - WINDOW
SAMPLED_CHUNKS = 16
"""The window is chosen by about this many chunks of a plane."""


@dataclass(frozen=True, slots=True)
class LosslessLayout:
    """The offsets of the parts of an encoded block, in bytes."""

    num_planes: int
    num_chunks: int
    firsts: int
    codes: int
    rests: int
    low_halves: int
    escapes: int
    size_bytes: int
    """The size of the block itself. An encoding is smaller."""

    @property
    def ends(self) -> int:
        return HEADER_BYTES

    @property
    def sample_stride(self) -> int:
        """Every how many chunks one is sampled. It is odd, so that the sample has chunks of all
        heads and all parts of a head."""
        return (self.num_chunks // SAMPLED_CHUNKS) | 1

    @property
    def max_escapes(self) -> int:
        """The escapes that an encoding has space for; it may be negative."""
        return self.size_bytes - 1 - self.escapes


def lossless_layout(block_format: BlockFormat) -> LosslessLayout:
    """Return the layout of encoded blocks of this format, for which codecs exist."""
    planes, values = block_format.num_planes, block_format.plane_values
    chunks = values // CHUNK_VALUES
    firsts = HEADER_BYTES + 4 * planes
    codes = -(-(firsts + planes) // 16) * 16
    rests = codes + planes * chunks * CODE_BITS * 8
    low_halves = rests + planes * values
    escapes = low_halves + (planes * values * 2 if block_format.dtype == "float32" else 0)
    return LosslessLayout(
        planes, chunks, firsts, codes, rests, low_halves, escapes, block_format.size_bytes
    )
