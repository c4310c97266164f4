"""A set of millions of block keys in little memory, with longest-prefix search."""

from array import array
from collections.abc import Sequence

from baton.core.ids import BlockKey

LEAST_CAPACITY = 1024
MOST_LOAD = 0.6
"""Of the places: beyond, the table doubles. Below an eighth of it, it halves."""


class KeyTable:
    """Keys and a tier (1 to 255) for each. 9 bytes a place, so 15 to 30 bytes a key.

    Open addressing with linear probing over the first 8 bytes of the keys, which are digests
    and so are spread evenly, and deletion by shifting back, so that nothing wears out. Two keys
    that agree in 8 bytes are taken for one (one pair in 10^5 tables of ten million): this is a
    hint, and its reader asks the holder.

    Growth moves every key: about 0.4 s a million, each time that the size doubles.
    """

    def __init__(self, capacity: int = LEAST_CAPACITY) -> None:
        self._mask = 0
        self._len = 0
        self._prints = array("Q")
        self._tiers = bytearray()
        self._allocate(max(LEAST_CAPACITY, 1 << (capacity - 1).bit_length()))

    def __len__(self) -> int:
        return self._len

    def __contains__(self, key: BlockKey) -> bool:
        return self.tier(key) > 0

    @property
    def size_bytes(self) -> int:
        return 9 * (self._mask + 1)

    def add(self, keys: Sequence[BlockKey], tier: int) -> None:
        """Keys that are present get the new tier."""
        assert 0 < tier < 256, tier
        if self._len + len(keys) > MOST_LOAD * (self._mask + 1):
            self._resize(self._len + len(keys))
        prints, tiers, mask = self._prints, self._tiers, self._mask
        from_bytes = int.from_bytes
        for key in keys:
            wanted = from_bytes(key[:8], "little")
            place = wanted & mask
            while tiers[place] and prints[place] != wanted:
                place = (place + 1) & mask
            if not tiers[place]:
                prints[place] = wanted
                self._len += 1
            tiers[place] = tier

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Unknown keys are no error."""
        for key in keys:
            place = self._find(key)
            if self._tiers[place]:
                self._vacate(place)
                self._len -= 1
        if self._mask >= LEAST_CAPACITY and self._len < MOST_LOAD * (self._mask + 1) / 8:
            self._resize(self._len)

    def tier(self, key: BlockKey) -> int:
        """0: it is not here."""
        return self._tiers[self._find(key)]

    def longest_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are here, by bisection: O(log n) probes. That is exact where a
        key is here only with all before it, as a store keeps prefixes; where it isn't, the
        answer is that of some other place at which presence ends, and only a hint."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if self._tiers[self._find(keys[middle - 1])]:
                low = middle
            else:
                high = middle - 1
        return low

    def _find(self, key: BlockKey) -> int:
        """Its place, or the free one where it would be."""
        wanted = int.from_bytes(key[:8], "little")
        place = wanted & self._mask
        while self._tiers[place] and self._prints[place] != wanted:
            place = (place + 1) & self._mask
        return place

    def _vacate(self, hole: int) -> None:
        """Moves back whoever was pushed beyond the hole, so that every chain stays whole."""
        prints, tiers, mask = self._prints, self._tiers, self._mask
        place = hole
        while True:
            place = (place + 1) & mask
            if not tiers[place]:
                break
            home = prints[place] & mask
            if (place - home) & mask >= (place - hole) & mask:
                prints[hole], tiers[hole] = prints[place], tiers[place]
                hole = place
        tiers[hole] = 0

    def _resize(self, num_keys: int) -> None:
        prints, tiers = self._prints, self._tiers
        capacity = LEAST_CAPACITY
        while num_keys > MOST_LOAD * capacity:
            capacity *= 2
        self._allocate(capacity)
        mask, new_prints, new_tiers = self._mask, self._prints, self._tiers
        for wanted, tier in zip(prints, tiers, strict=True):
            if tier:
                place = wanted & mask
                while new_tiers[place]:
                    place = (place + 1) & mask
                new_prints[place], new_tiers[place] = wanted, tier

    def _allocate(self, capacity: int) -> None:
        self._mask = capacity - 1
        self._prints = array("Q", bytes(8 * capacity))
        self._tiers = bytearray(capacity)
