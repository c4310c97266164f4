"""Which blocks of a stored prefix a worker fetches."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import BlockKey
from baton.engine.config import EngineConfig
from baton.engine.kv_window import KvWindow


@dataclass(frozen=True, slots=True)
class WantedBlocks:
    """The blocks of a prefix that are fetched: those before the block with index ``end`` that later
    tokens read, and that are not cached on the device. In groups of layers with a window, these are
    the blocks of the last window and of the sinks only. ``preceding`` are the keys of blocks that
    later tokens read, too, and that are cached."""

    keys: Sequence[BlockKey]
    preceding: Sequence[BlockKey]
    end: int
    indexes: Sequence[int]

    @classmethod
    def of(
        cls,
        keys: Sequence[BlockKey],
        cached: int,
        num_stored: int,
        config: EngineConfig,
        window: KvWindow | None = None,
    ) -> "WantedBlocks":
        """Return what to fetch of the first ``num_stored`` blocks of ``keys``, if the device has
        the first ``cached``. ``window`` is that of the request's block table; without it, it is the
        model's."""
        window = window or config.window
        end = num_stored // window.num_groups * window.num_groups
        first_span = window.first_span(config.num_tokens_in(end))
        indexes = window.read_indexes(range(cached, end), first_span)
        preceding = window.read_indexes(range(cached), first_span)
        return cls([keys[i] for i in indexes], [keys[i] for i in preceding], end, indexes)

    def first(self, count: int) -> "WantedBlocks":
        """Return the first ``count`` of these blocks, if the store has no more of them."""
        if count >= len(self.keys):
            return self
        return WantedBlocks(
            self.keys[:count], self.preceding, self.indexes[count], self.indexes[:count]
        )
