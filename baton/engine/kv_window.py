"""Finds the blocks of a context that are still needed, if layers of a model have sliding windows,
or if a request has an attention window."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.ids import BlockId

NO_BLOCK = BlockId(-1)
"""Takes the place of a block in a block table that no later token reads."""


@dataclass(frozen=True, slots=True)
class KvWindow:
    """The order of a block table, and which of its blocks are read.

    A *span* is ``block_tokens`` tokens, the first of which is at a multiple of ``block_tokens``. A
    block has the KV of a span in the layers of one group (:mod:`baton.engine.layer_groups`), so a
    block table has one block for each group of the first span, then those of the second, and so on.
    The first ``num_full`` groups read the whole context. In the other ``num_windowed`` groups, a
    token reads the KV of at most the last ``tokens`` tokens, its own included, and of the first
    ``sink_tokens`` tokens.

    If ``tokens`` is None, no group has a window, and there is only one group, whatever
    ``num_full_groups`` and ``num_windowed_groups`` are."""

    block_tokens: int
    tokens: int | None = None
    num_full_groups: int = 0
    num_windowed_groups: int = 1
    sink_tokens: int = 0

    @property
    def num_sink_spans(self) -> int:
        """Number of spans with tokens that all later tokens read."""
        return self.num_spans(self.sink_tokens)

    @property
    def num_full(self) -> int:
        return 1 if self.tokens is None else self.num_full_groups

    @property
    def num_windowed(self) -> int:
        return 0 if self.tokens is None else self.num_windowed_groups

    @property
    def num_groups(self) -> int:
        return 1 if self.tokens is None else self.num_full_groups + self.num_windowed_groups

    def num_spans(self, num_tokens: int) -> int:
        """Return the number of spans that ``num_tokens`` tokens begin."""
        return -(-num_tokens // self.block_tokens)

    def first_span(self, num_tokens: int) -> int:
        """Return the index of the first span, the sinks' spans apart, that tokens after the first
        ``num_tokens`` read in groups with a window; 0 if there are none."""
        if self.tokens is None:
            return 0
        return max(0, num_tokens - self.tokens + 1) // self.block_tokens

    def max_spans(self, chunk_tokens: int) -> int | None:
        """Return how many spans a sequence needs at most, in groups with a window and without those
        of sinks, while up to ``chunk_tokens`` of its tokens are computed in a step. None if there
        is no bound."""
        if self.tokens is None:
            return None
        return (self.tokens - 1 + chunk_tokens - 1) // self.block_tokens + 2

    def is_read(self, index: int, first_span: int) -> bool:
        """Whether the block with this index in a table is read, if ``first_span`` is the first span
        that is read in groups with a window."""
        span, group = divmod(index, self.num_groups)
        return span >= first_span or group < self.num_full or span < self.num_sink_spans

    def read_indexes(self, indexes: Iterable[int], first_span: int) -> list[int]:
        """Return those of ``indexes`` for which :meth:`is_read` is true."""
        if first_span == 0:
            return list(indexes)
        return [index for index in indexes if self.is_read(index, first_span)]

    def num_read(self, num_spans: int, first_span: int) -> int:
        """Return how many of the blocks of the first ``num_spans`` spans are read."""
        recent = max(0, num_spans - first_span)
        sinks = min(num_spans, first_span, self.num_sink_spans)
        return num_spans * self.num_full + (recent + sinks) * self.num_windowed

    def num_dropped(self, first_span: int) -> int:
        """Return how many blocks before ``first_span`` are not read."""
        return max(0, first_span - self.num_sink_spans) * self.num_windowed

    def first_span_after(self, num_dropped_blocks: int) -> int:
        """Return the first span that is read, the sinks' spans apart, if so many blocks are not
        read; 0 if there are none."""
        if not num_dropped_blocks:
            return 0
        return self.num_sink_spans + num_dropped_blocks // self.num_windowed
