"""What one router has of one tenant's limit per minute, to spend at once."""

from router.tenants.leaky_bucket import LeakyBucket
from router.tenants.quota_share import QuotaShare
from router.tenants.quota_store import ROUNDING, RateGrant, RateRequest

PREFETCH_DIVISOR = 10
"""All routers together have at most one part in so many of a limit drawn and not spent: by so much
more than the limit may be spent at once, since the treasury fills up again meanwhile."""

REJECTION_TTL_SECONDS = 0.25
"""A refusal is believed for so long: a flood is not asked about once each. Others may give back
what they have drawn."""

MIN_WAIT_SECONDS = 0.05


class RateLimiter:
    """Single event loop, synchronous; times are the caller's, monotonic seconds.

    In common with other routers it holds credits, drawn ahead from the treasury: twice as many when
    they run out too soon, half as many when they are not used. By itself it gives its router's
    part of the limit, and what was spent so is settled with the treasury later.
    """

    __slots__ = (
        "_ahead",
        "_credits",
        "_filled",
        "_left",
        "_left_at",
        "_meter",
        "_returning",
        "_telling",
        "_untold",
        "_used",
    )

    def __init__(self) -> None:
        self._meter = LeakyBucket()
        """All that was spent here: the measure while it is by itself."""
        self._untold = LeakyBucket()
        """Spent, and not known to the treasury."""
        self._telling = 0
        """Of it, what is on its way there."""
        self._credits = 0
        """Below zero: more was used than had been promised."""
        self._returning = 0
        self._ahead = 0
        """Credits that it would have beyond those asked for."""
        self._used = self._filled = False
        """Since the last turn: by requests, and from the treasury."""
        self._left, self._left_at = float("inf"), 0.0

    def covers(self, amount: int, limit: int, share: QuotaShare, now: float) -> bool:
        """Whether ``amount`` may be spent now."""
        if share.is_common:
            return self._credits >= amount
        return self._meter.wait_seconds(amount, share.part(limit), now) == 0

    def wait_seconds(self, amount: int, limit: int, share: QuotaShare, now: float) -> float:
        """Until ``amount`` may be spent, as far as is known here; 0 if it may be now, or if the
        treasury may have it."""
        if not share.is_common:
            return self._meter.wait_seconds(amount, share.part(limit), now)
        lacking = min(amount, limit) - self.remaining(limit, share, now)
        return lacking * 60 / limit if lacking > ROUNDING else 0.0

    def remaining(self, limit: int, share: QuotaShare, now: float) -> float:
        """Of the limit that clients are told, as far as is known here."""
        if not share.is_common:
            return self._meter.remaining(share.part(limit), now)
        left = self._left + (now - self._left_at) * limit / 60
        return min(left + self._credits, limit)

    def spend(self, amount: int, limit: int, share: QuotaShare, now: float) -> None:
        """Below zero: gives back."""
        self._meter.remaining(share.part(limit), now)
        self._meter.spend(amount)
        self._used = True
        if not share.is_common:
            self._untold.remaining(limit, now)
            self._untold.spend(amount)
            return
        self._credits -= amount
        surplus = self._credits - max_prefetched(limit, share)
        if surplus > 0:
            self._credits -= surplus
            self._returning += surplus

    # -- with the treasury --------------------------------------------------------------------

    def asks_for(self, amount: int, limit: int, share: QuotaShare, now: float) -> bool:
        """Whether the treasury may have what is lacking here."""
        if self.covers(amount, limit, share, now):
            return False
        is_fresh = now - self._left_at < REJECTION_TTL_SECONDS
        return not (is_fresh and self.wait_seconds(amount, limit, share, now) > 0)

    def draw(self, amount: int, limit: int, share: QuotaShare, now: float) -> RateRequest:
        """So that ``amount`` can be spent, and something is left for those who come next."""
        self._ahead = min(max(2 * self._ahead, amount), max_prefetched(limit, share))
        settled = self._settled(limit, now)
        least = max(amount - self._credits, 0)
        return RateRequest(limit, settled, least, least + self._ahead)

    def look(self, limit: int, now: float) -> RateRequest:
        """Nothing but what is left."""
        return RateRequest(limit, self._settled(limit, now))

    def upkeep(
        self, limit: int, share: QuotaShare, now: float, *, is_turn: bool
    ) -> RateRequest | None:
        """In the background: fills up, gives back what is not used, and settles. ``is_turn``: it is
        time to look whether anything is. None if there is nothing to say."""
        low = self.runs_low(limit, share, now)
        if is_turn:
            self._ahead = self._ahead if self._used else self._ahead // 2
            self._used = self._filled = False
        if low:
            self._ahead = 2 * self._ahead if self._filled else self._ahead
            self._filled = True
        self._ahead = min(self._ahead, max_prefetched(limit, share))
        surplus = self._credits - self._ahead
        if is_turn and surplus > 0:
            self._credits -= surplus
            self._returning += surplus
        settled = self._settled(limit, now)
        most = max(self._ahead - self._credits, 0) if low else 0
        return RateRequest(limit, settled, 0, most) if settled or most else None

    def note(self, drawn: RateGrant, now: float) -> None:
        """The treasury has done what it was asked last."""
        self._untold.spend(-self._telling)
        self._telling = 0
        self._credits += drawn.granted
        self._left, self._left_at = drawn.left, now

    def runs_low(self, limit: int, share: QuotaShare, now: float) -> bool:
        """And there is enough for all to draw ahead."""
        if 2 * self._credits >= self._ahead:
            return False
        return self._left + (now - self._left_at) * limit / 60 >= 2 * share.num_routers

    @property
    def is_empty(self) -> bool:
        """Whether the treasury need not hear of it before it is used again."""
        return self._credits == self._ahead == self._returning == 0

    def _settled(self, limit: int, now: float) -> int:
        """To be asked for by one exchange at a time. What is given back is forgotten here: if it is
        lost on its way, it drains there all the same."""
        if self._credits < 0:
            self._untold.spend(-self._credits)
            self._credits = 0
        self._telling = round(self._untold.spent(limit, now))
        returning, self._returning = self._returning, 0
        return self._telling - returning


def max_prefetched(limit: int, share: QuotaShare) -> int:
    return limit // (PREFETCH_DIVISOR * share.num_routers)
