"""Which blocks of a context are still needed, if all layers of a model have sliding windows."""

from dataclasses import dataclass

from baton.core.ids import BlockId

NO_BLOCK = BlockId(-1)
"""Takes the place of a block in a block table that no later token reads."""


@dataclass(frozen=True, slots=True)
class KvWindow:
    """The largest window of a model's layers: a token reads the KV of the last ``tokens`` tokens,
    its own included. None means that at least one layer reads the whole context, so that all blocks
    are needed: a block contains the KV of all layers."""

    block_tokens: int
    tokens: int | None = None

    def first_block(self, num_tokens: int) -> int:
        """Return the index of the first block that tokens after the first ``num_tokens`` read."""
        if self.tokens is None:
            return 0
        return max(0, num_tokens - self.tokens + 1) // self.block_tokens

    def max_blocks(self, chunk_tokens: int) -> int | None:
        """Return how many blocks a sequence needs at most while up to ``chunk_tokens`` of its
        tokens are computed in a step. None if there is no bound."""
        if self.tokens is None:
            return None
        return (self.tokens - 1 + chunk_tokens - 1) // self.block_tokens + 2
