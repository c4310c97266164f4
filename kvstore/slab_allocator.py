"""Slots of several sizes in one arena, cut from slabs; neighbours first."""

import heapq
from collections.abc import Iterable

MIN_SLAB_BYTES = 4 * 1024 * 1024
MAX_SLAB_BYTES = 64 * 1024 * 1024
SLABS_PER_ARENA = 64


def default_slab_bytes(arena_bytes: int) -> int:
    """Enough slabs for several sizes, and slabs that hold the blocks of large models."""
    share = arena_bytes // SLABS_PER_ARENA
    return min(max(share, MIN_SLAB_BYTES), MAX_SLAB_BYTES, arena_bytes)


class SlabAllocator:
    """A slab belongs to one slot size, or to none. A slot is its offset in the arena. What is
    larger than a slab can't be had. Of the free slots the lowest of a slab is taken, so that
    blocks that come together lie together, and move as one piece."""

    def __init__(self, arena_bytes: int, slab_bytes: int) -> None:
        self._slab_bytes = slab_bytes
        self._num_slabs = arena_bytes // slab_bytes
        self._unassigned = list(range(self._num_slabs - 1, -1, -1))
        self._size_of: dict[int, int] = {}
        self._owned: dict[int, set[int]] = {}  # the reverse
        self._free: dict[int, list[int]] = {}  # a heap of slots per slab
        self._used: dict[int, set[int]] = {}
        self._open: dict[int, dict[int, None]] = {}  # slabs with a free slot, per size

    @property
    def slab_bytes(self) -> int:
        return self._slab_bytes

    def take(self, size_bytes: int) -> int | None:
        """A free slot's offset; None when the arena has none of that size left."""
        slabs = self._open.setdefault(size_bytes, {})
        if not slabs and self._unassigned and size_bytes <= self._slab_bytes:
            self._assign(self._unassigned.pop(), size_bytes)
        if not slabs:
            return None
        slab = next(iter(slabs))
        offset = heapq.heappop(self._free[slab])
        self._used[slab].add(offset)
        if not self._free[slab]:
            del slabs[slab]
        return offset

    def give(self, offset: int) -> None:
        """The slot is free again; a slab without a used slot belongs to nobody."""
        slab = self.slab_of(offset)
        size = self._size_of[slab]
        slabs = self._open.setdefault(size, {})
        self._used[slab].remove(offset)
        if self._used[slab]:
            heapq.heappush(self._free[slab], offset)
            slabs[slab] = None
            return
        slabs.pop(slab, None)
        if not slabs:
            del self._open[size]
        self._owned[size].remove(slab)
        if not self._owned[size]:
            del self._owned[size]
        del self._size_of[slab], self._used[slab], self._free[slab]
        self._unassigned.append(slab)

    def slab_of(self, offset: int) -> int:
        return offset // self._slab_bytes

    def slots_of(self, slab: int) -> frozenset[int]:
        """Its used slots."""
        return frozenset(self._used.get(slab, ()))

    def of_others(self, size_bytes: int) -> list[int]:
        """Slabs that belong to other sizes than this."""
        others = (slabs for size, slabs in self._owned.items() if size != size_bytes)
        return [slab for slabs in others for slab in slabs]

    def fits(self, size_bytes: int) -> bool:
        """Whether a slot of that size could ever be had."""
        return 0 < size_bytes <= self._slab_bytes and self._num_slabs > 0

    def num_free(self, size_bytes: int) -> int:
        """Slots of that size that can be taken before anything must go."""
        there = sum(len(self._free[slab]) for slab in self._open.get(size_bytes, ()))
        return there + len(self._unassigned) * (self._slab_bytes // size_bytes)

    def used(self) -> Iterable[int]:
        """Offsets of all used slots."""
        return (offset for offsets in self._used.values() for offset in offsets)

    def check_integrity(self) -> None:
        assert sum(len(slabs) for slabs in self._owned.values()) == len(self._size_of), "owners"
        for slab, size in self._size_of.items():
            assert slab in self._owned[size], f"slab {slab} of {size}"
            used, free = self._used[slab], set(self._free[slab])
            assert used | free == set(self._slots(slab, size)), f"slab {slab} of {size}"
            assert not used & free and len(free) == len(self._free[slab]), f"slab {slab}"
            assert bool(free) == (slab in self._open.get(size, ())), f"slab {slab} is misfiled"
        assert not set(self._unassigned) & set(self._size_of), "a slab is owned and unassigned"
        assert len(self._unassigned) + len(self._size_of) == self._num_slabs, "a slab is lost"

    def _assign(self, slab: int, size_bytes: int) -> None:
        self._size_of[slab] = size_bytes
        self._owned.setdefault(size_bytes, set()).add(slab)
        self._used[slab] = set()
        self._free[slab] = list(self._slots(slab, size_bytes))
        self._open[size_bytes][slab] = None

    def _slots(self, slab: int, size_bytes: int) -> range:
        start = slab * self._slab_bytes
        count = self._slab_bytes // size_bytes
        return range(start, start + count * size_bytes, size_bytes)
