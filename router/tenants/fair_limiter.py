"""How much may be under way at once, and how much of it one tenant's: requests, or bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.core.ids import TenantId
from baton.errors import Overloaded

RESERVED_FRACTION = 0.25
"""Of the gate, kept from who has its fair share already while there are other tenants: whoever
comes meets an open door, however much somebody else sends."""

NO_TENANT = TenantId("")


@dataclass(slots=True)
class _TenantShare:
    weight: float
    inside: int = 0


class FairLimiter:
    """Counts what its messages call ``counted``: answers, so that ``n`` and lists of prompts weigh
    what they cost, or bytes.

    Weighted max-min among those inside: who has less than its fair share comes in while there is
    any room, who has it, while the reserve is untouched.
    """

    def __init__(self, limit: int, counted: str = "requests") -> None:
        self._limit = limit
        self._counted = counted
        self._guests: dict[TenantId, _TenantShare] = {}
        """Those that have anything inside."""
        self._weights = 0.0
        self.inside = 0

    def take(self, count: int, tenant: TenantId, weight: float, shared: bool) -> None:
        """Raises Overloaded when that many more are too many. ``shared``: others may come. Ends
        with as many by :meth:`give`."""
        if not count:
            return
        self._check(count, tenant, weight, shared)
        guest = self._guests.get(tenant)
        if guest is None:
            guest = self._guests[tenant] = _TenantShare(weight)
            self._weights += weight
        guest.inside += count
        self.inside += count

    def give(self, count: int, tenant: TenantId) -> None:
        if not count:
            return
        guest = self._guests[tenant]
        guest.inside -= count
        self.inside -= count
        if guest.inside == 0:
            del self._guests[tenant]
            self._weights = self._weights - guest.weight if self._guests else 0.0

    @contextmanager
    def enter(
        self,
        count: int = 1,
        tenant: TenantId = NO_TENANT,
        weight: float = 1.0,
        *,
        shared: bool = False,
    ) -> Iterator[None]:
        """Both."""
        self.take(count, tenant, weight, shared)
        try:
            yield
        finally:
            self.give(count, tenant)

    def inside_of(self, tenant: TenantId) -> int:
        guest = self._guests.get(tenant)
        return guest.inside if guest is not None else 0

    def _check(self, count: int, tenant: TenantId, weight: float, shared: bool) -> None:
        wanted = self.inside + count
        if wanted > self._limit:
            raise Overloaded(
                f"{self.inside} {self._counted} are under way, and {self._limit} is the limit",
                retry_after_seconds=1.0,
            )
        if not shared or wanted <= self._limit - int(RESERVED_FRACTION * self._limit):
            return
        own = self.inside_of(tenant)
        share = self._fair_share(tenant, weight)
        if own + count > share:
            raise Overloaded(
                f"{own} {self._counted} of this tenant are under way, and {share:.0f} is its share "
                f"of {self._limit} while {self.inside} are",
                retry_after_seconds=1.0,
            )

    def _fair_share(self, tenant: TenantId, weight: float) -> float:
        """Nobody's, while the tenant is alone: then the reserve is for who may come."""
        guest = self._guests.get(tenant)
        if guest is not None and len(self._guests) == 1:
            return 0.0
        weights = self._weights if guest is not None else self._weights + weight
        return self._limit * weight / weights
