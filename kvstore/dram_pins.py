"""Pins of blocks in DRAM: a pinned block is not evicted until its pin expires."""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from baton.errors import Invalid, Overloaded
from kvstore.dram_block import BlockReferences, DramBlock
from kvstore.limits import MAX_PIN_SECONDS, MAX_PINNED_SHARE


class DramPins:
    """The pinned blocks. All pins of a block together hold one reference."""

    def __init__(
        self, references: BlockReferences, arena_bytes: int, tenant_bytes: int | None
    ) -> None:
        """``tenant_bytes`` is each tenant's quota; None for no quota."""
        self.num_bytes = 0
        self._references = references
        self._arena_bytes = arena_bytes
        self._tenant_bytes = tenant_bytes
        self._bytes_of_tenant: Counter[bytes] = Counter()
        self._checks: list[tuple[float, int, DramBlock]] = []
        """A heap of (time of the next expiry check, a unique number as tie-breaker, slot)."""
        self._num_checks = 0

    def pin(self, slots: Sequence[DramBlock], seconds: float, now: float) -> None:
        """Pin the sealed blocks of one prefix for ``seconds``. If a block is already pinned, only
        its time is extended, and its bytes count once. Raises Invalid if ``seconds`` is out of
        range, and Overloaded if too many bytes are pinned."""
        if not 0 < seconds <= MAX_PIN_SECONDS:
            raise Invalid(
                f"a pin of {seconds:g} s was requested; it must last more than 0 and up to "
                f"{MAX_PIN_SECONDS:g} s"
            )
        fresh = [slot for slot in dict.fromkeys(slots) if not slot.pinned_until]
        self._check_limits(fresh)
        for slot in fresh:
            self._references.add_reference(slot)
            self.num_bytes += slot.slot_bytes
            self._bytes_of_tenant[slot.tenant] += slot.slot_bytes
            self._schedule_check(slot, now + seconds)
        for slot in slots:
            slot.pinned_until = max(slot.pinned_until, now + seconds)

    def unpin(self, slots: Sequence[DramBlock]) -> None:
        """Unpin pinned blocks, given in prefix order."""
        for slot in slots:
            slot.pinned_until = 0.0
            self.num_bytes -= slot.slot_bytes
            self._bytes_of_tenant[slot.tenant] -= slot.slot_bytes
            if not self._bytes_of_tenant[slot.tenant]:
                del self._bytes_of_tenant[slot.tenant]
        self._references.release_references(slots)

    def expire(self, now: float) -> None:
        """End the pins that have expired."""
        expired: list[DramBlock] = []
        while self._checks and self._checks[0][0] <= now:
            slot = heappop(self._checks)[2]
            if slot.pinned_until > now:
                self._schedule_check(slot, slot.pinned_until)
            elif slot.pinned_until:
                expired.append(slot)
        if expired:
            self.unpin(sorted(expired, key=_depth))

    def check_integrity(self, slots: Iterable[DramBlock]) -> None:
        """Raise AssertionError unless the pins are those of ``slots``, which are all blocks."""
        pinned = [slot for slot in slots if slot.pinned_until]
        assert sum(slot.slot_bytes for slot in pinned) == self.num_bytes, "pinned bytes"
        of_tenant: Counter[bytes] = Counter()
        for slot in pinned:
            of_tenant[slot.tenant] += slot.slot_bytes
        assert of_tenant == self._bytes_of_tenant, "pinned bytes of tenants"
        checked = {id(slot) for _, _, slot in self._checks}
        assert {id(slot) for slot in pinned} <= checked, "pins that stay"

    def _check_limits(self, fresh: Sequence[DramBlock]) -> None:
        """Raise Overloaded if pinning the blocks ``fresh`` would exceed the limit of pinned bytes,
        either in total or for their tenant."""
        size = sum(slot.slot_bytes for slot in fresh)
        if self.num_bytes + size > MAX_PINNED_SHARE * self._arena_bytes:
            raise Overloaded(
                f"{self.num_bytes} bytes are already pinned; at most {MAX_PINNED_SHARE:.0%} of "
                "the arena may be pinned"
            )
        if self._tenant_bytes is None or not fresh:
            return
        pinned = self._bytes_of_tenant[fresh[0].tenant]
        if pinned + size > MAX_PINNED_SHARE * self._tenant_bytes:
            raise Overloaded(
                f"the tenant has pinned {pinned} bytes; at most {MAX_PINNED_SHARE:.0%} of its "
                "quota may be pinned"
            )

    def _schedule_check(self, slot: DramBlock, at: float) -> None:
        self._num_checks += 1
        heappush(self._checks, (at, self._num_checks, slot))


def _depth(slot: DramBlock) -> int:
    return slot.depth
