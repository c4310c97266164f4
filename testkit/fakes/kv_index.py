"""An in-memory implementation of the KV index."""

from collections.abc import Sequence

from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.store import Tier
from baton.errors import Unavailable
from baton.kv.index import KvHolder, PrefixHit, bisect_prefix


class MemoryKvIndex:
    """An index in this process. While ``is_reachable`` is False, every call raises Unavailable."""

    def __init__(self) -> None:
        self.is_reachable = True
        self._entries: dict[BlockKey, dict[WorkerId, tuple[Incarnation, Tier]]] = {}
        self._registered: set[KvHolder] = set()

    async def add(self, holder: KvHolder, keys: Sequence[BlockKey], tier: Tier) -> None:
        self._check()
        for key in keys:
            self._entries.setdefault(key, {})[holder.node] = (holder.generation, tier)

    async def remove(self, holder: KvHolder, keys: Sequence[BlockKey]) -> None:
        self._check()
        for key in keys:
            nodes = self._entries.get(key, {})
            if holder.node in nodes and nodes[holder.node][0] == holder.generation:
                del nodes[holder.node]
            if not nodes:
                self._entries.pop(key, None)

    async def longest_prefix(self, keys: Sequence[BlockKey]) -> PrefixHit:
        self._check()
        return await bisect_prefix(keys, self.holders)

    async def holders(self, key: BlockKey) -> dict[KvHolder, Tier]:
        self._check()
        nodes = sorted(self._entries.get(key, {}).items())
        return {KvHolder(node, generation): tier for node, (generation, tier) in nodes}

    async def register_holder(self, holder: KvHolder) -> bool:
        self._check()
        known = holder in self._registered
        self._registered.add(holder)
        return known

    def flush(self) -> None:
        """Lose all entries, as if Redis had been flushed."""
        self._entries.clear()
        self._registered.clear()

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _check(self) -> None:
        if not self.is_reachable:
            raise Unavailable("the KV index can't be reached")
