"""What lies where in the arena: keys, states, leases, and who goes when room is needed."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from baton.core.handoff import BlockRef
from baton.core.ids import BlockKey
from baton.core.store import LeasedBlocks
from baton.errors import Invalid, Overloaded
from kvstore.slabs import Slabs, default_slab_bytes

MAX_LEASES = 65_536
MAX_LEASE_SECONDS = 60.0


class SlotState(StrEnum):
    """FREE slots are unknown here: they are the slabs' own."""

    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"


SLOT_TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.FREE: frozenset({SlotState.FILLING}),
    # verified | not what was announced
    SlotState.FILLING: frozenset({SlotState.SEALED, SlotState.FREE}),
    # evicted
    SlotState.SEALED: frozenset({SlotState.FREE}),
}


@dataclass(slots=True)
class Slot:
    """``checksum`` by ``algorithm``, as of when it was sealed."""

    key: BlockKey
    offset: int
    size_bytes: int
    state: SlotState = SlotState.FILLING
    checksum: int = 0
    algorithm: str = ""
    num_leases: int = 0

    def move(self, state: SlotState) -> None:
        assert state in SLOT_TRANSITIONS[self.state], f"{self.state} → {state}"
        self.state = state


@dataclass(frozen=True, slots=True)
class _Lease:
    slots: tuple[Slot, ...]
    until_seconds: float


