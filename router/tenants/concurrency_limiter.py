"""Limits how many requests of one tenant run at once at this router.

Existing limiters either limit one process (``asyncio.Semaphore``, which also makes requests wait
that should get a 429) or query Redis for every request. Here, a router leases slots in advance and
decides without waiting. If two routers share a tenant's limits, checking them takes 36 us of CPU
time per request, and 20,000 requests take 47 exchanges with Redis (docs/results/tenants.md)."""

from router.tenants.quota_share import QuotaShare
from router.tenants.quota_store import LEASE_SECONDS, SlotRequest

SLOT_PREFETCH_DIVISOR = 4
"""All routers together hold at most ``limit / SLOT_PREFETCH_DIVISOR`` unused slots."""

SLOT_REJECTION_TTL_SECONDS = 0.1
"""After the quota store had no free slot, it is not queried again for this long."""

LEASE_RENEWAL_SECONDS = LEASE_SECONDS / 4


class ConcurrencyLimiter:
    """One tenant's limit on concurrent requests. If routers share the limit, this router leases
    slots from the quota store and returns unused ones; otherwise it has an equal part of the limit.
    Not thread-safe; no method waits."""

    __slots__ = (
        "_granted_at",
        "_has_used_prefetch",
        "_num_prefetch",
        "_num_slots",
        "_refused_at",
        "num_running",
    )

    def __init__(self) -> None:
        self.num_running = 0
        self._num_slots = 0
        self._num_prefetch = 0
        """The number of slots to hold beyond those in use."""
        self._has_used_prefetch = False
        self._granted_at = float("-inf")
        self._refused_at = float("-inf")

    def can_begin(self, limit: int, share: QuotaShare, now: float) -> bool:
        """Whether one more request may run."""
        if not share.is_shared:
            return self.num_running < share.equal_part(limit)
        return self.num_running < self._num_slots and now < self._granted_at + LEASE_SECONDS

    def begin(self) -> None:
        self.num_running += 1
        self._has_used_prefetch = (
            self._has_used_prefetch or self.num_running + self._num_prefetch > self._num_slots
        )

    def end(self) -> None:
        self.num_running -= 1
        assert self.num_running >= 0, "begin() comes first"

    # -- exchanges with the quota store -------------------------------------------------------

    def should_request_slot(
        self, limit: int, share: QuotaShare, now: float, *, again: bool
    ) -> bool:
        """Whether to request one more slot from the quota store. If ``again`` is True, request a
        slot even if the store has just refused one."""
        trusted = not again and now < self._refused_at + SLOT_REJECTION_TTL_SECONDS
        return not trusted and not self.can_begin(limit, share, now)

    def build_slot_request(self, limit: int, share: QuotaShare) -> SlotRequest:
        self._num_prefetch = min(
            max(2 * self._num_prefetch, 1), limit // (SLOT_PREFETCH_DIVISOR * share.num_routers)
        )
        return SlotRequest(limit, self.num_running, self.num_running + 1 + self._num_prefetch)

    def build_maintenance_request(
        self, limit: int, share: QuotaShare, now: float, *, is_turn: bool
    ) -> SlotRequest | None:
        """Build the request, sent in the background, that returns unused slots and renews the
        lease; None if there is nothing to do. ``is_turn`` is True in the periodic exchange with the
        quota store. It is False in an early exchange, for which a request is built only if there
        are unused slots to return."""
        if is_turn:
            self._num_prefetch = (
                self._num_prefetch if self._has_used_prefetch else self._num_prefetch // 2
            )
            self._has_used_prefetch = False
        self._num_prefetch = min(
            self._num_prefetch, limit // (SLOT_PREFETCH_DIVISOR * share.num_routers)
        )
        wanted = self.num_running + self._num_prefetch
        renews = is_turn and self._num_slots > 0 and now >= self._granted_at + LEASE_RENEWAL_SECONDS
        if self._num_slots <= wanted and not renews:
            return None
        # Lowered before the exchange, so that no request uses a slot that is being returned.
        self._num_slots = min(self._num_slots, wanted)
        return SlotRequest(limit, self.num_running, self._num_slots)

    def record_grant(self, request: SlotRequest, granted_slots: int, now: float) -> None:
        """Record the quota store's answer to the last request."""
        self._num_slots, self._granted_at = granted_slots, now
        if request.num_wanted > request.num_running:
            self._refused_at = now if self.num_running >= granted_slots else float("-inf")

    @property
    def has_free_slot(self) -> bool:
        """Whether this router holds a slot that is not in use."""
        return self.num_running < self._num_slots

    @property
    def has_surplus(self) -> bool:
        """Whether this router holds more slots than the slots in use plus the slots that it keeps
        in reserve."""
        return self._num_slots > self.num_running + self._num_prefetch

    @property
    def is_empty(self) -> bool:
        return self._num_slots == self.num_running == 0
