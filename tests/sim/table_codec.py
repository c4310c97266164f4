"""A lossless codec for blocks of any content, which keeps their content in a table."""

import hashlib
from collections.abc import Sequence

from baton.core.kv_codec import KvCodecName

MAGIC = b"enc:"
ENCODED_BYTES = 16


class TableCodec:
    """Implements :class:`baton.kv_codec.base.BlockCodec` over ``memory``, whose first byte has
    ``address``. An encoded block is the name of its content in ``table``, which all workers of a
    test share. About one block in eight does not become smaller."""

    name = KvCodecName.LOSSLESS
    max_encoded_bytes = ENCODED_BYTES

    def __init__(
        self, memory: memoryview, address: int, block_bytes: int, table: dict[bytes, bytes]
    ) -> None:
        self._memory = memory
        self._address = address
        self._block_bytes = block_bytes
        self._table = table

    def encode(self, blocks: Sequence[int], targets: Sequence[int]) -> list[int]:
        return [self._encode(*pair) for pair in zip(blocks, targets, strict=True)]

    def decode(
        self, sources: Sequence[int], sizes_bytes: Sequence[int], blocks: Sequence[int]
    ) -> list[bool]:
        return [self._decode(*each) for each in zip(sources, sizes_bytes, blocks, strict=True)]

    def _encode(self, block: int, target: int) -> int:
        content = bytes(self._view(block, self._block_bytes))
        name = hashlib.blake2b(content, digest_size=ENCODED_BYTES - len(MAGIC)).digest()
        if name[0] % 8 == 0:
            return 0
        self._table[name] = content
        self._view(target, ENCODED_BYTES)[:] = MAGIC + name
        return ENCODED_BYTES

    def _decode(self, source: int, size_bytes: int, block: int) -> bool:
        data = bytes(self._view(source, size_bytes))
        content = self._table.get(data.removeprefix(MAGIC)) if data.startswith(MAGIC) else None
        if content is None:
            return False
        self._view(block, self._block_bytes)[:] = content
        return True

    def _view(self, address: int, size_bytes: int) -> memoryview:
        start = address - self._address
        return self._memory[start : start + size_bytes]
