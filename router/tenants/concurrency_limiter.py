"""How many of one tenant's requests may be under way at one router."""

from router.tenants.quota_share import QuotaShare
from router.tenants.quota_store import LEASE_SECONDS, SlotRequest

SLOT_PREFETCH_DIVISOR = 4
"""All routers together hold at most one part in so many of a limit without using it."""

SLOT_REJECTION_TTL_SECONDS = 0.1
"""A refusal is believed for so long."""

LEASE_RENEWAL_SECONDS = LEASE_SECONDS / 4


class ConcurrencyLimiter:
    """Single event loop, synchronous. In common with other routers it takes seats from the
    treasury, on a lease, and gives back those that are not used; by itself it has its part."""

    __slots__ = ("_ahead", "_held", "_refused_at", "_told_at", "_used", "running")

    def __init__(self) -> None:
        self.running = 0
        self._held = 0
        self._ahead = 0
        """Seats that it would have beyond those in use."""
        self._used = False
        self._told_at = float("-inf")
        self._refused_at = float("-inf")

    def covers(self, limit: int, share: QuotaShare, now: float) -> bool:
        """Whether one more may come."""
        if not share.is_common:
            return self.running < share.part(limit)
        return self.running < self._held and now < self._told_at + LEASE_SECONDS

    def take(self) -> None:
        self.running += 1
        self._used = self._used or self.running + self._ahead > self._held

    def give(self) -> None:
        self.running -= 1
        assert self.running >= 0, "take() comes first"

    # -- with the treasury --------------------------------------------------------------------

    def asks(self, limit: int, share: QuotaShare, now: float, *, again: bool) -> bool:
        """Whether the treasury may have one more. ``again``: although it had none just now."""
        trusted = not again and now < self._refused_at + SLOT_REJECTION_TTL_SECONDS
        return not trusted and not self.covers(limit, share, now)

    def one_more(self, limit: int, share: QuotaShare) -> SlotRequest:
        self._ahead = min(
            max(2 * self._ahead, 1), limit // (SLOT_PREFETCH_DIVISOR * share.num_routers)
        )
        return SlotRequest(limit, self.running, self.running + 1 + self._ahead)

    def upkeep(
        self, limit: int, share: QuotaShare, now: float, *, is_turn: bool
    ) -> SlotRequest | None:
        """In the background: gives back what is not used, and renews the lease."""
        if is_turn:
            self._ahead = self._ahead if self._used else self._ahead // 2
            self._used = False
        self._ahead = min(self._ahead, limit // (SLOT_PREFETCH_DIVISOR * share.num_routers))
        wanted = self.running + self._ahead
        renews = is_turn and self._held > 0 and now >= self._told_at + LEASE_RENEWAL_SECONDS
        if self._held <= wanted and not renews:
            return None
        # At once: whoever comes while the treasury is told must not sit on what is given back.
        self._held = min(self._held, wanted)
        return SlotRequest(limit, self.running, self._held)

    def note(self, hold: SlotRequest, seats: int, now: float) -> None:
        """The treasury has done what it was asked last."""
        self._held, self._told_at = seats, now
        if hold.wanted > hold.running:
            self._refused_at = now if self.running >= seats else float("-inf")

    @property
    def has_any(self) -> bool:
        """That nobody sits on."""
        return self.running < self._held

    @property
    def has_surplus(self) -> bool:
        return self._held > self.running + self._ahead

    @property
    def is_empty(self) -> bool:
        return self._held == self.running == 0
