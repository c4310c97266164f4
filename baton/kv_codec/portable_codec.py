"""The base class of the codecs in NumPy."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.header import make_header
from baton.kv_codec.host_memory import Bytes, bytes_at


class PortableCodec(ABC):
    """A :class:`~baton.kv_codec.base.BlockCodec` for blocks in host memory, on any processor. A
    subclass encodes and decodes one block. ``min_encoded_bytes`` is the least size of an
    encoding."""

    def __init__(
        self,
        name: KvCodecName,
        block_format: BlockFormat,
        min_encoded_bytes: int,
        max_encoded_bytes: int,
    ) -> None:
        self.name = name
        self.max_encoded_bytes = max_encoded_bytes
        self._min_encoded_bytes = min_encoded_bytes
        self._format = block_format
        self._header = np.frombuffer(make_header(name, block_format), np.uint8)

    def encode(self, blocks: Sequence[int], targets: Sequence[int]) -> list[int]:
        return [
            self._encode(
                bytes_at(block, self._format.size_bytes), bytes_at(target, self.max_encoded_bytes)
            )
            for block, target in zip(blocks, targets, strict=True)
        ]

    def decode(
        self, sources: Sequence[int], sizes_bytes: Sequence[int], blocks: Sequence[int]
    ) -> list[bool]:
        return [
            self._min_encoded_bytes <= size <= self.max_encoded_bytes
            and self._decode(bytes_at(source, size), bytes_at(block, self._format.size_bytes))
            for source, size, block in zip(sources, sizes_bytes, blocks, strict=True)
        ]

    @abstractmethod
    def _encode(self, block: Bytes, target: Bytes) -> int:
        """Encode a block. Return the encoded size, 0 if it would not be smaller."""

    @abstractmethod
    def _decode(self, source: Bytes, block: Bytes) -> bool:
        """Decode a block. Return whether it was a valid encoding."""
