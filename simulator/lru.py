"""Where blocks lie in a simulated cluster: each host's store, and each worker's device."""

from collections import OrderedDict
from collections.abc import Sequence

from conductor.policy.snapshot import AnyBlockKey


class LruTier:
    """A tier of so many blocks. A prefix is used last block first, so that its head stays."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks: OrderedDict[AnyBlockKey, None] = OrderedDict()

    def leading(self, keys: Sequence[AnyBlockKey]) -> int:
        """How many of the first ``keys`` are here, by bisection: a block's head is used with it,
        and after it."""
        blocks = self.blocks
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def use(self, keys: Sequence[AnyBlockKey]) -> tuple[Sequence[AnyBlockKey], list[AnyBlockKey]]:
        """Adds or renews them all. Returns what came and what went."""
        blocks = self.blocks
        known = self.leading(keys)
        came = keys[known:]
        for key in reversed(came):
            blocks[key] = None
        for key in reversed(keys[:known]):
            blocks.move_to_end(key)
        went = [blocks.popitem(last=False)[0] for _ in range(len(blocks) - self.num_blocks)]
        return came, went


class HolderIndex:
    """Which nodes hold a block: the index of all hosts' stores."""

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

    def of(self, key: AnyBlockKey) -> Sequence[str]:
        return self._nodes.get(key, ())

    def deepest(self, keys: Sequence[AnyBlockKey]) -> int:
        """How many leading blocks somebody has."""
        nodes = self._nodes
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in nodes:
                low = middle
            else:
                high = middle - 1
        return low

    def best(self, keys: Sequence[AnyBlockKey], count: int) -> list[str]:
        """Nodes with most of the leading blocks: those of the deepest block that anybody has,
        then of the deepest that yet another has."""
        found: list[str] = []
        depth = self.deepest(keys)
        while depth > 0:
            found += [node for node in self.of(keys[depth - 1]) if node not in found]
            if len(found) >= count:
                return found[:count]
            depth = self._deepest_of_others(keys[:depth], len(found))
        return found

    def _deepest_of_others(self, keys: Sequence[AnyBlockKey], num_known: int) -> int:
        """How many leading blocks more than so many nodes have."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if len(self.of(keys[middle - 1])) > num_known:
                low = middle
            else:
                high = middle - 1
        return low
