"""The codecs in which KV blocks travel and are stored (docs/kv-codecs.md)."""

from dataclasses import dataclass
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
        """True if decoded blocks differ from those that were encoded."""
        return self not in (KvCodecName.NONE, KvCodecName.LOSSLESS)


_BY_LOSS = list(KvCodecName)
"""The codecs, ordered from the exact ones to the one that loses most."""


@dataclass(frozen=True, slots=True)
class KvCodecs:
    """The codecs that a worker's configuration allows: for links, for the store's DRAM, and for its
    SSD."""

    wire: KvCodecName = KvCodecName.NONE
    store: KvCodecName = KvCodecName.NONE
    disk: KvCodecName = KvCodecName.NONE

    @property
    def strongest(self) -> KvCodecName:
        """The codec that loses most; if none is lossy, LOSSLESS if it is configured, else NONE."""
        return max((self.wire, self.store, self.disk), key=_BY_LOSS.index)

    @property
    def lossy(self) -> str:
        """The name of the lossy codec that loses most, as it is part of block keys
        (:class:`baton.core.block_key.KeyRoot`); empty if no codec is lossy."""
        strongest = self.strongest
        return strongest.value if strongest.is_lossy else ""


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """The speed of a worker's codec: ``encode_bytes_per_second`` and ``decode_bytes_per_second``
    count the bytes of blocks as they are in the KV pool. ``ratio`` is the size of encoded blocks,
    as a share of their size in the pool."""

    codec: KvCodecName
    ratio: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float
