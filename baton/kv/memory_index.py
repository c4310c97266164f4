"""The index's in-memory twin."""

from collections.abc import Sequence

from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.store import Tier
from baton.errors import Unavailable
from baton.kv.index import KvHolder, PrefixHit, bisect_prefix


class MemoryKvIndex:
    """``reachable`` False makes every call raise Unavailable."""

    def __init__(self) -> None:
        self.reachable = True
        self._entries: dict[BlockKey, dict[WorkerId, tuple[Incarnation, Tier]]] = {}
        self._greeted: set[KvHolder] = set()

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

    async def greet(self, holder: KvHolder) -> bool:
        self._check()
        known = holder in self._greeted
        self._greeted.add(holder)
        return known

    def flush(self) -> None:
        """As Redis is flushed."""
        self._entries.clear()
        self._greeted.clear()

    async def close(self) -> None:
        """Nothing is held."""

    def _check(self) -> None:
        if not self.reachable:
            raise Unavailable("the index can't be reached")
