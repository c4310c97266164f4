"""The index's in-memory twin."""

from collections.abc import Sequence

from baton.core.ids import BlockKey, Generation, WorkerId
from baton.errors import Unavailable
from baton.kv.index import Holder, PrefixHit, bisect_prefix


class MemoryKvIndex:
    """``reachable`` False makes every call raise Unavailable."""

    def __init__(self) -> None:
        self.reachable = True
        self._entries: dict[BlockKey, dict[WorkerId, Generation]] = {}

    async def add(self, holder: Holder, keys: Sequence[BlockKey]) -> None:
        self._check()
        for key in keys:
            self._entries.setdefault(key, {})[holder.node] = holder.generation

    async def remove(self, holder: Holder, keys: Sequence[BlockKey]) -> None:
        self._check()
        for key in keys:
            nodes = self._entries.get(key, {})
            if nodes.get(holder.node) == holder.generation:
                del nodes[holder.node]
            if not nodes:
                self._entries.pop(key, None)

    async def longest_prefix(self, keys: Sequence[BlockKey]) -> PrefixHit:
        self._check()
        return await bisect_prefix(keys, self._holders_of)

    async def close(self) -> None:
        """Nothing is held."""

    async def _holders_of(self, key: BlockKey) -> tuple[Holder, ...]:
        nodes = self._entries.get(key, {})
        return tuple(Holder(node, generation) for node, generation in sorted(nodes.items()))

    def _check(self) -> None:
        if not self.reachable:
            raise Unavailable("the index can't be reached")
