"""Usage per tenant and day: what is counted, where it is kept, and how it is told."""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol

from baton.core.ids import TenantId
from baton.errors import Unavailable
from router.tenants.request_usage import RequestUsage
from router.tenants.tenant_directory import TenantDirectory

OTHER_TENANTS = TenantId("other")
"""Who stands for tenants beyond a bound."""

MAX_DAYS = 400
"""Kept, and told at once: a year, and what a late accountant takes."""


class UsageField(StrEnum):
    REQUESTS = "requests"
    PROMPT = "prompt_tokens"
    CACHED = "cached_tokens"
    COMPLETION = "completion_tokens"
    REFUSED = "refused_requests"


UsageCounts = Counter[tuple[str, TenantId, UsageField]]
"""By day (UTC, as in ISO 8601), tenant and field."""


class UsageStore(Protocol):
    """Methods raise Unavailable."""

    async def add(self, writer: str, number: int, counts: Mapping[Any, int]) -> None:
        """Adds, once for each ``number`` of a ``writer``; numbers rise."""
        ...

    async def read(self, days: Iterable[str]) -> UsageCounts: ...


class MemoryUsageStore:
    """The twin of the store in Redis. ``reachable`` False: nothing arrives; ``deaf``: what arrives
    is not confirmed."""

    def __init__(self) -> None:
        self.reachable = True
        self.deaf = False
        self._counts: UsageCounts = Counter()
        self._numbers: dict[str, int] = {}

    async def add(self, writer: str, number: int, counts: Mapping[Any, int]) -> None:
        if not self.reachable:
            raise Unavailable("the store of usage is gone")
        if self._numbers.get(writer, 0) < number:
            self._numbers[writer] = number
            self._counts.update(counts)
        if self.deaf:
            raise Unavailable("no answer")

    async def read(self, days: Iterable[str]) -> UsageCounts:
        wanted = set(days)
        return Counter({key: n for key, n in self._counts.items() if key[0] in wanted})


def day_of(wall_nanoseconds: int) -> str:
    return _date(wall_nanoseconds).isoformat()


def days_since(since: date, wall_nanoseconds: int) -> list[str]:
    """Up to today, the last ``MAX_DAYS`` at most."""
    today = _date(wall_nanoseconds)
    count = min((today - since).days + 1, MAX_DAYS)
    return [(today - timedelta(days=back)).isoformat() for back in reversed(range(count))]


def usage_report(counts: UsageCounts, roll: TenantDirectory) -> dict[str, Any]:
    """Per tenant, and in all. Costs are at today's prices."""
    tenants: dict[TenantId, Counter[UsageField]] = {}
    for (_, tenant, field), amount in counts.items():
        tenants.setdefault(tenant, Counter())[field] += amount
    told = {
        tenant: _tenant_report(roll, tenant, counted) for tenant, counted in sorted(tenants.items())
    }
    total: dict[str, Any] = {}
    for line in told.values():
        for name, amount in line.items():
            total[name] = round(total.get(name, 0) + amount, 6)
    return {"tenants": told, "total": total or _tenant_report(roll, OTHER_TENANTS, Counter())}


def _tenant_report(
    roll: TenantDirectory, tenant: TenantId, counted: Counter[UsageField]
) -> dict[str, Any]:
    spent = RequestUsage(
        counted[UsageField.REQUESTS],
        counted[UsageField.PROMPT],
        counted[UsageField.CACHED],
        counted[UsageField.COMPLETION],
    )
    prices = roll.tenant(tenant).prices
    cost = prices.cost(spent.computed_tokens, spent.cached_tokens, spent.completion_tokens)
    return {
        "requests": spent.requests,
        "refused_requests": counted[UsageField.REFUSED],
        "prompt_tokens": spent.prompt_tokens,
        "computed_tokens": spent.computed_tokens,
        "cached_tokens": spent.cached_tokens,
        "completion_tokens": spent.completion_tokens,
        "cost": round(cost, 6),
    }


def _date(wall_nanoseconds: int) -> date:
    return datetime.fromtimestamp(wall_nanoseconds / 1e9, UTC).date()