class Shelf:
    """Synchronous; times come in. Eviction takes the least recently used unleased block; of
    one prefix the last block counts as used first, so that a prefix is eaten from its end."""

    def __init__(self, arena_bytes: int, slab_bytes: int | None = None) -> None:
        self.arena_bytes = arena_bytes
        self._slabs = Slabs(arena_bytes, slab_bytes or default_slab_bytes(arena_bytes))
        self._slots: dict[BlockKey, Slot] = {}
        self._idle: OrderedDict[BlockKey, Slot] = OrderedDict()  # least recently used first
        self._leases: OrderedDict[str, _Lease] = OrderedDict()
        self._num_leases = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slots

    def keys(self) -> list[BlockKey]:
        """Of the sealed blocks."""
        return [key for key, slot in self._slots.items() if slot.state is SlotState.SEALED]

    def reserve(
        self, key: BlockKey, size_bytes: int, keep: Collection[BlockKey] = ()
    ) -> tuple[Slot, list[BlockKey]]:
        """A slot to be filled, and the keys that had to go for it, none of ``keep``. Raises
        Overloaded when all else is leased or being filled, Invalid for a size that can't be
        had."""
        assert key not in self._slots, "ask `in` before"
        if not self._slabs.fits(size_bytes):
            raise Invalid(f"a block of {size_bytes} bytes does not fit a slab", param="blocks")
        evicted: list[BlockKey] = []
        offset = self._slabs.take(size_bytes)
        while offset is None:
            evicted += self._make_room(size_bytes, keep)
            offset = self._slabs.take(size_bytes)
        slot = Slot(key, offset, size_bytes)
        self._slots[key] = slot
        return slot, evicted

    def seal(self, slot: Slot, checksum: int, algorithm: str) -> None:
        slot.move(SlotState.SEALED)
        slot.checksum, slot.algorithm = checksum, algorithm
        self._idle[slot.key] = slot

    def discard(self, slot: Slot) -> None:
        """What was read into it is not what was announced."""
        slot.move(SlotState.FREE)
        del self._slots[slot.key]
        self._slabs.give(slot.offset)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Used now; the first key counts as the last used."""
        for key in reversed(keys):
            if key in self._idle:
                self._idle.move_to_end(key)

    def lease(self, keys: Sequence[BlockKey], seconds: float, now: float) -> LeasedBlocks:
        """The longest sealed prefix of ``keys`` with one checksum algorithm, pinned."""
        self.expire(now)
        if not 0 < seconds <= MAX_LEASE_SECONDS:
            raise Invalid(f"a lease lasts up to {MAX_LEASE_SECONDS:g} s, not {seconds:g}")
        if len(self._leases) >= MAX_LEASES:
            raise Overloaded(f"{MAX_LEASES} leases are out")
        slots = self._prefix(keys)
        self.hits += len(slots)
        self.misses += len(keys) - len(slots)
        if not slots:
            return LeasedBlocks("", "", ())
        for slot in slots:
            slot.num_leases += 1
            self._idle.pop(slot.key, None)
        self._num_leases += 1
        lease_id = str(self._num_leases)
        self._leases[lease_id] = _Lease(tuple(slots), now + seconds)
        blocks = tuple(BlockRef(s.offset, s.size_bytes, s.checksum, s.key) for s in slots)
        return LeasedBlocks(lease_id, slots[0].algorithm, blocks)

    def release(self, lease_id: str) -> None:
        """Unknown leases have ended already."""
        lease = self._leases.pop(lease_id, None)
        for slot in reversed(lease.slots) if lease else ():
            slot.num_leases -= 1
            if slot.num_leases == 0:
                self._idle[slot.key] = slot

    def expire(self, now: float) -> None:
        """Ends the leases whose time is up."""
        late = [name for name, lease in self._leases.items() if lease.until_seconds <= now]
        for lease_id in late:
            self.release(lease_id)

    @property
    def num_blocks(self) -> int:
        return len(self._slots)

    @property
    def num_leased(self) -> int:
        return sum(slot.num_leases > 0 for slot in self._slots.values())

    @property
    def used_bytes(self) -> int:
        return sum(slot.size_bytes for slot in self._slots.values())

    def check_integrity(self) -> None:
        """Raises AssertionError when the books don't balance."""
        self._slabs.check_integrity()
        offsets = [slot.offset for slot in self._slots.values()]
        assert sorted(offsets) == sorted(self._slabs.used()), "slots and slabs differ"
        counts: dict[BlockKey, int] = {}
        for lease in self._leases.values():
            for slot in lease.slots:
                counts[slot.key] = counts.get(slot.key, 0) + 1
        for key, slot in self._slots.items():
            assert slot.key == key and slot.state is not SlotState.FREE, slot
            assert slot.num_leases == counts.get(key, 0), slot
            idle = slot.state is SlotState.SEALED and slot.num_leases == 0
            assert idle == (key in self._idle), slot

    def describe(self) -> str:
        """One character per block: f filling, l leased, . idle; oldest idle first."""
        marks = [
            "f" if slot.state is SlotState.FILLING else "l"
            for slot in self._slots.values()
            if slot.key not in self._idle
        ]
        return f"{len(self._slots)} blocks, {len(self._leases)} leases: {''.join(marks)}" + (
            "." * len(self._idle)
        )

    def _prefix(self, keys: Sequence[BlockKey]) -> list[Slot]:
        slots: list[Slot] = []
        for key in keys:
            slot = self._slots.get(key)
            if slot is None or slot.state is not SlotState.SEALED:
                break
            if slots and slot.algorithm != slots[0].algorithm:
                break
            slots.append(slot)
        return slots

    def _make_room(self, size_bytes: int, keep: Collection[BlockKey]) -> list[BlockKey]:
        """Evicts the oldest idle block of that size; if there is none, a whole slab of others."""
        for key, slot in self._idle.items():
            if slot.size_bytes == size_bytes and key not in keep:
                self._evict(slot)
                return [key]
        by_offset = {slot.offset: slot for key, slot in self._idle.items() if key not in keep}
        for slot in by_offset.values():
            neighbours = self._slabs.neighbours(slot.offset)
            if neighbours <= by_offset.keys():
                evicted = [by_offset[offset] for offset in neighbours]
                for gone in evicted:
                    self._evict(gone)
                return [gone.key for gone in evicted]
        raise Overloaded("every block of the store is leased or being filled")

    def _evict(self, slot: Slot) -> None:
        del self._idle[slot.key]
        self.discard(slot)
        self.evictions += 1
