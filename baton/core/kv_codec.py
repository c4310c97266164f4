"""The codecs in which KV blocks travel and are stored (docs/kv-codecs.md)."""

from enum import StrEnum

ENCODED_ALIGNMENT_BYTES = 256
"""Encoded blocks begin at multiples of this, so that a GPU accesses them with its widest
instructions."""


class KvCodecName(StrEnum):
    """The name of a codec, as in settings and messages. NONE: the block's bytes as they are in the
    KV pool.

    - LOSSLESS: the same KV; the exponents of the values are packed.
    - FP8: E4M3 values with a scale per head.
    - INT4, INT2: 4 or 2 bits per value.
    """

    NONE = "none"
    LOSSLESS = "lossless"
    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"

    @property
    def is_lossy(self) -> bool:
        """Whether decoded blocks differ from those that were encoded."""
        return self not in (KvCodecName.NONE, KvCodecName.LOSSLESS)
