"""INT4 and INT2: where the parts of an encoded block are, and the constants of the code.

Each plane is coded as the mean of its tokens, and each token's difference from the mean. A key has
a few channels that are large in all tokens, and the mean has most of them, since RoPE rotates these
channels slowly. Means and differences are cut into *groups* of 64 or 128 values, and a group is
coded as TurboQuant does (Zandieh et al., 2025): flip the signs of half of the values, apply a
Hadamard transform, after which the values are nearly Gaussian, and replace each by the nearest
value of the optimal codebook for the Gaussian with the group's norm (Lloyd and Max). The mean has
4 bits per value in both codecs.

    header        HEADER_BYTES
    scales        bfloat16[num_planes, 1 + block_tokens, num_groups]   first the mean's; padded
    codes         for each plane: the mean, then the tokens, each num_groups groups

With 4 bits, byte i of a group has value i, and value i + group / 2 in the upper half; with 2 bits,
values i, i + group / 4, and so on. A code is (is_negative << (bits - 1)) | index of the magnitude.
"""

from dataclasses import dataclass

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.header import HEADER_BYTES

BITS = {KvCodecName.INT4: 4, KvCodecName.INT2: 2}
MEAN_BITS = 4

LARGE_GROUP, SMALL_GROUP = 128, 64

MAGNITUDES = {
    4: (0.12831554, 0.38782899, 0.65642773, 0.94191940, 1.25575544, 1.61754926, 2.06852630,
        2.73215131),
    2: (0.45277274, 1.51040258),
}  # fmt: skip
"""The optimal codebooks for a Gaussian with variance 1: these values and their negatives."""

SIGN_WORDS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
"""Bit i % 32 of word i // 32 says whether value i of a group is negated before the transform. The
words are the first digits of pi."""

MAX_VALUE = 2.0**40
"""Values are coded as if they were at most this large. NaN is coded as 0."""

MIN_SCALE, MAX_SCALE = 2.0**-100, 2.0**46
"""The scale of a group is 0 or in this range."""


@dataclass(frozen=True, slots=True)
class RotatedLayout:
    """The sizes and offsets of an encoded block's parts. Sizes of rows count values."""

    bits: int
    num_planes: int
    block_tokens: int
    row: int
    """The values of a token in a plane, ``kv_heads * head_dim``."""
    group: int
    codes: int
    encoded_bytes: int
    size_bytes: int

    @property
    def num_groups(self) -> int:
        """The number of groups in a row."""
        return self.row // self.group

    @property
    def scales(self) -> int:
        return HEADER_BYTES

    @property
    def num_scales(self) -> int:
        return self.num_planes * (1 + self.block_tokens) * self.num_groups

    @property
    def mean_bytes(self) -> int:
        """The size of the codes of a plane's mean."""
        return self.row * MEAN_BITS // 8


def rotated_layout(name: KvCodecName, block_format: BlockFormat) -> RotatedLayout | None:
    """Return the layout of blocks encoded in INT4 or INT2; None if a token's keys can't be divided
    into groups."""
    row = block_format.kv_heads * block_format.head_dim
    if row % SMALL_GROUP:
        return None
    group = SMALL_GROUP if block_format.head_dim % LARGE_GROUP else LARGE_GROUP
    bits, planes, tokens = BITS[name], block_format.num_planes, block_format.block_tokens
    scales = planes * (1 + tokens) * (row // group)
    codes = -(-(HEADER_BYTES + 2 * scales) // 16) * 16
    size = codes + planes * row * (MEAN_BITS + tokens * bits) // 8
    return RotatedLayout(bits, planes, tokens, row, group, codes, size, block_format.size_bytes)
