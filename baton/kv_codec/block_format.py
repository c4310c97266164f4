"""The arrangement of the bytes of a KV block."""

import re
from dataclasses import dataclass

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2}
"""The dtypes that have codecs."""

_LAYOUT = re.compile(r"(\w+)\[(\d+)x2x(\d+)x(\d+)x(\d+)\](?: in \d+ groups of layers)?")


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block is an array ``[num_layers, 2, block_tokens, kv_heads, head_dim]`` of ``dtype``, whose
    second dimension is keys, then values. ``dtype`` is one of BYTES_PER_VALUE."""

    dtype: str
    num_layers: int
    block_tokens: int
    kv_heads: int
    head_dim: int

    @property
    def num_planes(self) -> int:
        """The number of planes: the keys or the values of one layer."""
        return 2 * self.num_layers

    @property
    def plane_values(self) -> int:
        """The number of values in a plane ``[block_tokens, kv_heads, head_dim]``."""
        return self.block_tokens * self.kv_heads * self.head_dim

    @property
    def size_bytes(self) -> int:
        return self.num_planes * self.plane_values * BYTES_PER_VALUE[self.dtype]


def parse_layout(layout: str) -> BlockFormat | None:
    """Return the format of the blocks of a pool whose ``layout``
    (:class:`baton.worker.kv_layout.KvLayout`) is, for example, ``bfloat16[28x2x16x8x128]``; None
    for a layout or a dtype that has no codecs."""
    match = _LAYOUT.fullmatch(layout)
    if match is None or match[1] not in BYTES_PER_VALUE:
        return None
    layers, tokens, heads, head_dim = (int(size) for size in match.groups()[1:])
    return BlockFormat(match[1], layers, tokens, heads, head_dim)
