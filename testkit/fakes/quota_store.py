"""An in-memory quota store."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.core.ids import TenantId
from baton.errors import Unavailable
from router.tenants.leaky_bucket import LeakyBucket
from router.tenants.quota_store import (
    CONTENTION_SECONDS,
    LEASE_SECONDS,
    RESERVE_DIVISOR,
    ROUNDING,
    QuotaGrant,
    QuotaRequest,
    RateGrant,
    RateRequest,
)


@dataclass(slots=True)
class _RouterState:
    """One router's use of one tenant's limits. ``seen_at`` is the time of the router's last message
    about the tenant: a request for quota, or a report of what it used or gave back. ``drew_at`` is
    the time of its last request for quota."""

    seen_at: float = float("-inf")
    drew_at: float = float("-inf")
    num_slots: int = 0
    buckets: dict[str, LeakyBucket] = field(default_factory=dict)


@dataclass(slots=True)
class _TenantState:
    """One tenant's use of its limits: a bucket per limit for all routers together, and the state of
    each router."""

    buckets: dict[str, LeakyBucket] = field(default_factory=dict)
    routers: dict[str, _RouterState] = field(default_factory=dict)


class MemoryQuotaStore:
    """Implements :class:`router.tenants.quota_store.QuotaStore`. If ``is_reachable`` is False,
    requests don't arrive. If ``drops_replies`` is True, requests are processed, but not
    confirmed."""

    def __init__(self, clock: Clock) -> None:
        self.is_reachable = True
        self.drops_replies = False
        self.num_exchanges = 0
        self._clock = clock
        self._states: dict[TenantId, _TenantState] = {}

    async def exchange(self, router: str, requests: Sequence[QuotaRequest]) -> list[QuotaGrant]:
        await self.ping()
        self.num_exchanges += len(requests)
        grants = [self._grant(router, request) for request in requests]
        if self.drops_replies:
            raise Unavailable("the quota store did not answer")
        return grants

    async def ping(self) -> None:
        if not self.is_reachable:
            raise Unavailable("the quota store is unreachable")

    def _grant(self, router: str, request: QuotaRequest) -> QuotaGrant:
        now = self._clock.monotonic()
        state = self._states.setdefault(request.tenant, _TenantState())
        own_state = state.routers.setdefault(router, _RouterState())
        own_state.seen_at = now
        for name in [n for n, each in state.routers.items() if now - each.seen_at > LEASE_SECONDS]:
            del state.routers[name]
        others = [each for name, each in state.routers.items() if name != router]
        contested = any(now - each.drew_at <= CONTENTION_SECONDS for each in others)
        num_routers = request.num_routers
        grant = QuotaGrant(
            self._draw(state, own_state, "requests", request.requests, num_routers, contested),
            self._draw(state, own_state, "tokens", request.tokens, num_routers, contested),
            _grant_slots(own_state, sum(each.num_slots for each in others), request, contested),
        )
        own_state.drew_at = now if request.requests_more else own_state.drew_at
        return grant

    def _draw(
        self,
        tenant_state: _TenantState,
        own_state: _RouterState,
        name: str,
        request: RateRequest | None,
        num_routers: int,
        contested: bool,
    ) -> RateGrant:
        if request is None:
            return RateGrant()
        now, limit = self._clock.monotonic(), request.per_minute
        share = limit / num_routers
        shared_bucket = tenant_state.buckets.setdefault(name, LeakyBucket())
        own_bucket = own_state.buckets.setdefault(name, LeakyBucket())
        shared_bucket.remaining(limit, now)
        shared_bucket.spend(request.settled)
        had_share = own_bucket.remaining(share, now) <= 0
        own_bucket.spend(request.settled)
        remaining = shared_bucket.remaining(limit, now)
        remaining -= limit / RESERVE_DIVISOR if contested and had_share else 0.0
        granted = 0
        if remaining + ROUNDING >= request.min_amount:
            spare = int(max(remaining - request.min_amount, 0.0) / (2 * num_routers))
            granted = request.min_amount + min(request.max_amount - request.min_amount, spare)
        shared_bucket.spend(granted)
        own_bucket.spend(granted)
        return RateGrant(granted, remaining - granted)


def _grant_slots(
    own_state: _RouterState, others: int, request: QuotaRequest, contested: bool
) -> int:
    slots = request.slots
    if slots is None:
        return 0
    free = slots.limit - others
    if contested and slots.num_running * request.num_routers >= slots.limit:
        free -= slots.limit // RESERVE_DIVISOR
    own_state.num_slots = max(slots.num_running, min(slots.num_wanted, free))
    return own_state.num_slots
