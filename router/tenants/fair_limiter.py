"""Limits how many answers are in progress, or how many bytes are in use, in total and per
tenant."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.core.ids import NO_TENANT, TenantId
from baton.errors import Overloaded

RESERVED_FRACTION = 0.25
"""If several tenants are configured, those at or above their fair share can't use this fraction of
the limit. So another tenant's request is admitted, however much one tenant sends."""


@dataclass(slots=True)
class _TenantShare:
    weight: float
    num_in_use: int = 0


class FairLimiter:
    """Limits the number of answers in progress, or of bytes in use, over all requests. A request
    with ``n`` above 1 or with several prompts counts once per answer. ``counted`` is the name of
    the unit in error messages.

    The limit can also be shared by other things than tenants, such as models: ``user`` is what one
    of them is called in error messages, and ``tenant`` in the methods is then its id.

    The limit is divided by weighted max-min fairness among the tenants that use any of it now. A
    tenant below its fair share is admitted while the total is within the limit; other tenants are
    admitted while the total is within ``1 - RESERVED_FRACTION`` of the limit. If only one tenant is
    configured, it is admitted while the total is within the limit.
    """

    def __init__(self, limit: int, counted: str = "answers", user: str = "tenant") -> None:
        self._limit = limit
        self._counted = counted
        self._user = user
        self._usage_by_tenant: dict[TenantId, _TenantShare] = {}
        """Contains only tenants that use part of the limit now."""
        self._weights = 0.0
        self.num_in_use = 0

    def set_limit(self, limit: int) -> None:
        """Change the limit. Amounts that were acquired before stay in use, even if they exceed the
        new limit."""
        self._limit = limit

    def acquire(self, count: int, tenant: TenantId, weight: float, shared: bool) -> None:
        """Add ``count`` answers or bytes to what the tenant uses, until :meth:`release` is called
        with the same count. Raises Overloaded, and adds nothing, if the rules in the class's
        docstring do not allow that. ``shared`` says whether more than one tenant is configured."""
        if not count:
            return
        self._check(count, tenant, weight, shared)
        usage = self._usage_by_tenant.get(tenant)
        if usage is None:
            usage = self._usage_by_tenant[tenant] = _TenantShare(weight)
            self._weights += weight
        usage.num_in_use += count
        self.num_in_use += count

    def release(self, count: int, tenant: TenantId) -> None:
        if not count:
            return
        usage = self._usage_by_tenant[tenant]
        usage.num_in_use -= count
        self.num_in_use -= count
        if usage.num_in_use == 0:
            del self._usage_by_tenant[tenant]
            self._weights = self._weights - usage.weight if self._usage_by_tenant else 0.0

    @contextmanager
    def hold(
        self,
        count: int = 1,
        tenant: TenantId = NO_TENANT,
        weight: float = 1.0,
        *,
        shared: bool = False,
    ) -> Iterator[None]:
        """Acquire ``count`` answers or bytes for the duration of a ``with`` block."""
        self.acquire(count, tenant, weight, shared)
        try:
            yield
        finally:
            self.release(count, tenant)

    def num_in_use_by(self, tenant: TenantId) -> int:
        usage = self._usage_by_tenant.get(tenant)
        return usage.num_in_use if usage is not None else 0

    def _check(self, count: int, tenant: TenantId, weight: float, shared: bool) -> None:
        wanted = self.num_in_use + count
        if wanted > self._limit:
            raise Overloaded(
                f"this router handles {self.num_in_use} {self._counted} now, and {count} more "
                f"would exceed its limit of {self._limit}",
                retry_after_seconds=1.0,
            )
        if not shared or wanted <= self._limit - int(RESERVED_FRACTION * self._limit):
            return
        own = self.num_in_use_by(tenant)
        share = self._fair_share(tenant, weight)
        if own + count > share:
            reason = (
                f"{count} more would exceed the {self._user}'s fair share of {share:.0f}; all "
                f"{self._user}s together use {self.num_in_use} of at most {self._limit}"
                if share
                else f"the rest of the limit of {self._limit} is reserved for other {self._user}s"
            )
            raise Overloaded(
                f"this router handles {own} {self._counted} of this {self._user} now, and {reason}",
                retry_after_seconds=1.0,
            )

    def _fair_share(self, tenant: TenantId, weight: float) -> float:
        """Return the tenant's fair share of the limit, up to which it may also use the reserved
        fraction. If it is the only tenant that uses any of the limit now, return 0: the reserved
        fraction then stays free for other tenants."""
        usage = self._usage_by_tenant.get(tenant)
        if usage is not None and len(self._usage_by_tenant) == 1:
            return 0.0
        weights = self._weights if usage is not None else self._weights + weight
        return self._limit * weight / weights
