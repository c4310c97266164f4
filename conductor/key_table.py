"""A compact hash table of millions of block keys, with longest-prefix search."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.core.block_key import BLOCK_KEY_BYTES
from baton.core.ids import BlockKey
from baton.core.prefix_search import count_leading

MAX_LOAD_FACTOR = 0.7
"""Above this load, probes get long, and the table grows."""
RESIZE_LOAD_FACTOR = 0.55
"""Load after growing or shrinking. From here up to the maximum, a key takes 16.4 to 12.9 bytes."""
MIN_LOAD_FACTOR = 0.25
"""Below this load, the table shrinks."""
MIN_SLOTS = 16
MAX_SLOTS = 1 << 32
"""The table has fewer slots than this, since home slots are computed from 32 bits of the
fingerprint."""
VECTORIZED_KEYS = 512
"""Minimum number of keys for which numpy is used: 0.3 us per key instead of 1 us."""
BATCH_KEYS = 1 << 16
"""Keys added or removed at a time; a resize moves four times as many slots at a time. This bounds
temporary memory."""

Fingerprints = NDArray[np.uint64]
TierArray = NDArray[np.uint8]
SlotArray = NDArray[np.int64]


class KeyTable:
    """Maps block keys to a tier (1 to 255), in 9 bytes per slot. Not thread-safe.

    It uses open addressing with linear probing over the first 8 bytes of the keys (the
    fingerprint), and deletion by backward shift, which leaves no tombstones. Two keys with the same
    8 bytes are treated as one (one pair in 10^5 tables of ten million keys). That can only make a
    placement hint wrong, never a request's answer, since the store node is queried with the whole
    key. Keys are BLAKE2b digests, so nobody can choose their slots, and no seed is needed.

    Slots are ordered by fingerprint except for local displacement, so a table grows (by a factor of
    1.27) in one pass over memory: about 0.05 s per million keys, in one blocking call, while both
    the old and the new slots are in memory. The table holds ``capacity`` keys before it first
    grows, and never shrinks below that size.
    """

    def __init__(self, capacity: int = 1024) -> None:
        assert capacity > 0, capacity
        self._min_slots = max(MIN_SLOTS, int(capacity / MAX_LOAD_FACTOR) + 1)
        self._allocate(self._min_slots)

    def __len__(self) -> int:
        return self._len

    def __contains__(self, key: BlockKey) -> bool:
        return self.has(fingerprint(key))

    def has(self, wanted: int) -> bool:
        """Return whether the key with this :func:`fingerprint` is present. With one fingerprint for
        many tables, this takes a third of the time of :meth:`tier`, so it repeats the loop of
        ``_find``."""
        prints, tiers, places = self._fingerprint_at, self._tier_at, self._num_slots
        place = (wanted >> 32) * places >> 32
        while tiers[place]:
            if prints[place] == wanted:
                return True
            place += 1
            if place == places:
                place = 0
        return False

    @property
    def size_bytes(self) -> int:
        return self._fingerprints.nbytes + self._tiers.nbytes

    def add(self, keys: Sequence[BlockKey], tier: int) -> None:
        """Add keys. Keys that are already present get the new tier."""
        assert 0 < tier < 256, tier
        for start in range(0, len(keys), BATCH_KEYS):
            self._add_chunk(keys[start : start + BATCH_KEYS], tier)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Remove keys. Unknown keys are ignored."""
        for start in range(0, len(keys), BATCH_KEYS):
            self._remove_chunk(keys[start : start + BATCH_KEYS])
        if self._len < MIN_LOAD_FACTOR * self._num_slots and self._num_slots > self._min_slots:
            self._resize(self._len)

    def clear(self) -> None:
        """Remove all keys and free the memory."""
        self._allocate(self._min_slots)

    def tier(self, key: BlockKey) -> int:
        """Return the key's tier; 0 if it is absent."""
        return self._tier_at[self._find(fingerprint(key))]

    def longest_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading keys are present, according to the bisection of
        :func:`count_leading`. This is only a hint: if a store has evicted blocks within the prefix,
        the bisection may miss that."""
        tier_at, find = self._tier_at, self._find
        return count_leading(keys, lambda key: not tier_at[find(fingerprint(key))])

    def check_integrity(self) -> None:
        """Check that every fingerprint is found at its slot, which implies that no fingerprint is
        stored twice. Takes O(slots) time."""
        used = np.flatnonzero(self._tiers)
        assert len(used) == self._len <= MAX_LOAD_FACTOR * self._num_slots, (len(used), self._len)
        for place in used.tolist():
            assert self._find(self._fingerprint_at[place]) == place, place

    def _find(self, wanted: int) -> int:
        """Return the fingerprint's slot, or the free slot where it would be inserted. A free slot
        always exists."""
        prints, tiers, places = self._fingerprint_at, self._tier_at, self._num_slots
        place = (wanted >> 32) * places >> 32
        while tiers[place] and prints[place] != wanted:
            place += 1
            if place == places:
                place = 0
        return place

    def _insert(self, wanted: int, tier: int) -> None:
        place = self._find(wanted)
        self._len += not self._tier_at[place]
        self._fingerprint_at[place], self._tier_at[place] = wanted, tier

    def _add_chunk(self, keys: Sequence[BlockKey], tier: int) -> None:
        if self._len + len(keys) > MAX_LOAD_FACTOR * self._num_slots:
            self._grow_for(np.unique(_fingerprints(keys)))
        if len(keys) >= VECTORIZED_KEYS:
            self._insert_many(np.unique(_fingerprints(keys)), tier)
        else:
            for key in keys:
                self._insert(fingerprint(key), tier)

    def _insert_many(self, prints: Fingerprints, tier: int) -> None:
        """Insert distinct fingerprints. All of them are tried in parallel, each in its home slot
        first and then one slot further at a time, so each passes over used slots only. If several
        of them claim the same free slot, exactly one is stored there."""
        places = _homes(prints, self._num_slots)
        while len(places):
            free = self._tiers[places] == 0
            self._fingerprints[places[free]] = prints[free]
            done = self._fingerprints[places] == prints
            self._tiers[places[free | done]] = tier
            self._len += int(np.count_nonzero(free & done))
            prints, places = prints[~done], self._next(places[~done])

    def _remove_chunk(self, keys: Sequence[BlockKey]) -> None:
        if len(keys) >= VECTORIZED_KEYS:
            self._remove_many(np.unique(_fingerprints(keys)))
            return
        for key in keys:
            place = self._find(fingerprint(key))
            if self._tier_at[place]:
                self._close_hole(place)
                self._len -= 1

    def _remove_many(self, prints: Fingerprints) -> None:
        """Remove fingerprints, and reinsert the fingerprints that were displaced beyond a removed
        one. The search for these starts at each freed slot and ends at the next free slot, so no
        slot is visited twice."""
        holes = self._find_many(prints)
        holes = holes[self._tiers[holes] > 0]
        self._tiers[holes] = 0
        displaced, at = [holes[:0]], self._next(holes)
        while len(at):
            at = at[self._tiers[at] > 0]
            displaced.append(at[_homes(self._fingerprints[at], self._num_slots) != at])
            at = self._next(at)
        places = np.concatenate(displaced)
        prints, tiers = self._fingerprints[places], self._tiers[places]
        self._tiers[places] = 0
        self._len -= len(holes) + len(places)
        for tier in np.unique(tiers).tolist():
            self._insert_many(np.sort(prints[tiers == tier]), tier)

    def _find_many(self, prints: Fingerprints) -> SlotArray:
        """Return each fingerprint's slot, or the free slot where it would be inserted."""
        found = _homes(prints, self._num_slots)
        pending = np.arange(len(prints))
        while len(pending):
            places = found[pending]
            occupied = (self._tiers[places] > 0) & (self._fingerprints[places] != prints[pending])
            pending = pending[occupied]
            found[pending] = self._next(places[occupied])
        return found

    def _next(self, places: SlotArray) -> SlotArray:
        places = places + 1
        places[places == self._num_slots] = 0
        return places

    def _close_hole(self, hole: int) -> None:
        """Free the slot ``hole``: shift back the fingerprints that were displaced beyond it, so
        that probing still finds them."""
        prints, tiers, places = self._fingerprint_at, self._tier_at, self._num_slots
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
        """Grow if the fingerprints that are not in the table yet do not fit."""
        num_keys = self._len + int(np.count_nonzero(self._tiers[self._find_many(prints)] == 0))
        if num_keys > MAX_LOAD_FACTOR * self._num_slots:
            self._resize(num_keys)

    def _resize(self, num_keys: int) -> None:
        """Rehash into a table for ``num_keys`` keys, in one pass over the old slots. The pass
        handles pieces of slots that end at a free slot. No probe chain crosses a free slot, so
        sorting each piece sorts the whole table."""
        prints, tiers, tier_at = self._fingerprints, self._tiers, self._tier_at
        old_places, start, taken = self._num_slots, 0, 0
        leftover: list[tuple[int, int]] = []
        self._allocate(max(self._min_slots, int(num_keys / RESIZE_LOAD_FACTOR) + 1))
        while start < old_places:
            stop = min(start + 4 * BATCH_KEYS, old_places)
            while stop < old_places and tier_at[stop]:
                stop += 1
            live = start + np.flatnonzero(tiers[start:stop])
            wrapped = _homes(prints[live], old_places) > live  # wrapped around the table's end
            leftover += _pairs(prints[live[wrapped]], tiers[live[wrapped]])
            live = live[~wrapped]
            live = live[np.argsort(prints[live], kind="stable")]
            taken, spilled = self._append(prints[live], tiers[live], taken)
            leftover += spilled
            start = stop
        for wanted, tier in leftover:
            self._insert(wanted, tier)

    def _append(
        self, prints: Fingerprints, tiers: TierArray, taken: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """Insert sorted fingerprints, each at its home slot or after the previous one, and none
        before slot ``taken``. Return the slot after the last one, and the (fingerprint, tier) pairs
        that did not fit before the table's end."""
        index = np.arange(len(prints))
        places = index + np.maximum.accumulate(
            np.maximum(_homes(prints, self._num_slots) - index, taken)
        )
        fit = int(np.searchsorted(places, self._num_slots))
        self._fingerprints[places[:fit]], self._tiers[places[:fit]] = prints[:fit], tiers[:fit]
        self._len += fit
        end = int(places[fit - 1]) + 1 if fit else taken
        return end, _pairs(prints[fit:], tiers[fit:])

    def _allocate(self, places: int) -> None:
        assert places < MAX_SLOTS, places
        self._num_slots = places
        self._len = 0
        self._fingerprints: Fingerprints = np.zeros(places, np.uint64)
        self._tiers = np.zeros(places, np.uint8)
        # Views of the same memory, which read one element in a third of numpy's time.
        self._fingerprint_at: memoryview[int] = self._fingerprints.data
        self._tier_at: memoryview[int] = self._tiers.data


def fingerprint(key: BlockKey) -> int:
    """Return the part of a key by which tables know it, as a number below 2**64."""
    return int.from_bytes(key[:8], "little")


def _fingerprints(keys: Sequence[BlockKey]) -> Fingerprints:
    joined = b"".join(keys)
    assert len(joined) == BLOCK_KEY_BYTES * len(keys), "a key has the wrong length"
    return np.frombuffer(joined, "<u8")[:: BLOCK_KEY_BYTES // 8].astype(np.uint64)


def _homes(prints: Fingerprints, places: int) -> SlotArray:
    """Return each fingerprint's home slot, which is its slot in an otherwise empty table. Home
    slots are monotonic in the fingerprint."""
    scaled = (prints >> np.uint64(32)) * np.uint64(places)
    return (scaled >> np.uint64(32)).astype(np.int64)


def _pairs(prints: Fingerprints, tiers: TierArray) -> list[tuple[int, int]]:
    return list(zip(prints.tolist(), tiers.tolist(), strict=True))
