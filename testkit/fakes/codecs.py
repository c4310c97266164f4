"""Simple codecs of KV blocks, whose encodings have sizes that tests can choose."""

from collections.abc import Sequence

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.host_memory import bytes_at

TAGS = {name: bytes([number]) for number, name in enumerate(KvCodecName)}


class FakeCodec:
    """Implements :class:`baton.kv_codec.base.BlockCodec`. LOSSLESS leaves out the zeros at the end
    of a block, FP8 its second half; INT4 and INT2 keep the upper bits of every fourth or eighth
    byte."""

    def __init__(self, name: KvCodecName, size_bytes: int) -> None:
        self.name = name
        self.max_encoded_bytes = size_bytes
        self._size_bytes = size_bytes
        self._step = 4 if name is KvCodecName.INT4 else 8

    def encoded(self, block: bytes) -> bytes:
        """Return the encoding of a block; empty if it would not be smaller."""
        size = len(block)
        if self.name is KvCodecName.LOSSLESS:
            body = block.rstrip(b"\0")
        elif self.name is KvCodecName.FP8:
            body = block[: size // 2]
        else:
            body = bytes(byte & 0xF0 for byte in block[:: self._step])
        data = TAGS[self.name] + body
        return data if len(data) < size else b""

    def decoded(self, data: bytes) -> bytes | None:
        """Return the block with that encoding; None if it is none."""
        if data[:1] != TAGS[self.name]:
            return None
        body, size = data[1:], self._size_bytes
        if self.name is KvCodecName.LOSSLESS:
            return body.ljust(size, b"\0") if len(body) <= size else None
        if self.name is KvCodecName.FP8:
            return body.ljust(size, b"\0") if len(body) == size // 2 else None
        block = b"".join(bytes([byte]) * self._step for byte in body)
        return block if len(block) == size else None

    def encode(self, blocks: Sequence[int], targets: Sequence[int]) -> list[int]:
        sizes = []
        for block, target in zip(blocks, targets, strict=True):
            data = self.encoded(bytes_at(block, self._size_bytes).tobytes())
            bytes_at(target, len(data))[:] = list(data)
            sizes.append(len(data))
        return sizes

    def decode(
        self, sources: Sequence[int], sizes_bytes: Sequence[int], blocks: Sequence[int]
    ) -> list[bool]:
        good = []
        for source, size, block in zip(sources, sizes_bytes, blocks, strict=True):
            data = self.decoded(bytes_at(source, size).tobytes())
            if data is not None:
                bytes_at(block, self._size_bytes)[:] = list(data)
            good.append(data is not None)
        return good


def open_fake_codecs(block_format: BlockFormat | None) -> dict[KvCodecName, FakeCodec]:
    """Return all codecs for a format, as :func:`baton.kv_codec.registry.open_codecs` does."""
    if block_format is None:
        return {}
    names = [name for name in KvCodecName if name is not KvCodecName.NONE]
    return {name: FakeCodec(name, block_format.size_bytes) for name in names}
