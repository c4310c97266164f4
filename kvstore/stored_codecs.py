"""The codecs of stored blocks, by the format of the blocks."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import BlockFormat
from kvstore.block_encoding import BlockEncoding
from kvstore.limits import MAX_FORMATS

OpenCodecs = Callable[[BlockFormat], Mapping[KvCodecName, BlockCodec]]
"""Opens the codecs for blocks of a format."""


class FormatCodecs:
    """The codecs of one format, with space for one raw block. One thread at a time may use them."""

    def __init__(self, format_: BlockFormat, codecs: Mapping[KvCodecName, BlockCodec]) -> None:
        self.codecs = codecs
        self._raw = np.empty(format_.size_bytes, dtype=np.uint8)

    @property
    def raw_address(self) -> int:
        """The address of the raw block that was decoded last."""
        return int(self._raw.ctypes.data)

    def decode(self, codec: KvCodecName, data: memoryview) -> bool | None:
        """Decode a block, which has at least one byte. Return whether ``data`` is a valid encoding;
        None if there is no such codec."""
        decoder = self.codecs.get(codec)
        if decoder is None:
            return None
        source = int(np.frombuffer(data, dtype=np.uint8).ctypes.data)
        return decoder.decode([source], [len(data)], [self.raw_address])[0]


class StoredCodecs:
    """Opens the codecs of a format when they are needed, and keeps those of the formats that were
    used last. Call it off the event loop, in any thread."""

    def __init__(self, open_codecs: OpenCodecs) -> None:
        self._open_codecs = open_codecs
        self._formats: OrderedDict[BlockFormat, FormatCodecs] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def of_format(self, format_: BlockFormat) -> Iterator[FormatCodecs]:
        """Yield the codecs of a format. Other threads wait until the caller is done with them."""
        with self._lock:
            opened = self._formats.get(format_)
            if opened is None:
                opened = FormatCodecs(format_, self._open_codecs(format_))
                self._formats[format_] = opened
                if len(self._formats) > MAX_FORMATS:
                    self._formats.popitem(last=False)
            self._formats.move_to_end(format_)
            yield opened

    def is_invalid(self, encoding: BlockEncoding, data: memoryview) -> bool:
        """Return whether ``data`` can't be decoded although its codec is known. This takes as long
        as decoding the block."""
        if encoding.codec is KvCodecName.NONE or encoding.format is None:
            return False
        with self.of_format(encoding.format) as opened:
            return opened.decode(encoding.codec, data) is False
