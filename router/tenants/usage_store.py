"""Defines the counters of usage per tenant and day, the store that keeps them, and the report."""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol

from baton.core.ids import TenantId
from baton.errors import Unavailable
from router.limits import MAX_USAGE_DAYS
from router.tenants.request_usage import RequestUsage
from router.tenants.tenant_directory import TenantDirectory

OTHER_TENANTS = TenantId("other")
"""The name under which all tenants beyond a bound are counted together."""


class UsageField(StrEnum):
    REQUESTS = "requests"
    PROMPT = "prompt_tokens"
    CACHED = "cached_tokens"
    COMPLETION = "completion_tokens"
    REFUSED = "refused_requests"


UsageCounts = Counter[tuple[str, TenantId, UsageField]]
"""Counts by day (UTC, as in ISO 8601), tenant and field."""


class UsageStore(Protocol):
    """Stores usage counters. Methods raise Unavailable if the store can't be reached or does not
    answer. The counts of an ``add`` that raises Unavailable may have been added nevertheless."""

    async def add(self, writer: str, number: int, counts: Mapping[Any, int]) -> None:
        """Add the counts of message ``number`` of ``writer``, unless that message or a later one of
        the same writer was added before."""
        ...

    async def read(self, days: Iterable[str]) -> UsageCounts: ...


class MemoryUsageStore:
    """An in-memory usage store for tests. If ``is_reachable`` is False, messages don't arrive. If
    ``drops_replies`` is True, messages are counted, but not confirmed."""

    def __init__(self) -> None:
        self.is_reachable = True
        self.drops_replies = False
        self._counts: UsageCounts = Counter()
        self._numbers: dict[str, int] = {}

    async def add(self, writer: str, number: int, counts: Mapping[Any, int]) -> None:
        if not self.is_reachable:
            raise Unavailable("the usage store is unreachable")
        if self._numbers.get(writer, 0) < number:
            self._numbers[writer] = number
            self._counts.update(counts)
        if self.drops_replies:
            raise Unavailable("the usage store did not answer")

    async def read(self, days: Iterable[str]) -> UsageCounts:
        wanted = set(days)
        return Counter({key: n for key, n in self._counts.items() if key[0] in wanted})


def day_of(wall_nanoseconds: int) -> str:
    return _date(wall_nanoseconds).isoformat()


def days_since(since: date, wall_nanoseconds: int) -> list[str]:
    """Return the days from ``since`` to today, but only the last ``MAX_USAGE_DAYS`` of them."""
    today = _date(wall_nanoseconds)
    count = min((today - since).days + 1, MAX_USAGE_DAYS)
    return [(today - timedelta(days=back)).isoformat() for back in reversed(range(count))]


def usage_report(counts: UsageCounts, directory: TenantDirectory) -> dict[str, Any]:
    """Report usage per tenant and in total. Costs are computed with the current prices."""
    tenants: dict[TenantId, Counter[UsageField]] = {}
    for (_, tenant, field), amount in counts.items():
        tenants.setdefault(tenant, Counter())[field] += amount
    reports = {
        tenant: _tenant_report(directory, tenant, counted)
        for tenant, counted in sorted(tenants.items())
    }
    total: dict[str, Any] = {}
    for report in reports.values():
        for name, amount in report.items():
            total[name] = round(total.get(name, 0) + amount, 6)
    empty = _tenant_report(directory, OTHER_TENANTS, Counter())
    return {"tenants": reports, "total": total or empty}


def _tenant_report(
    directory: TenantDirectory, tenant: TenantId, counted: Counter[UsageField]
) -> dict[str, Any]:
    spent = RequestUsage(
        counted[UsageField.REQUESTS],
        counted[UsageField.PROMPT],
        counted[UsageField.CACHED],
        counted[UsageField.COMPLETION],
    )
    prices = directory.tenant(tenant).prices
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
