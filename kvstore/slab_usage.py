"""Tells which slabs of the DRAM arena have no referenced block, and how long they have been
unused."""

from collections import Counter, OrderedDict
from collections.abc import Iterator


class SlabUsage:
    """Counts the referenced slots of each slab, by the slab's number. A slab with blocks, none of
    which is referenced, is idle."""

    def __init__(self) -> None:
        self._num_referenced: Counter[int] = Counter()
        self._last_used: dict[int, int] = {}  # the tick of the last release of a slot
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the order of their last use

    def record_referenced(self, slab: int) -> None:
        """Record that one of the slab's slots has got its first reference."""
        self._num_referenced[slab] += 1
        self._idle.pop(slab, None)

    def record_unreferenced(self, slab: int, tick: int) -> None:
        """Record that one of the slab's slots has lost its last reference at ``tick``."""
        self._num_referenced[slab] -= 1
        self._last_used[slab] = tick
        if not self._num_referenced[slab]:
            self._idle[slab] = None

    def record_empty(self, slab: int) -> None:
        """Record that a slab has no blocks any more."""
        self._idle.pop(slab, None)

    def clear(self) -> None:
        """Forget all slabs, none of which has blocks."""
        self._last_used.clear()

    def idle_before(self, tick: int) -> Iterator[int]:
        """Yield the idle slabs that were last used before ``tick``, least recently used first."""
        for slab in self._idle:
            if self._last_used[slab] >= tick:
                return
            yield slab

    def check_integrity(self, num_referenced: Counter[int]) -> None:
        """Raise AssertionError unless the slabs with blocks are those in ``num_referenced``, each
        with so many referenced slots."""
        assert +num_referenced == +self._num_referenced, "referenced slots per slab"
        idle = {slab for slab, count in num_referenced.items() if not count}
        assert set(self._idle) == idle, "idle slabs"
        ages = [self._last_used[slab] for slab in self._idle]
        assert ages == sorted(ages), "order of idle slabs"
