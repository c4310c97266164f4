"""LRU tiers of blocks in a simulated cluster (stores and devices), and an index of the stores."""

from collections import OrderedDict
from collections.abc import Sequence

from baton.core.prefix_search import count_leading
from conductor.policy.snapshot import AnyBlockKey


class LruTier:
    """An LRU cache of at most ``num_blocks`` blocks. When a prefix is used, its blocks are renewed
    from the last to the first, so that the first blocks are evicted last."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks: OrderedDict[AnyBlockKey, None] = OrderedDict()

    def num_leading(self, keys: Sequence[AnyBlockKey]) -> int:
        """Return the length, in blocks, of the longest prefix of ``keys`` that this tier has. A
        tier that has a block also has all earlier blocks of the prefix, since these are renewed
        after the block whenever it is used; so bisection finds the length."""
        blocks = self.blocks
        return count_leading(keys, lambda key: key not in blocks)

    def insert(
        self, keys: Sequence[AnyBlockKey]
    ) -> tuple[Sequence[AnyBlockKey], list[AnyBlockKey]]:
        """Add the blocks of a prefix, and renew those that are here already. Returns the added and
        the evicted keys."""
        blocks = self.blocks
        known = self.num_leading(keys)
        added = keys[known:]
        for key in reversed(added):
            blocks[key] = None
        for key in reversed(keys[:known]):
            blocks.move_to_end(key)
        evicted = [blocks.popitem(last=False)[0] for _ in range(len(blocks) - self.num_blocks)]
        return added, evicted


class HolderIndex:
    """Knows which store nodes have which blocks."""

    def __init__(self) -> None:
        self._nodes: dict[AnyBlockKey, list[str]] = {}

    def add(self, node: str, keys: Sequence[AnyBlockKey]) -> None:
        for key in keys:
            self._nodes.setdefault(key, []).append(node)

    def remove(self, node: str, keys: Sequence[AnyBlockKey]) -> None:
        for key in keys:
            nodes = self._nodes[key]
            nodes.remove(node)
            if not nodes:
                del self._nodes[key]

    def nodes_with(self, key: AnyBlockKey) -> Sequence[str]:
        return self._nodes.get(key, ())

    def num_stored(self, keys: Sequence[AnyBlockKey]) -> int:
        """Return the length, in blocks, of the longest prefix of ``keys`` that any node has."""
        nodes = self._nodes
        return count_leading(keys, lambda key: key not in nodes)

    def best_nodes(self, keys: Sequence[AnyBlockKey], count: int) -> list[str]:
        """Return up to ``count`` nodes that have a prefix of ``keys``. Nodes with a longer prefix
        come first."""
        found: list[str] = []
        depth = self.num_stored(keys)
        while depth > 0:
            found += [node for node in self.nodes_with(keys[depth - 1]) if node not in found]
            if len(found) >= count:
                return found[:count]
            depth = self._deepest_of_others(keys[:depth], len(found))
        return found

    def _deepest_of_others(self, keys: Sequence[AnyBlockKey], num_known: int) -> int:
        """``num_known`` nodes have all of ``keys``. Return the length, in blocks, of the longest
        prefix that any other node has, which is the longest one that more than ``num_known`` nodes
        have."""
        return count_leading(keys, lambda key: len(self.nodes_with(key)) <= num_known)
