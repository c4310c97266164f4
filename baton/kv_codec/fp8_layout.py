"""FP8: where the parts of an encoded block are.

    header        HEADER_BYTES
    scales        uint8[num_planes, kv_heads]     padded to a multiple of 16 bytes
    codes         uint8[num_planes, block_tokens, kv_heads, head_dim]

A code is an E4M3 number (4 bits of exponent, 3 of mantissa, no infinity; Micikevicius et al.,
2022), which is to be multiplied by 2 ** (scale - 127). The scale of a plane's head is the smallest
with which its largest finite value is at most MAX_CODE. A power of two rounds nothing by itself.
Values are rounded to nearest, ties to even. Infinities become the largest code, and NaN stays NaN.
"""

from dataclasses import dataclass

from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.header import HEADER_BYTES

MAX_CODE = 448.0
"""The largest E4M3 number."""

MIN_SCALE, MAX_SCALE = 27, 247
"""The range of scales, as they are stored."""


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    num_planes: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    codes: int
    encoded_bytes: int
    size_bytes: int

    @property
    def scales(self) -> int:
        return HEADER_BYTES


def fp8_layout(block_format: BlockFormat) -> Fp8Layout:
    """Return the layout of blocks of this format that are encoded in FP8."""
    planes, heads = block_format.num_planes, block_format.kv_heads
    codes = -(-(HEADER_BYTES + planes * heads) // 16) * 16
    return Fp8Layout(
        planes,
        block_format.block_tokens,
        heads,
        block_format.head_dim,
        codes,
        codes + planes * block_format.plane_values,
        block_format.size_bytes,
    )
