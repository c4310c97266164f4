"""A prompt that grows: what two of them begin with in common has the same ids."""

from collections.abc import Iterator


class PromptContext:
    """Text by its blocks' ids alone. A fork shares the ids of the blocks that are full by then;
    what a partial block goes on with is each fork's own."""

    def __init__(self, ids: Iterator[int], block_tokens: int) -> None:
        """``ids`` are fresh ones, of all contexts of a trace."""
        self._ids = ids
        self._block_tokens = block_tokens
        self._full: list[int] = []
        self.num_tokens = 0

    def fork(self) -> "PromptContext":
        """The same text, to go on differently."""
        other = PromptContext(self._ids, self._block_tokens)
        other._full = self._full.copy()
        other.num_tokens = self.num_tokens
        return other

    def extend(self, num_tokens: int) -> None:
        """Text that nobody else has."""
        self.num_tokens += num_tokens
        while len(self._full) < self.num_tokens // self._block_tokens:
            self._full.append(next(self._ids))

    def blocks(self) -> tuple[int, ...]:
        """Of all of it. The partial one at the end has a new id at each call: nobody shares it."""
        if self.num_tokens % self._block_tokens:
            return *self._full, next(self._ids)
        return tuple(self._full)
