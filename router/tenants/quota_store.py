"""The quota store, which all routers share. It knows how many requests and tokens of each tenant
may still be admitted, and how many requests may run at once. Each router draws quota from the store
in advance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.ids import TenantId

LEASE_SECONDS = 10.0
"""If a router has not sent an exchange for a tenant for this long, its slots become free."""

CONTENTION_SECONDS = 3.0
"""A router that drew quota within this time may draw again soon, so a part of the limit
(``RESERVE_DIVISOR``) is kept for it."""

RESERVE_DIVISOR = 10
"""While several routers draw quota, ``limit / RESERVE_DIVISOR`` is withheld from routers that have
drawn their equal part already, so that a flood at one router leaves quota for the others."""

ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class RateRequest:
    """A router's request for a part of one of a tenant's limits per minute. First, ``settled`` is
    charged: the amount that was used without having been drawn, minus the amount that was drawn and
    not used. Then at least ``min_amount`` is drawn, and up to ``max_amount`` if enough is left.
    Nothing is drawn if ``min_amount`` is not available."""

    per_minute: int
    settled: int = 0
    min_amount: int = 0
    max_amount: int = 0


@dataclass(frozen=True, slots=True)
class RateGrant:
    """The answer to a RateRequest. ``granted`` is the amount that was drawn. ``remaining`` is the
    amount that this router could still draw; it is below zero if more was used than allowed."""

    granted: int = 0
    remaining: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A router's request for slots under a limit on concurrent requests. ``num_running`` requests
    are running at the router. ``num_wanted`` is the total number of slots that it wants, for these
    requests and for the next ones. Idempotent."""

    limit: int
    num_running: int
    num_wanted: int


@dataclass(frozen=True, slots=True)
class QuotaRequest:
    """One router's request for one tenant. A field is None if the tenant has no such limit, or if
    the router has nothing to request under this limit."""

    tenant: TenantId
    num_routers: int
    requests: RateRequest | None = None
    tokens: RateRequest | None = None
    slots: SlotRequest | None = None

    @property
    def requests_more(self) -> bool:
        """Whether the request asks for more quota, rather than only settling or returning some."""
        rates = (self.requests, self.tokens)
        wants_rate = any(rate is not None and rate.max_amount > 0 for rate in rates)
        return wants_rate or (
            self.slots is not None and self.slots.num_wanted > self.slots.num_running
        )


@dataclass(frozen=True, slots=True)
class QuotaGrant:
    """The answer to a QuotaRequest. ``num_slots`` is the number of slots that the router now has
    in total."""

    requests: RateGrant = RateGrant()
    tokens: RateGrant = RateGrant()
    num_slots: int = 0


class QuotaStore(Protocol):
    """Grants each router a share of each tenant's limits. Methods raise Unavailable if the store
    can't be reached or does not answer. An exchange that raises Unavailable may have taken place
    nevertheless."""

    async def exchange(self, router: str, requests: Sequence[QuotaRequest]) -> list[QuotaGrant]:
        """Process the requests in order and return their grants. Each request is processed
        completely, or not at all."""
        ...

    async def ping(self) -> None: ...
