"""Contents of KV blocks for tests of codecs."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from baton.kv_codec.block_format import BYTES_PER_VALUE, BlockFormat

Bytes = npt.NDArray[np.uint8]
Chance = np.random.Generator
GUARD_BYTES = 128
GUARD = 0xA5


class GuardedBytes:
    """Memory of ``size_bytes`` between guards that must keep their content."""

    def __init__(self, size_bytes: int, content: Bytes | bytes = b"") -> None:
        self._memory = np.full(size_bytes + 2 * GUARD_BYTES, GUARD, np.uint8)
        self.data = self._memory[GUARD_BYTES : GUARD_BYTES + size_bytes]
        given = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content
        self.data[: len(given)] = given

    @property
    def address(self) -> int:
        return int(self._memory.ctypes.data) + GUARD_BYTES

    def is_intact(self) -> bool:
        """Return whether no byte before or after the data was written."""
        ends = (self._memory[:GUARD_BYTES], self._memory[-GUARD_BYTES:])
        return all(bool((end == GUARD).all()) for end in ends)


def block_bytes(values: npt.NDArray[np.float32], block_format: BlockFormat) -> Bytes:
    """Return the bytes of a block with these values, cut to the block's dtype."""
    values = np.ascontiguousarray(values, np.float32).ravel()
    size = BYTES_PER_VALUE[block_format.dtype]
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, 4)[:, 4 - size :]).ravel()


def block_values(data: Bytes, block_format: BlockFormat) -> npt.NDArray[np.float32]:
    """Return the values of a block, [num_planes, block_tokens, kv_heads, head_dim]."""
    size = BYTES_PER_VALUE[block_format.dtype]
    words = np.zeros((len(data) // size, 4), np.uint8)
    words[:, 4 - size :] = data.reshape(-1, size)
    shape = (block_format.block_tokens, block_format.kv_heads, block_format.head_dim)
    return words.view(np.float32).reshape(block_format.num_planes, *shape)


def _shape(block_format: BlockFormat) -> tuple[int, ...]:
    tokens, heads, head_dim = (
        block_format.block_tokens,
        block_format.kv_heads,
        block_format.head_dim,
    )
    return block_format.num_planes, tokens, heads, head_dim


def _normal(block_format: BlockFormat, chance: Chance) -> Bytes:
    return block_bytes(chance.standard_normal(_shape(block_format), np.float32), block_format)


def _outliers(block_format: BlockFormat, chance: Chance) -> Bytes:
    values = chance.standard_normal(_shape(block_format), np.float32)
    values[..., :: max(1, block_format.head_dim // 4)] += 30
    return block_bytes(values, block_format)


def _zeros(block_format: BlockFormat, chance: Chance) -> Bytes:
    return np.zeros(block_format.size_bytes, np.uint8)


def _random_bytes(block_format: BlockFormat, chance: Chance) -> Bytes:
    return chance.integers(0, 256, block_format.size_bytes, np.uint8)


def _special(block_format: BlockFormat, chance: Chance) -> Bytes:
    """Normal values, and some NaN, infinite, denormal, zero and huge ones."""
    values = chance.standard_normal(_shape(block_format), np.float32)
    special = np.array(
        [np.nan, -np.nan, np.inf, -np.inf, 1e-40, -1e-40, 0.0, -0.0, 3e38, -3e38], np.float32
    )
    where = chance.random(values.shape) < 0.05
    values[where] = chance.choice(special, int(where.sum()))
    return block_bytes(values, block_format)


def _widening(block_format: BlockFormat, chance: Chance) -> Bytes:
    """Planes of growing spread, so that later planes have many escapes."""
    planes = block_format.num_planes
    spread = np.linspace(0, 12, planes, dtype=np.float32).reshape(planes, 1, 1, 1)
    values = chance.standard_normal(_shape(block_format), np.float32)
    powers = chance.uniform(-1, 1, values.shape).astype(np.float32) * spread
    return block_bytes(values * np.exp2(powers), block_format)


CONTENTS: dict[str, Callable[[BlockFormat, Chance], Bytes]] = {
    "normal": _normal,
    "outliers": _outliers,
    "zeros": _zeros,
    "random bytes": _random_bytes,
    "special": _special,
    "widening": _widening,
}
"""Makers of a block's bytes, by name."""

FORMATS = (
    BlockFormat("bfloat16", 2, 16, 2, 64),
    BlockFormat("bfloat16", 1, 4, 2, 24),
    BlockFormat("bfloat16", 3, 16, 8, 128),
    BlockFormat("float32", 2, 16, 2, 16),
)
