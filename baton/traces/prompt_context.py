"""Synthetic prompts that grow, represented by the ids of their blocks: prompts with a common prefix
have the same ids for it."""

from collections.abc import Iterator


class PromptContext:
    """A text represented by the ids of its blocks. A fork shares the ids of the blocks that are
    full at that time; a partial block is continued by each fork separately."""

    def __init__(self, ids: Iterator[int], block_tokens: int) -> None:
        """``ids`` yields new block ids; all contexts of a trace share it."""
        self._ids = ids
        self._block_tokens = block_tokens
        self._full: list[int] = []
        self.num_tokens = 0

    def fork(self) -> "PromptContext":
        """Return a copy of the text that can be extended differently."""
        other = PromptContext(self._ids, self._block_tokens)
        other._full = self._full.copy()
        other.num_tokens = self.num_tokens
        return other

    def extend(self, num_tokens: int) -> None:
        """Append text that no other context has."""
        self.num_tokens += num_tokens
        while len(self._full) < self.num_tokens // self._block_tokens:
            self._full.append(next(self._ids))

    def block_ids(self) -> tuple[int, ...]:
        """Return the ids of all blocks. A partial last block gets a new id at each call, since it
        is never shared."""
        if self.num_tokens % self._block_tokens:
            return *self._full, next(self._ids)
        return tuple(self._full)
