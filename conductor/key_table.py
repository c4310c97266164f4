"""A set of millions of block keys in little memory, with longest-prefix search."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.core.block_key import BLOCK_KEY_BYTES
from baton.core.ids import BlockKey

MAX_LOAD_FACTOR = 0.7
"""Of the places: beyond, probes get long, and the table grows."""
RESIZE_LOAD_FACTOR = 0.55
"""After growth or shrinking. Between the two a key costs 12.9 to 16.4 bytes."""
MIN_LOAD_FACTOR = 0.25
"""Below, the table shrinks."""
MIN_SLOTS = 16
MAX_SLOTS = 1 << 32
"""A home is computed from 32 bits."""
VECTORIZED_KEYS = 512
"""Keys from which on numpy's cost per call is worth it: below, 1 us a key; above, 0.3."""
BATCH_KEYS = 1 << 16
"""Keys that are added, and 1/4 of the places that are moved, at a time: bounds the temporaries."""

Fingerprints = NDArray[np.uint64]
TierArray = NDArray[np.uint8]
SlotArray = NDArray[np.int64]


class KeyTable:
    """Keys and a tier (1 to 255) for each, in 9 bytes a place. For one thread.

    Open addressing with linear probing over the first 8 bytes of the keys, and deletion by
    shifting back, so that nothing wears out. Two keys that agree in 8 bytes are taken for one
    (one pair in 10^5 tables of ten million): that can only make a hint wrong, never an answer,
    since the holder is asked by the whole key. Keys are BLAKE2b digests, so nobody can choose
    where they fall, and no seed is needed.

    Places are in the order of the fingerprints but for local disorder, so a table grows (by
    1.27) in one pass over memory: about 0.05 s a million keys, in one piece, while both the old
    and the new places are in memory. ``capacity`` keys fit before it first grows, and it never
    shrinks below them.
    """

    def __init__(self, capacity: int = 1024) -> None:
        assert capacity > 0, capacity
        self._least_places = max(MIN_SLOTS, int(capacity / MAX_LOAD_FACTOR) + 1)
        self._allocate(self._least_places)

    def __len__(self) -> int:
        return self._len

    def __contains__(self, key: BlockKey) -> bool:
        return self.tier(key) > 0

    @property
    def size_bytes(self) -> int:
        return self._prints.nbytes + self._tiers.nbytes

    def add(self, keys: Sequence[BlockKey], tier: int) -> None:
        """Keys that are present get the new tier."""
        assert 0 < tier < 256, tier
        for start in range(0, len(keys), BATCH_KEYS):
            self._add_chunk(keys[start : start + BATCH_KEYS], tier)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Unknown keys are no error."""
        for start in range(0, len(keys), BATCH_KEYS):
            self._remove_chunk(keys[start : start + BATCH_KEYS])
        if self._len < MIN_LOAD_FACTOR * self._places and self._places > self._least_places:
            self._resize(self._len)

    def clear(self) -> None:
        """Gives the memory back, too."""
        self._allocate(self._least_places)

    def tier(self, key: BlockKey) -> int:
        """0: it is not here."""
        return self._tier_at[self._find(_fingerprint(key))]

    def longest_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are here, by bisection: O(log n) probes.

        That is exact where a key is here only with all before it, as a store keeps prefixes.
        Where it isn't, ``keys[n - 1]`` is here and ``keys[n]`` is not for the answer n, but some
        key before may be missing: a hint only."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._tier_at[self._find(_fingerprint(keys[middle]))]:
                low = middle + 1
            else:
                high = middle
        return low

    def tiers_of_prefix(self, keys: Sequence[BlockKey], num: int) -> dict[int, int]:
        """How many of the first ``num`` keys are in each tier; those not here are left out."""
        counts = np.bincount(self._tiers[self._find_many(_fingerprints(keys[:num]))], minlength=1)
        return {tier: int(counts[tier]) for tier in np.flatnonzero(counts).tolist() if tier}

    def check_integrity(self) -> None:
        """Every fingerprint is found where it lies, so it is there once. O(places)."""
        taken = np.flatnonzero(self._tiers)
        assert len(taken) == self._len <= MAX_LOAD_FACTOR * self._places, (len(taken), self._len)
        for place in taken.tolist():
            assert self._find(self._print_at[place]) == place, place

    def _find(self, wanted: int) -> int:
        """Its place, or the free one where it would be. There is always a free one."""
        prints, tiers, places = self._print_at, self._tier_at, self._places
        place = (wanted >> 32) * places >> 32
        while tiers[place] and prints[place] != wanted:
            place += 1
            if place == places:
                place = 0
        return place

    def _put(self, wanted: int, tier: int) -> None:
        place = self._find(wanted)
        self._len += not self._tier_at[place]
        self._print_at[place], self._tier_at[place] = wanted, tier

    def _add_chunk(self, keys: Sequence[BlockKey], tier: int) -> None:
        if self._len + len(keys) > MAX_LOAD_FACTOR * self._places:
            self._grow_for(np.unique(_fingerprints(keys)))
        if len(keys) >= VECTORIZED_KEYS:
            self._put_many(np.unique(_fingerprints(keys)), tier)
        else:
            for key in keys:
                self._put(_fingerprint(key), tier)

    def _put_many(self, prints: Fingerprints, tier: int) -> None:
        """All go one place on at a time, so each passes taken places only. ``prints`` differ,
        so of those that claim one free place, one finds itself there afterwards."""
        places = _homes(prints, self._places)
        while len(places):
            free = self._tiers[places] == 0
            self._prints[places[free]] = prints[free]
            done = self._prints[places] == prints
            self._tiers[places[free | done]] = tier
            self._len += int(np.count_nonzero(free & done))
            prints, places = prints[~done], self._next(places[~done])

    def _remove_chunk(self, keys: Sequence[BlockKey]) -> None:
        if len(keys) >= VECTORIZED_KEYS:
            self._remove_many(np.unique(_fingerprints(keys)))
            return
        for key in keys:
            place = self._find(_fingerprint(key))
            if self._tier_at[place]:
                self._vacate(place)
                self._len -= 1

    def _remove_many(self, prints: Fingerprints) -> None:
        """Takes out whoever was pushed beyond a hole, too, and puts them in again. Walks from
        the holes end at the next hole, so no place is visited twice."""
        holes = self._find_many(prints)
        holes = holes[self._tiers[holes] > 0]
        self._tiers[holes] = 0
        pushed, at = [holes[:0]], self._next(holes)
        while len(at):
            at = at[self._tiers[at] > 0]
            pushed.append(at[_homes(self._prints[at], self._places) != at])
            at = self._next(at)
        places = np.concatenate(pushed)
        prints, tiers = self._prints[places], self._tiers[places]
        self._tiers[places] = 0
        self._len -= len(holes) + len(places)
        for tier in np.unique(tiers).tolist():
            self._put_many(np.sort(prints[tiers == tier]), tier)

    def _find_many(self, prints: Fingerprints) -> SlotArray:
        """Of each its place, or the free one where it would be."""
        found = _homes(prints, self._places)
        asking = np.arange(len(prints))
        while len(asking):
            places = found[asking]
            on = (self._tiers[places] > 0) & (self._prints[places] != prints[asking])
            asking = asking[on]
            found[asking] = self._next(places[on])
        return found

    def _next(self, places: SlotArray) -> SlotArray:
        places = places + 1
        places[places == self._places] = 0
        return places

    def _vacate(self, hole: int) -> None:
        """Moves back whoever was pushed beyond the hole, so that every chain stays whole."""
        prints, tiers, places = self._print_at, self._tier_at, self._places
        place = hole
        while True:
            place += 1
            if place == places:
                place = 0
            if not tiers[place]:
                break
            home = (prints[place] >> 32) * places >> 32
            if (place - home) % places >= (place - hole) % places:
                prints[hole], tiers[hole] = prints[place], tiers[place]
                hole = place
        tiers[hole] = 0

    def _grow_for(self, prints: Fingerprints) -> None:
        """Only if those of ``prints`` that are new do not fit."""
        num_keys = self._len + int(np.count_nonzero(self._tiers[self._find_many(prints)] == 0))
        if num_keys > MAX_LOAD_FACTOR * self._places:
            self._resize(num_keys)

    def _resize(self, num_keys: int) -> None:
        """A pass over the old places, cut where one is free: no chain goes across there, so
        sorting each piece sorts the whole."""
        prints, tiers, tier_at = self._prints, self._tiers, self._tier_at
        old_places, start, taken = self._places, 0, 0
        leftover: list[tuple[int, int]] = []
        self._allocate(max(self._least_places, int(num_keys / RESIZE_LOAD_FACTOR) + 1))
        while start < old_places:
            stop = min(start + 4 * BATCH_KEYS, old_places)
            while stop < old_places and tier_at[stop]:
                stop += 1
            live = start + np.flatnonzero(tiers[start:stop])
            around = _homes(prints[live], old_places) > live  # from the end to the beginning
            leftover += _pairs(prints[live[around]], tiers[live[around]])
            live = live[~around]
            live = live[np.argsort(prints[live], kind="stable")]
            taken, spilled = self._append(prints[live], tiers[live], taken)
            leftover += spilled
            start = stop
        for wanted, tier in leftover:
            self._put(wanted, tier)

    def _append(
        self, prints: Fingerprints, tiers: TierArray, taken: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """Puts sorted fingerprints, each at its home or behind the one before, from ``taken``
        on. Returns where the next may lie, and those that the end left no place for."""
        index = np.arange(len(prints))
        places = index + np.maximum.accumulate(
            np.maximum(_homes(prints, self._places) - index, taken)
        )
        fit = int(np.searchsorted(places, self._places))
        self._prints[places[:fit]], self._tiers[places[:fit]] = prints[:fit], tiers[:fit]
        self._len += fit
        end = int(places[fit - 1]) + 1 if fit else taken
        return end, _pairs(prints[fit:], tiers[fit:])

    def _allocate(self, places: int) -> None:
        assert places < MAX_SLOTS, places
        self._places = places
        self._len = 0
        self._prints: Fingerprints = np.zeros(places, np.uint64)
        self._tiers = np.zeros(places, np.uint8)
        # The same memory: one element is read in a third of numpy's time.
        self._print_at: memoryview[int] = self._prints.data
        self._tier_at: memoryview[int] = self._tiers.data


def _fingerprint(key: BlockKey) -> int:
    return int.from_bytes(key[:8], "little")


def _fingerprints(keys: Sequence[BlockKey]) -> Fingerprints:
    joined = b"".join(keys)
    assert len(joined) == BLOCK_KEY_BYTES * len(keys), "a key of another length"
    return np.frombuffer(joined, "<u8")[:: BLOCK_KEY_BYTES // 8].astype(np.uint64)


def _homes(prints: Fingerprints, places: int) -> SlotArray:
    """Where each would lie in an empty table; never falls as the fingerprints rise."""
    scaled = (prints >> np.uint64(32)) * np.uint64(places)
    return (scaled >> np.uint64(32)).astype(np.int64)


def _pairs(prints: Fingerprints, tiers: TierArray) -> list[tuple[int, int]]:
    return list(zip(prints.tolist(), tiers.tolist(), strict=True))
