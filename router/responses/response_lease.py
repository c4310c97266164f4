"""Leases of background responses: they tell every router whether the router that generates a
response is alive, and carry cancellations to it."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from baton.core.ids import TenantId

LEASE_SECONDS = 15.0
"""A router that has not renewed a lease for this long counts as dead. This is several times as long
as a slow Redis can delay a renewal (:data:`baton.registry.redis_client.TIMEOUT_SECONDS`)."""

RENEWAL_SECONDS = 1.0
"""How often a router renews its leases, all of them in one call. The reply contains cancellations,
so another router's cancellation also takes up to this long."""

ENDED_SECONDS = 86_400.0
"""How long a lease that another router has ended stays in the state ``ENDED``. A router that was
frozen or cut off must still find it in this state when it continues; its requests have timed out
long before (``request_timeout_seconds``)."""


class LeaseState(StrEnum):
    HELD = "held"
    CANCELLED = "cancelled"
    """Held by a router that is to cancel the response."""
    ENDED = "ended"
    """Lapsed, and then declared ended: the response has failed."""


class LeaseKey(NamedTuple):
    tenant: TenantId
    response_id: str


class ResponseLeases(Protocol):
    """The leases of all routers. All methods raise Unavailable if the leases can't be reached."""

    async def renew(self, keys: Sequence[LeaseKey]) -> list[LeaseState]:
        """Take or renew these leases for LEASE_SECONDS, and return the state of each. A lease in
        the state ENDED is not taken or renewed."""
        ...

    async def cancel(self, key: LeaseKey) -> bool:
        """Ask the router that holds this lease to cancel the response. Returns False if no router
        holds it."""
        ...

    async def end_if_lapsed(self, key: LeaseKey) -> bool:
        """End this lease unless a router holds it, so that no router can take it any more. Returns
        whether the lease has ended."""
        ...

    async def release(self, key: LeaseKey) -> None:
        """Give a lease back. Call this once the response has a final status in the store."""
        ...
