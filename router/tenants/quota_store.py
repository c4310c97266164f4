"""What all routers together may still let in of a tenant's requests: kept in one place, from which
each draws ahead of what it needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.errors import Unavailable
from router.tenants.leaky_bucket import LeakyBucket

LEASE_SECONDS = 10.0
"""A router that says nothing for so long holds no seats any more."""

CONTENTION_SECONDS = 3.0
"""A router that drew so long ago may come again: a part is kept for it."""

RESERVE_DIVISOR = 10
"""One part in so many of a limit is kept from who has drawn its equal part already, while others
draw, too: a flood at one router leaves room at the others."""

ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class RateRequest:
    """Of a limit per minute. ``settled`` comes first: used without having been drawn, or, below
    zero, drawn and not used. Then ``least`` or nothing is drawn, up to ``most`` if there is plenty.
    """

    per_minute: int
    settled: int = 0
    least: int = 0
    most: int = 0


@dataclass(frozen=True, slots=True)
class RateGrant:
    """``left`` is what this router could still draw; below zero while more was used."""

    granted: int = 0
    left: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """Of requests at once: how many are ``running`` here, and how many seats are ``wanted`` for
    them and the next ones. To say it twice changes nothing."""

    limit: int
    running: int
    wanted: int


@dataclass(frozen=True, slots=True)
class QuotaRequest:
    """One router's, of one tenant. None: not limited so."""

    tenant: TenantId
    num_routers: int
    requests: RateRequest | None = None
    tokens: RateRequest | None = None
    hold: SlotRequest | None = None

    @property
    def draws(self) -> bool:
        """Whether it wants more than there is at the router."""
        drawn = any(draw is not None and draw.most > 0 for draw in (self.requests, self.tokens))
        return drawn or (self.hold is not None and self.hold.wanted > self.hold.running)


@dataclass(frozen=True, slots=True)
class QuotaGrant:
    requests: RateGrant = RateGrant()
    tokens: RateGrant = RateGrant()
    seats: int = 0


class QuotaStore(Protocol):
    """Methods raise Unavailable. What was asked may have been done then."""

    async def exchange(self, router: str, asks: Sequence[QuotaRequest]) -> list[QuotaGrant]:
        """In their order; each is done whole, or not at all."""
        ...

    async def ping(self) -> None: ...


@dataclass(slots=True)
class _RouterState:
    """What is known of one router: when it last said anything, and drew."""

    seen_at: float = float("-inf")
    drew_at: float = float("-inf")
    seats: int = 0
    meters: dict[str, LeakyBucket] = field(default_factory=dict)


@dataclass(slots=True)
class _TenantState:
    """One tenant's."""

    meters: dict[str, LeakyBucket] = field(default_factory=dict)
    routers: dict[str, _RouterState] = field(default_factory=dict)


class MemoryQuotaStore:
    """The twin of the one in Redis. ``reachable`` False: nothing arrives; ``deaf``: what arrives is
    done, and not confirmed."""

    def __init__(self, clock: Clock) -> None:
        self.reachable = True
        self.deaf = False
        self.num_exchanges = 0
        self._clock = clock
        self._tills: dict[TenantId, _TenantState] = {}

    async def exchange(self, router: str, asks: Sequence[QuotaRequest]) -> list[QuotaGrant]:
        await self.ping()
        self.num_exchanges += len(asks)
        grants = [self._grant(router, ask) for ask in asks]
        if self.deaf:
            raise Unavailable("no answer")
        return grants

    async def ping(self) -> None:
        if not self.reachable:
            raise Unavailable("the treasury is gone")

    def _grant(self, router: str, ask: QuotaRequest) -> QuotaGrant:
        now = self._clock.monotonic()
        till = self._tills.setdefault(ask.tenant, _TenantState())
        me = till.routers.setdefault(router, _RouterState())
        me.seen_at = now
        for name in [n for n, each in till.routers.items() if now - each.seen_at > LEASE_SECONDS]:
            del till.routers[name]
        others = [each for name, each in till.routers.items() if name != router]
        contested = any(now - each.drew_at <= CONTENTION_SECONDS for each in others)
        grant = QuotaGrant(
            self._draw(till, me, "requests", ask.requests, ask.num_routers, contested),
            self._draw(till, me, "tokens", ask.tokens, ask.num_routers, contested),
            _grant_slots(me, sum(each.seats for each in others), ask, contested),
        )
        me.drew_at = now if ask.draws else me.drew_at
        return grant

    def _draw(
        self,
        till: _TenantState,
        me: _RouterState,
        name: str,
        draw: RateRequest | None,
        routers: int,
        contested: bool,
    ) -> RateGrant:
        if draw is None:
            return RateGrant()
        now, limit = self._clock.monotonic(), draw.per_minute
        share = limit / routers
        common = till.meters.setdefault(name, LeakyBucket())
        own = me.meters.setdefault(name, LeakyBucket())
        common.remaining(limit, now)
        common.spend(draw.settled)
        had_share = own.remaining(share, now) <= 0
        own.spend(draw.settled)
        left = common.remaining(limit, now)
        left -= limit / RESERVE_DIVISOR if contested and had_share else 0.0
        granted = 0
        if left + ROUNDING >= draw.least:
            spare = int(max(left - draw.least, 0.0) / (2 * routers))
            granted = draw.least + min(draw.most - draw.least, spare)
        common.spend(granted)
        own.spend(granted)
        return RateGrant(granted, left - granted)


def _grant_slots(me: _RouterState, others: int, ask: QuotaRequest, contested: bool) -> int:
    hold = ask.hold
    if hold is None:
        return 0
    free = hold.limit - others
    if contested and hold.running * ask.num_routers >= hold.limit:
        free -= hold.limit // RESERVE_DIVISOR
    me.seats = max(hold.running, min(hold.wanted, free))
    return me.seats
