"""Leases of blocks in DRAM: each keeps the blocks that a worker reads until it has read them."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import Invalid, Overloaded
from kvstore.dram_block import BlockReferences, DramBlock

MAX_LEASES = 65_536
MAX_LEASE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Lease:
    slots: tuple[DramBlock, ...]
    until_seconds: float


class DramLeases:
    """The active leases. Each holds one reference to each of its blocks."""

    def __init__(self, references: BlockReferences) -> None:
        self._references = references
        self._leases: OrderedDict[str, _Lease] = OrderedDict()
        self._num_granted = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        """The number of different blocks that are leased."""
        return len({slot.key for lease in self._leases.values() for slot in lease.slots})

    def grant(self, slots: Sequence[DramBlock], seconds: float, now: float) -> str:
        """Reference sealed blocks until :meth:`release` is called or ``seconds`` have passed; the
        caller keeps its own references. Return the lease's id. Raises Invalid if ``seconds`` is out
        of range, and Overloaded if there are too many leases."""
        if not 0 < seconds <= MAX_LEASE_SECONDS:
            raise Invalid(
                f"a lease of {seconds:g} s was requested; it must last more than 0 and up to "
                f"{MAX_LEASE_SECONDS:g} s"
            )
        if len(self._leases) >= MAX_LEASES:
            raise Overloaded(f"{MAX_LEASES} leases are active, which is the maximum")
        for slot in slots:
            self._references.add_reference(slot)
        self._num_granted += 1
        lease_id = str(self._num_granted)
        self._leases[lease_id] = _Lease(tuple(slots), now + seconds)
        return lease_id

    def release(self, lease_id: str) -> None:
        """End a lease. An unknown lease is ignored, since it has already expired."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._references.release_references(lease.slots)

    def expire(self, now: float) -> None:
        """End the leases that have expired."""
        expired = [name for name, lease in self._leases.items() if lease.until_seconds <= now]
        for lease_id in expired:
            self.release(lease_id)

    def references_by_offset(self) -> Counter[int]:
        """Return how many leases hold each slot, by the slot's offset."""
        return Counter(slot.offset for lease in self._leases.values() for slot in lease.slots)
