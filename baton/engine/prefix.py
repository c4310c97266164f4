"""The chain of block keys of one sequence, computed once and extended as it grows."""

from collections.abc import Sequence

from baton.core.block_key import next_key
from baton.core.ids import BlockKey, TokenId


class KeyChain:
    """Keys of the full blocks of a sequence of tokens that only ever grows."""

    __slots__ = ("_block_tokens", "_root", "keys")

    def __init__(self, root: BlockKey, block_tokens: int) -> None:
        self._root = root
        self._block_tokens = block_tokens
        self.keys: list[BlockKey] = []

    def extend(self, token_ids: Sequence[TokenId]) -> None:
        """Adds the keys of blocks that ``token_ids`` (the whole sequence) has filled since."""
        size = self._block_tokens
        while (len(self.keys) + 1) * size <= len(token_ids):
            start = len(self.keys) * size
            previous = self.keys[-1] if self.keys else self._root
            self.keys.append(next_key(previous, token_ids[start : start + size]))
