"""What tenants use, as metrics, with a bounded number of names."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.core.ids import TenantId
from router.tenants.request_usage import RequestUsage
from router.tenants.usage_store import OTHER_TENANTS

MAX_TENANT_LABELS = 100
"""Tenants with a label of their own: each is ten series. Those who come after are ``other``."""


class TenantMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._meters: dict[TenantId, _TenantCounters] = {}
        self._requests = Counter(
            "baton_tenant_requests_total",
            "Requests that were answered or begun, by tenant.",
            ["tenant"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "baton_tenant_prompt_tokens_total",
            "Tokens of prompts, by tenant, and whether they were computed or cached.",
            ["tenant", "source"],
            registry=registry,
        )
        self._completion_tokens = Counter(
            "baton_tenant_completion_tokens_total",
            "Tokens of answers, by tenant.",
            ["tenant"],
            registry=registry,
        )
        self._refusals = Counter(
            "baton_tenant_refusals_total",
            "Requests that were refused (429), by tenant and the limit that was reached.",
            ["tenant", "reason"],
            registry=registry,
        )
        self._judged = Counter(
            "baton_tenant_slo_answers_total",
            "Answers by tenant, and whether they met the SLO.",
            ["tenant", "verdict"],
            registry=registry,
        )
        self.unsent = Gauge(
            "baton_usage_unsent",
            "Counters of usage that Redis does not know yet.",
            registry=registry,
        )
        self.limits_split = Gauge(
            "baton_limits_split",
            "1 while Redis can't be asked, and this router gives its part of tenants' limits.",
            registry=registry,
        )
        self.file_failures = Counter(
            "baton_tenants_file_failures_total",
            "Readings of the tenants file that failed: the one before stays in force.",
            registry=registry,
        )
        self.file_stale = Gauge(
            "baton_tenants_file_stale",
            "1 while the tenants file can't be read as it is.",
            registry=registry,
        )

    def note_spent(self, tenant: TenantId, spent: RequestUsage) -> None:
        meters = self._meters_of(tenant)
        meters.requests.inc(spent.requests)
        meters.computed.inc(spent.computed_tokens)
        meters.cached.inc(spent.cached_tokens)
        meters.completion.inc(spent.completion_tokens)

    def note_judged(self, tenant: TenantId, *, met: bool) -> None:
        meters = self._meters_of(tenant)
        (meters.met if met else meters.missed).inc()

    def note_refused(self, tenant: TenantId, reason: str) -> None:
        self._refusals.labels(self._meters_of(tenant).name, reason).inc()

    def _meters_of(self, tenant: TenantId) -> "_TenantCounters":
        meters = self._meters.get(tenant)
        if meters is not None:
            return meters
        name = tenant if len(self._meters) < MAX_TENANT_LABELS else OTHER_TENANTS
        if name not in self._meters:
            self._meters[name] = _TenantCounters(
                name,
                self._requests.labels(name),
                self._prompt_tokens.labels(name, "computed"),
                self._prompt_tokens.labels(name, "cached"),
                self._completion_tokens.labels(name),
                self._judged.labels(name, "met"),
                self._judged.labels(name, "missed"),
            )
        return self._meters[name]


@dataclass(frozen=True, slots=True)
class _TenantCounters:
    """Of one name, prepared: to look them up takes longer than to count."""

    name: TenantId
    requests: Counter
    computed: Counter
    cached: Counter
    completion: Counter
    met: Counter
    missed: Counter
