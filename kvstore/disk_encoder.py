"""Encodes blocks on their way to the SSD."""

from dataclasses import dataclass, replace

import numpy as np

from baton.core.kv_codec import KvCodecName
from baton.errors import Corrupt
from kvstore.block_encoding import BlockEncoding
from kvstore.checksum import block_checksum
from kvstore.dram_block import DramBlock
from kvstore.stored_codecs import FormatCodecs, StoredCodecs

STRENGTH = tuple(KvCodecName)
"""The codecs from the largest to the smallest encodings."""


@dataclass(frozen=True, slots=True)
class DiskForm:
    """A block as it is written to the SSD: its bytes, their encoding and their checksum."""

    data: memoryview
    encoding: BlockEncoding
    checksum: int


class DiskEncoder:
    """Encodes blocks in ``codec``, or in LOSSLESS if they are exact and ``codec`` is lossy. Blocks
    that already have an encoding at least as small, those whose format or checksum algorithm is
    unknown, and those that would not become smaller stay as they are. Call it off the event loop,
    in any thread."""

    def __init__(self, codec: KvCodecName, codecs: StoredCodecs) -> None:
        self._codec = codec
        self._codecs = codecs

    def encode(self, block: DramBlock, data: memoryview) -> DiskForm:
        """Return the form in which to write a block, whose bytes are ``data``. Raises Corrupt if
        they don't match the block's checksum, or can't be decoded. This takes as long as encoding
        the block."""
        stored = DiskForm(data, block.encoding, block.checksum)
        target, format_ = self._target(block.encoding), block.encoding.format
        if target is None or format_ is None:
            return stored
        checksum = block_checksum(block.algorithm, data)
        if checksum is None:
            return stored
        if checksum != block.checksum:
            raise Corrupt(f"block {block.key.hex()} does not match its checksum")
        with self._codecs.of_format(format_) as opened:
            encoded = self._encode(opened, block.encoding.codec, target, data)
        if encoded is None:
            return stored
        checksum = block_checksum(block.algorithm, encoded)
        if checksum is None:
            return stored
        return DiskForm(encoded, replace(block.encoding, codec=target), checksum)

    def _target(self, encoding: BlockEncoding) -> KvCodecName | None:
        """Return the codec for a block; None if the block is to stay as it is."""
        target = self._codec
        if target.is_lossy and encoding.exact:
            target = KvCodecName.LOSSLESS
        if encoding.codec.is_lossy or STRENGTH.index(target) <= STRENGTH.index(encoding.codec):
            return None
        return target

    def _encode(
        self, opened: FormatCodecs, codec: KvCodecName, target: KvCodecName, data: memoryview
    ) -> memoryview | None:
        """Return a block, whose bytes in ``codec`` are ``data``, in ``target``; None if that would
        not be smaller. Raises Corrupt if ``data`` is no valid encoding."""
        encoder = opened.codecs.get(target)
        if encoder is None:
            return None
        source = int(np.frombuffer(data, dtype=np.uint8).ctypes.data)
        if codec is not KvCodecName.NONE:
            is_valid = opened.decode(codec, data)
            if is_valid is None:
                return None
            if not is_valid:
                raise Corrupt(f"a block is no valid encoding in codec {codec}")
            source = opened.raw_address
        encoded = np.empty(encoder.max_encoded_bytes, dtype=np.uint8)
        (size,) = encoder.encode([source], [encoded.ctypes.data])
        return encoded[:size].copy().data if 0 < size < len(data) else None
