"""Leases of blocks in DRAM: each keeps the blocks that a worker reads until it has read them."""

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from baton.errors import Invalid, Overloaded
from kvstore.dram_block import BlockReferences, DramBlock
from kvstore.limits import MAX_LEASE_SECONDS, MAX_LEASED_REFERENCES, MAX_LEASES, MIN_EXPIRIES


class DramLeases:
    """The active leases. Each holds one reference to each of its blocks."""

    def __init__(self, references: BlockReferences) -> None:
        self._references = references
        self._leases: dict[str, tuple[DramBlock, ...]] = {}
        self._expiries: list[tuple[float, str]] = []
        """A heap of (time, lease), also of leases that were released before."""
        self._num_granted = 0
        self._num_references = 0
        self._leases_per_offset = Counter[int]()

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        """The number of different blocks that are leased."""
        return len(self._leases_per_offset)

    def grant(self, slots: Sequence[DramBlock], seconds: float, now: float) -> str:
        """Reference sealed blocks until :meth:`release` is called or ``seconds`` have passed; the
        caller keeps its own references. Return the lease's id. Raises Invalid if ``seconds`` is out
        of range, and Overloaded if there are too many leases, or too many blocks in leases."""
        if not 0 < seconds <= MAX_LEASE_SECONDS:
            raise Invalid(
                f"a lease of {seconds:g} s was requested; it must last more than 0 and up to "
                f"{MAX_LEASE_SECONDS:g} s"
            )
        if len(self._leases) >= MAX_LEASES:
            raise Overloaded(f"{MAX_LEASES} leases are active, which is the maximum")
        if self._num_references + len(slots) > MAX_LEASED_REFERENCES:
            raise Overloaded(
                f"the active leases have {self._num_references} blocks; with {len(slots)} more "
                f"they would have more than {MAX_LEASED_REFERENCES}, the maximum"
            )
        for slot in slots:
            self._references.add_reference(slot)
            self._leases_per_offset[slot.offset] += 1
        self._num_references += len(slots)
        self._num_granted += 1
        lease_id = str(self._num_granted)
        self._leases[lease_id] = tuple(slots)
        self._schedule_expiry(lease_id, now + seconds)
        return lease_id

    def release(self, lease_id: str) -> None:
        """End a lease. An unknown lease is ignored, since it has already expired."""
        slots = self._leases.pop(lease_id, None)
        if slots is None:
            return
        self._num_references -= len(slots)
        for slot in slots:
            self._leases_per_offset[slot.offset] -= 1
            if not self._leases_per_offset[slot.offset]:
                del self._leases_per_offset[slot.offset]
        self._references.release_references(slots)

    def expire(self, now: float) -> None:
        """End the leases that have expired."""
        while self._expiries and self._expiries[0][0] <= now:
            self.release(heappop(self._expiries)[1])

    def references_by_offset(self) -> Counter[int]:
        """Return how many leases hold each slot, by the slot's offset. Raises AssertionError if the
        counts are inconsistent."""
        found = Counter(slot.offset for slots in self._leases.values() for slot in slots)
        assert found == self._leases_per_offset, "leases per block"
        assert found.total() == self._num_references, "leased references"
        assert self._leases.keys() <= {lease_id for _, lease_id in self._expiries}, "expiries"
        return found

    def _schedule_expiry(self, lease_id: str, at: float) -> None:
        heappush(self._expiries, (at, lease_id))
        if len(self._expiries) > max(2 * len(self._leases), MIN_EXPIRIES):
            self._expiries = [each for each in self._expiries if each[1] in self._leases]
            heapify(self._expiries)
