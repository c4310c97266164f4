"""A slab allocator for slots of several sizes in one arena. Slots of one slab are allocated next to
each other where possible."""

import heapq
from collections.abc import Iterable, Set

from kvstore.limits import MAX_SLAB_BYTES, MIN_SLAB_BYTES, MIN_SLABS_PER_ARENA
from kvstore.slot_sizes import ALIGNMENT_BYTES

SLABS_PER_ARENA = 64

BLOCKS_PER_SLAB = 8
"""Minimum number of raw blocks in a slab. The end of a slab, where no further slot fits, is unused,
so a slab should have many slots."""


def default_slab_bytes(arena_bytes: int) -> int:
    """Choose a slab size that gives enough slabs for several slot sizes, with slabs large enough
    for the blocks of large models."""
    share = arena_bytes // SLABS_PER_ARENA
    return min(max(share, MIN_SLAB_BYTES), MAX_SLAB_BYTES, arena_bytes)


def slab_bytes_for(arena_bytes: int, raw_bytes: int) -> int:
    """Choose a slab size for blocks that have ``raw_bytes`` if they are not encoded: the default,
    or a larger size with room for BLOCKS_PER_SLAB of them, if the arena still has
    MIN_SLABS_PER_ARENA slabs then."""
    wanted = min(BLOCKS_PER_SLAB * raw_bytes, arena_bytes // MIN_SLABS_PER_ARENA)
    default = default_slab_bytes(arena_bytes)
    if wanted <= default:
        return default
    even = arena_bytes // (arena_bytes // wanted)  # leaves no end of the arena unused
    return even // ALIGNMENT_BYTES * ALIGNMENT_BYTES


class SlabAllocator:
    """Allocates slots, which are identified by their offset in the arena. A slab is assigned to one
    slot size, or unassigned. A slot can't be larger than a slab. The lowest free slot of a slab is
    allocated first, so that blocks stored together are adjacent and can be transferred in one
    piece."""

    def __init__(self, arena_bytes: int, slab_bytes: int) -> None:
        self._slab_bytes = slab_bytes
        self._num_slabs = arena_bytes // slab_bytes
        self._unassigned = list(range(self._num_slabs - 1, -1, -1))
        self._slot_bytes_of: dict[int, int] = {}
        self._slabs_by_size: dict[int, set[int]] = {}  # slabs per slot size
        self._free_slots: dict[int, list[int]] = {}  # a heap of slots per slab
        self._used_slots: dict[int, set[int]] = {}  # slots per slab
        self._open_slabs: dict[int, dict[int, None]] = {}  # slabs with a free slot, per slot size

    @property
    def slab_bytes(self) -> int:
        return self._slab_bytes

    def allocate(self, size_bytes: int) -> int | None:
        """Allocate a slot and return its offset, or None if no slot of that size is free."""
        slabs = self._open_slabs.setdefault(size_bytes, {})
        if not slabs and self._unassigned and size_bytes <= self._slab_bytes:
            self._assign(self._unassigned.pop(), size_bytes)
        if not slabs:
            return None
        slab = next(iter(slabs))
        offset = heapq.heappop(self._free_slots[slab])
        self._used_slots[slab].add(offset)
        if not self._free_slots[slab]:
            del slabs[slab]
        return offset

    def free(self, offset: int) -> None:
        """Free a slot; a slab whose slots are all free becomes unassigned."""
        slab = self.slab_of(offset)
        size = self._slot_bytes_of[slab]
        slabs = self._open_slabs.setdefault(size, {})
        self._used_slots[slab].remove(offset)
        if self._used_slots[slab]:
            heapq.heappush(self._free_slots[slab], offset)
            slabs[slab] = None
            return
        slabs.pop(slab, None)
        if not slabs:
            del self._open_slabs[size]
        self._slabs_by_size[size].remove(slab)
        if not self._slabs_by_size[size]:
            del self._slabs_by_size[size]
        del self._slot_bytes_of[slab], self._used_slots[slab], self._free_slots[slab]
        self._unassigned.append(slab)

    def slab_of(self, offset: int) -> int:
        return offset // self._slab_bytes

    def slot_bytes_of(self, slab: int) -> int:
        """Return the slot size to which a slab is assigned."""
        return self._slot_bytes_of[slab]

    def slot_sizes(self) -> list[int]:
        """Return the slot sizes to which slabs are assigned."""
        return list(self._slabs_by_size)

    def used_slots(self, slab: int) -> Set[int]:
        """Return the offsets of the slab's used slots."""
        return self._used_slots.get(slab, set())

    def num_slabs_of_other_sizes(self, size_bytes: int) -> int:
        """Return how many slabs are assigned to slot sizes other than ``size_bytes``."""
        return len(self._slot_bytes_of) - len(self._slabs_by_size.get(size_bytes, ()))

    def num_free(self, size_bytes: int) -> int:
        """Return how many slots of ``size_bytes`` can be allocated without freeing any."""
        free = sum(len(self._free_slots[slab]) for slab in self._open_slabs.get(size_bytes, ()))
        return free + len(self._unassigned) * (self._slab_bytes // size_bytes)

    def used_offsets(self) -> Iterable[int]:
        """Return the offsets of all used slots."""
        return (offset for offsets in self._used_slots.values() for offset in offsets)

    def check_integrity(self) -> None:
        assert sum(len(slabs) for slabs in self._slabs_by_size.values()) == len(
            self._slot_bytes_of
        ), "slabs with a slot size"
        for slab, size in self._slot_bytes_of.items():
            assert slab in self._slabs_by_size[size], f"slab {slab} of {size}"
            used, free = self._used_slots[slab], set(self._free_slots[slab])
            assert used | free == set(self._slots(slab, size)), f"slab {slab} of {size}"
            assert not used & free and len(free) == len(self._free_slots[slab]), f"slab {slab}"
            assert bool(free) == (slab in self._open_slabs.get(size, ())), (
                f"slab {slab} is misfiled"
            )
        assert not set(self._unassigned) & set(self._slot_bytes_of), (
            "a slab is owned and unassigned"
        )
        assert len(self._unassigned) + len(self._slot_bytes_of) == self._num_slabs, "a slab is lost"

    def _assign(self, slab: int, size_bytes: int) -> None:
        self._slot_bytes_of[slab] = size_bytes
        self._slabs_by_size.setdefault(size_bytes, set()).add(slab)
        self._used_slots[slab] = set()
        self._free_slots[slab] = list(self._slots(slab, size_bytes))
        self._open_slabs[size_bytes][slab] = None

    def _slots(self, slab: int, size_bytes: int) -> range:
        start = slab * self._slab_bytes
        count = self._slab_bytes // size_bytes
        return range(start, start + count * size_bytes, size_bytes)
