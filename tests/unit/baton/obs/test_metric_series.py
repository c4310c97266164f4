"""Tests that every counter and histogram of a worker and a conductor has series before anything has
happened: a scraper can't see the increase with which a series begins."""

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from baton.core.ids import TenantId
from baton.worker.metrics import WorkerMetrics
from conductor.metrics import KINDS, ConductorMetrics
from router.limits import MAX_TENANT_LABELS
from router.tenants.metrics import REFUSAL_REASONS, TenantMetrics


def started(registry: CollectorRegistry) -> list[Metric]:
    """Return the families, all of whose samples must be 0, apart from times of creation."""
    families = list(registry.collect())
    values = [s.value for f in families for s in f.samples if not s.name.endswith("_created")]
    assert set(values) == {0}
    return families


def test_all_counters_of_a_worker_exist_at_zero() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    families = started(registry)
    assert [family.name for family in families if not family.samples] == []
    read = registry.get_sample_value
    assert read("baton_worker_failures_total", {"status": "DATA_LOSS"}) == 0
    assert read("baton_worker_store_lookups_total", {"mode": "none"}) == 0
    raw = {"transport": "nixl", "codec": "int4"}
    assert read("baton_worker_kv_transfer_raw_bytes_total", raw) == 0


def test_all_counters_of_a_conductor_exist_at_zero() -> None:
    registry = CollectorRegistry()
    ConductorMetrics(registry, "baton")
    assert [family.name for family in started(registry) if not family.samples] == []
    decisions = [
        registry.get_sample_value(
            "baton_conductor_decisions_total", {"policy": "baton", "kind": kind}
        )
        for kind in KINDS
    ]
    assert decisions == [0, 0, 0, 0]


def test_known_tenants_have_series_unless_they_are_too_many() -> None:
    registry = CollectorRegistry()
    tenants = TenantMetrics(registry)
    tenants.add_tenants([TenantId("a"), TenantId("b")])
    started(registry)
    read = registry.get_sample_value
    refusals = [
        read("baton_tenant_refusals_total", {"tenant": tenant, "reason": reason})
        for tenant in ("a", "b")
        for reason in REFUSAL_REASONS
    ]
    assert refusals == [0] * 10
    assert tenants.refusals() == {"a": 0, "b": 0}
    tenants.add_tenants([TenantId(f"t{number}") for number in range(MAX_TENANT_LABELS + 1)])
    tenants.record_refusal(TenantId("late"), "full")
    assert tenants.refusals() == {"a": 0, "b": 0, "late": 1}
