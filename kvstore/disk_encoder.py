"""Encodes blocks on their way to the SSD."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from baton.core.kv_codec import KvCodecName
from baton.errors import Corrupt
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import BlockFormat
from kvstore.block_encoding import BlockEncoding
from kvstore.checksum import block_checksum
from kvstore.dram_tier import DramBlock

MAX_FORMATS = 8
"""Maximum number of formats whose codecs and buffers are kept."""

OpenCodecs = Callable[[BlockFormat], Mapping[KvCodecName, BlockCodec]]
"""Opens the codecs for blocks of a format in the memory of a device."""

STRENGTH = tuple(KvCodecName)
"""The codecs from the largest to the smallest encodings."""


@dataclass(frozen=True, slots=True)
class DiskForm:
    """A block as it is written to the SSD: its bytes, their encoding and their checksum."""

    data: memoryview
    encoding: BlockEncoding
    checksum: int


class _FormatCodecs:
    """The codecs of one format, with space for one raw block."""

    def __init__(self, format_: BlockFormat, codecs: Mapping[KvCodecName, BlockCodec]) -> None:
        self.codecs = codecs
        self.raw = np.empty(format_.size_bytes, dtype=np.uint8)


class DiskEncoder:
    """Encodes blocks in ``codec``, or in LOSSLESS if they are exact and ``codec`` is lossy. Blocks
    that already have an encoding at least as small, those whose format or checksum algorithm is
    unknown, and those that would not become smaller stay as they are. Call it off the event loop,
    in any thread."""

    def __init__(self, codec: KvCodecName, open_codecs: OpenCodecs) -> None:
        self._codec = codec
        self._open_codecs = open_codecs
        self._formats: OrderedDict[BlockFormat, _FormatCodecs] = OrderedDict()
        self._lock = threading.Lock()

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
        with self._lock:
            encoded = self._encode(self._codecs_of(format_), block.encoding.codec, target, data)
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
        self, opened: _FormatCodecs, codec: KvCodecName, target: KvCodecName, data: memoryview
    ) -> memoryview | None:
        """Return a block, whose bytes in ``codec`` are ``data``, in ``target``; None if that would
        not be smaller. Raises Corrupt if ``data`` is no valid encoding."""
        encoder = opened.codecs.get(target)
        if encoder is None:
            return None
        source = np.frombuffer(data, dtype=np.uint8).ctypes.data
        if codec is not KvCodecName.NONE:
            decoder = opened.codecs.get(codec)
            if decoder is None:
                return None
            if not decoder.decode([source], [len(data)], [opened.raw.ctypes.data])[0]:
                raise Corrupt(f"a block is no valid encoding in codec {codec}")
            source = opened.raw.ctypes.data
        encoded = np.empty(encoder.max_encoded_bytes, dtype=np.uint8)
        (size,) = encoder.encode([source], [encoded.ctypes.data])
        return encoded[:size].copy().data if 0 < size < len(data) else None

    def _codecs_of(self, format_: BlockFormat) -> _FormatCodecs:
        opened = self._formats.get(format_)
        if opened is None:
            opened = _FormatCodecs(format_, self._open_codecs(format_))
            self._formats[format_] = opened
            if len(self._formats) > MAX_FORMATS:
                self._formats.popitem(last=False)
        self._formats.move_to_end(format_)
        return opened
