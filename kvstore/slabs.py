"""Slots of several sizes in one arena, cut from slabs."""

from collections.abc import Iterable

LEAST_SLAB_BYTES = 4 * 1024 * 1024
MOST_SLAB_BYTES = 64 * 1024 * 1024
SLABS_PER_ARENA = 64


def default_slab_bytes(arena_bytes: int) -> int:
    """Enough slabs for several sizes, and slabs that hold the blocks of large models."""
    share = arena_bytes // SLABS_PER_ARENA
    return min(max(share, LEAST_SLAB_BYTES), MOST_SLAB_BYTES, arena_bytes)


class Slabs:
    """A slab belongs to one slot size, or to none. A slot is its offset in the arena. What is
    larger than a slab can't be had."""

    def __init__(self, arena_bytes: int, slab_bytes: int) -> None:
        self._arena_bytes = arena_bytes
        self._slab_bytes = slab_bytes
        self._unassigned = list(range(arena_bytes // slab_bytes - 1, -1, -1))
        self._size_of: dict[int, int] = {}
        self._free: dict[int, set[int]] = {}
        self._used: dict[int, set[int]] = {}

    @property
    def slab_bytes(self) -> int:
        return self._slab_bytes

    def take(self, size_bytes: int) -> int | None:
        """A free slot's offset; None when the arena has none of that size left."""
        free = self._free.setdefault(size_bytes, set())
        if not free and self._unassigned and size_bytes <= self._slab_bytes:
            self._assign(self._unassigned.pop(), size_bytes)
        if not free:
            return None
        offset = free.pop()
        self._used.setdefault(offset // self._slab_bytes, set()).add(offset)
        return offset

    def give(self, offset: int) -> None:
        """The slot is free again; a slab without a used slot belongs to nobody."""
        slab = offset // self._slab_bytes
        size = self._size_of[slab]
        self._used[slab].remove(offset)
        self._free[size].add(offset)
        if not self._used[slab]:
            self._free[size] -= set(self._slots(slab, size))
            del self._size_of[slab], self._used[slab]
            self._unassigned.append(slab)

    def neighbours(self, offset: int) -> frozenset[int]:
        """The used slots of the same slab, this one among them."""
        return frozenset(self._used.get(offset // self._slab_bytes, ()))

    def fits(self, size_bytes: int) -> bool:
        """Whether a slot of that size could ever be had."""
        return 0 < size_bytes <= self._slab_bytes and self._slab_bytes <= self._arena_bytes

    def used(self) -> Iterable[int]:
        """Offsets of all used slots."""
        return (offset for offsets in self._used.values() for offset in offsets)

    def check_integrity(self) -> None:
        for slab, size in self._size_of.items():
            slots = set(self._slots(slab, size))
            used, free = self._used.get(slab, set()), self._free[size] & slots
            assert used | free == slots and not used & free, f"slab {slab} of {size}"
        assert not set(self._unassigned) & set(self._size_of), "a slab is owned and unassigned"

    def _assign(self, slab: int, size_bytes: int) -> None:
        self._size_of[slab] = size_bytes
        self._used[slab] = set()
        self._free[size_bytes].update(self._slots(slab, size_bytes))

    def _slots(self, slab: int, size_bytes: int) -> range:
        start = slab * self._slab_bytes
        count = self._slab_bytes // size_bytes
        return range(start, start + count * size_bytes, size_bytes)
