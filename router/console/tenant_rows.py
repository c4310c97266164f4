"""The console's rows of tenants: what each uses now, and its limits."""

from collections.abc import Mapping
from itertools import chain, islice

from baton.core.ids import TenantId
from router.console.worker_rows import Rows
from router.limits import MAX_SHOWN_TENANTS
from router.tenants.tenant import Tenant
from router.tenants.tenant_directory import TenantDirectory

_NO_USE = {
    "answers": 0,
    "prompt_tokens": 0,
    "cached_tokens": 0,
    "completion_tokens": 0,
    "met": 0,
    "missed": 0,
    "inflight": 0,
    "ttft_p95": None,
}


def tenant_rows(
    sums: Rows,
    refusals: Mapping[str, int],
    directory: TenantDirectory,
    max_tenants: int = MAX_SHOWN_TENANTS,
) -> Rows:
    """Return the rows of the busiest tenants, by name. ``sums`` is what tenants used recently
    (:func:`router.console.recent_answers.tenant_sums`); ``refusals`` counts their refused requests
    since the router's start. Tenants of ``directory`` that used nothing fill the remaining
    places."""
    busiest = sorted(sums, key=lambda name: (-sums[name]["inflight"], -sums[name]["answers"], name))
    idle = (name for name in directory.tenants if name not in sums)
    names = list(islice(chain(busiest, idle), max_tenants))
    return {
        name: {
            **sums.get(name, _NO_USE),
            "refused": refusals.get(name, 0),
            **_rights(directory.tenant(TenantId(name))),
        }
        for name in names
    }


def _rights(tenant: Tenant) -> dict[str, object]:
    return {
        "priority": tenant.priority.name.lower(),
        "weight": tenant.weight,
        "requests_per_minute": tenant.limits.requests_per_minute,
        "tokens_per_minute": tenant.limits.tokens_per_minute,
        "concurrent_requests": tenant.limits.concurrent_requests,
    }
