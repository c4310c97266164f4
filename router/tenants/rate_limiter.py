"""Limits one tenant's requests or tokens per minute at this router."""

from router.tenants.leaky_bucket import LeakyBucket
from router.tenants.quota_share import QuotaShare
from router.tenants.quota_store import ROUNDING, RateGrant, RateRequest

PREFETCH_DIVISOR = 10
"""All routers together hold at most ``limit / PREFETCH_DIVISOR`` as unspent credits. They can
exceed the limit by that much within a minute, since the store refills meanwhile."""

REJECTION_TTL_SECONDS = 0.25
"""After the store has refused credits, it is not queried again for this long, so that a flood does
not cause one query per request. Later, other routers may have returned credits."""

MIN_WAIT_SECONDS = 0.05
"""The shortest waiting time that a refusal reports."""


class RateLimiter:
    """One limit per minute of one tenant. Not thread-safe; no method waits; ``now`` is in monotonic
    seconds.

    If routers share the limit, the limiter draws credits (requests or tokens that may be spent)
    from the quota store in advance. If the credits run out too soon, it draws twice as many the
    next time; if they are not used, half as many. While the routers can't share the limit, the
    limiter uses this router's equal part of it. What is spent without credits is later settled:
    reported to the store, which charges it.
    """

    __slots__ = (
        "_bucket",
        "_credits",
        "_prefetch",
        "_returning",
        "_settling",
        "_store_remaining",
        "_store_remaining_at",
        "_unsettled",
        "_was_refilled",
        "_was_used",
    )

    def __init__(self) -> None:
        self._bucket = LeakyBucket()
        """The amount that was spent at this router. While routers do not share the limit through
        the quota store, this bucket decides."""
        self._unsettled = LeakyBucket()
        """The amount that was spent and is not charged in the quota store yet."""
        self._settling = 0
        """The part of ``_unsettled`` that the exchange in progress settles."""
        self._credits = 0
        """Credits drawn from the store and not spent yet. Below zero if more was used than
        reserved."""
        self._returning = 0
        self._prefetch = 0
        """The number of credits to hold beyond those that a request needs."""
        self._was_used = self._was_refilled = False
        """Whether credits were used, and whether they were refilled, since the last regular
        exchange."""
        self._store_remaining, self._store_remaining_at = float("inf"), 0.0

    def can_spend(self, amount: int, limit: int, share: QuotaShare, now: float) -> bool:
        """Whether ``amount`` may be spent now."""
        if share.is_shared:
            return self._credits >= amount
        return self._bucket.wait_seconds(amount, share.equal_part(limit), now) == 0

    def wait_seconds(self, amount: int, limit: int, share: QuotaShare, now: float) -> float:
        """Return the seconds until ``amount`` may be spent, as far as this router knows; 0 if it
        may be spent now, or if the quota store may have enough left."""
        if not share.is_shared:
            return self._bucket.wait_seconds(amount, share.equal_part(limit), now)
        missing = min(amount, limit) - self.remaining(limit, share, now)
        return missing * 60 / limit if missing > ROUNDING else 0.0

    def remaining(self, limit: int, share: QuotaShare, now: float) -> float:
        """Return how much of the limit that clients see (:meth:`QuotaShare.reported_limit`) is
        left, as far as this router knows."""
        if not share.is_shared:
            return self._bucket.remaining(share.equal_part(limit), now)
        store_remaining = self._store_remaining + (now - self._store_remaining_at) * limit / 60
        return min(store_remaining + self._credits, limit)

    def spend(self, amount: int, limit: int, share: QuotaShare, now: float) -> None:
        """Spend an amount; a negative amount gives unused quota back."""
        self._bucket.remaining(share.equal_part(limit), now)
        self._bucket.spend(amount)
        self._was_used = True
        if not share.is_shared:
            self._unsettled.remaining(limit, now)
            self._unsettled.spend(amount)
            return
        self._credits -= amount
        surplus = self._credits - max_prefetched(limit, share)
        if surplus > 0:
            self._credits -= surplus
            self._returning += surplus

    # -- exchanges with the quota store -------------------------------------------------------

    def should_request(self, amount: int, limit: int, share: QuotaShare, now: float) -> bool:
        """Whether this router has too few credits for ``amount``, and the quota store may have
        more."""
        if self.can_spend(amount, limit, share, now):
            return False
        is_fresh = now - self._store_remaining_at < REJECTION_TTL_SECONDS
        return not (is_fresh and self.wait_seconds(amount, limit, share, now) > 0)

    def build_request(self, amount: int, limit: int, share: QuotaShare, now: float) -> RateRequest:
        """Build a request for enough credits to spend ``amount``, and if possible some more for the
        next requests."""
        self._prefetch = min(max(2 * self._prefetch, amount), max_prefetched(limit, share))
        settled = self._take_settlement(limit, now)
        least = max(amount - self._credits, 0)
        return RateRequest(limit, settled, least, least + self._prefetch)

    def build_query(self, limit: int, now: float) -> RateRequest:
        """Build a request that settles what was spent and asks for the remaining amount, but draws
        no credits."""
        return RateRequest(limit, self._take_settlement(limit, now))

    def build_maintenance_request(
        self, limit: int, share: QuotaShare, now: float, *, is_turn: bool
    ) -> RateRequest | None:
        """Build a request, sent in the background, that settles what was spent and draws credits if
        few are left; None if there is nothing to do. ``is_turn`` is True in the periodic exchange
        with the quota store, which also returns unused credits, and False in an early exchange."""
        low = self.needs_refill(limit, share, now)
        if is_turn:
            self._prefetch = self._prefetch if self._was_used else self._prefetch // 2
            self._was_used = self._was_refilled = False
        if low:
            self._prefetch = 2 * self._prefetch if self._was_refilled else self._prefetch
            self._was_refilled = True
        self._prefetch = min(self._prefetch, max_prefetched(limit, share))
        surplus = self._credits - self._prefetch
        if is_turn and surplus > 0:
            self._credits -= surplus
            self._returning += surplus
        settled = self._take_settlement(limit, now)
        most = max(self._prefetch - self._credits, 0) if low else 0
        return RateRequest(limit, settled, 0, most) if settled or most else None

    def record_grant(self, grant: RateGrant, now: float) -> None:
        """Record the quota store's answer to the last request."""
        self._unsettled.spend(-self._settling)
        self._settling = 0
        self._credits += grant.granted
        self._store_remaining, self._store_remaining_at = grant.remaining, now

    def needs_refill(self, limit: int, share: QuotaShare, now: float) -> bool:
        """Whether few credits are left here, and the store has enough for every router to draw some
        in advance."""
        if 2 * self._credits >= self._prefetch:
            return False
        return (
            self._store_remaining + (now - self._store_remaining_at) * limit / 60
            >= 2 * share.num_routers
        )

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to exchange with the quota store before the next request."""
        return self._credits == self._prefetch == self._returning == 0

    def _take_settlement(self, limit: int, now: float) -> int:
        """Return the ``settled`` amount of the next request: what was spent and is not charged yet,
        less the credits to be returned. Only one exchange may run at a time. The returned credits
        are dropped here even if the exchange fails; the store then counts them as spent for up to a
        minute, until its bucket has drained."""
        if self._credits < 0:
            self._unsettled.spend(-self._credits)
            self._credits = 0
        self._settling = round(self._unsettled.spent(limit, now))
        returning, self._returning = self._returning, 0
        return self._settling - returning


def max_prefetched(limit: int, share: QuotaShare) -> int:
    """Return the maximum number of unspent credits that one router may hold."""
    return limit // (PREFETCH_DIVISOR * share.num_routers)
