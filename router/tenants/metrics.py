"""Metrics of tenants, with a bounded number of labels."""

from collections.abc import Collection
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.core.ids import TenantId
from router.limits import MAX_TENANT_LABELS
from router.tenants.request_usage import RequestUsage
from router.tenants.usage_store import OTHER_TENANTS

REFUSAL_REASONS = ("requests", "tokens", "too_large", "concurrent", "full")


class TenantMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._counters: dict[TenantId, _TenantCounters] = {}
        self._requests = Counter(
            "baton_tenant_requests_total",
            "Requests whose answers were begun, by tenant; counted when the request ends.",
            ["tenant"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "baton_tenant_prompt_tokens_total",
            "Prompt tokens by tenant, and by whether they were computed or cached.",
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
        self._slo_answers = Counter(
            "baton_tenant_slo_answers_total",
            "Answers by tenant, and whether they met the SLO.",
            ["tenant", "verdict"],
            registry=registry,
        )
        self.unsent_counters = Gauge(
            "baton_usage_unsent",
            "Usage counters that were not sent to Redis yet.",
            registry=registry,
        )
        self.quota_store_unreachable = Gauge(
            "baton_quota_store_unreachable",
            "1 while Redis is unreachable and each router has an equal part of tenants' limits.",
            registry=registry,
        )
        self.file_failures = Counter(
            "baton_tenants_file_failures_total",
            "Failed loads of the tenants file; the last valid one stays in force.",
            registry=registry,
        )
        self.file_stale = Gauge(
            "baton_tenants_file_stale",
            "1 while the tenants file on disk is invalid or unreadable.",
            registry=registry,
        )

    def add_tenants(self, tenants: Collection[TenantId]) -> None:
        """Create the series of these tenants, at 0, unless they are too many for labels of their
        own: then the first ones with a request get them."""
        if len(tenants) <= MAX_TENANT_LABELS:
            for tenant in tenants:
                self._counters_of(tenant)

    def record_usage(self, tenant: TenantId, spent: RequestUsage) -> None:
        meters = self._counters_of(tenant)
        meters.requests.inc(spent.requests)
        meters.computed.inc(spent.computed_tokens)
        meters.cached.inc(spent.cached_tokens)
        meters.completion.inc(spent.completion_tokens)

    def record_slo_outcome(self, tenant: TenantId, *, met: bool) -> None:
        meters = self._counters_of(tenant)
        (meters.met if met else meters.missed).inc()

    def record_refusal(self, tenant: TenantId, reason: str) -> None:
        self._refusals.labels(self._counters_of(tenant).name, reason).inc()

    def refusals(self) -> dict[str, int]:
        """Return the number of refused requests since the start, by tenant."""
        counts: dict[str, int] = {}
        for family in self._refusals.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    name = sample.labels["tenant"]
                    counts[name] = counts.get(name, 0) + int(sample.value)
        return counts

    def _counters_of(self, tenant: TenantId) -> "_TenantCounters":
        meters = self._counters.get(tenant)
        if meters is not None:
            return meters
        name = tenant if len(self._counters) < MAX_TENANT_LABELS else OTHER_TENANTS
        if name not in self._counters:
            for reason in REFUSAL_REASONS:
                self._refusals.labels(name, reason)
            self._counters[name] = _TenantCounters(
                name,
                self._requests.labels(name),
                self._prompt_tokens.labels(name, "computed"),
                self._prompt_tokens.labels(name, "cached"),
                self._completion_tokens.labels(name),
                self._slo_answers.labels(name, "met"),
                self._slo_answers.labels(name, "missed"),
            )
        return self._counters[name]


@dataclass(frozen=True, slots=True)
class _TenantCounters:
    """The counters of one tenant label, kept because looking them up takes longer than counting."""

    name: TenantId
    requests: Counter
    computed: Counter
    cached: Counter
    completion: Counter
    met: Counter
    missed: Counter
