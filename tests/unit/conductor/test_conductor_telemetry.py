"""Tests the telemetry of a conductor's decisions: counts, durations, spans, and a bounded number of
labels."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TenantId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement, PlacementQuery, ScoredWorker
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role, WorkerState
from baton.core.trace_context import TraceContext
from baton.errors import BatonError, Invalid, Overloaded, Unavailable
from conductor.metrics import ClusterGauges, ConductorMetrics
from conductor.telemetry import ConductorTelemetry
from testkit.fakes.span_sink import MemorySpanSink
from tests.unit.conductor.test_conductor import (
    ConductorHarness,
    decode_member,
    member,
    prefill_member,
)

QUESTION = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


def ref(name: str) -> WorkerRef:
    return WorkerRef(WorkerId(name), f"{name}:1", Incarnation(1))


def scored(*names: str) -> tuple[ScoredWorker, ...]:
    return tuple(ScoredWorker(WorkerId(name), 0.0) for name in names)


PAIR = Placement(
    ref("p0"), ref("d0"), "best of 2", policy="baton", ttft_seconds=0.25,
    prefill_alternatives=scored("p0", "p1"), decode_alternatives=scored("d0"),
)  # fmt: skip
ALONE = Placement(
    None, ref("d0"), "cheaper", policy="baton",
    prefill_alternatives=scored("p0"), decode_alternatives=scored("d0"),
)  # fmt: skip
ONE_POOL = Placement(None, ref("d0"), "no prefill worker is ready", policy="baton")


class Core:
    """A conductor core that returns the given answers, each after a quarter of a millisecond."""

    def __init__(self) -> None:
        self.clock = ManualClock(50.0)
        self.answers: list[Placement | Exception] = []

    def place(self, query: PlacementQuery) -> Placement:
        self.clock.advance(0.00025)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def describe(self) -> tuple[Sequence[str], str]:
        return ["{}"], "ring"

    def pool_plan(self, model: str = "") -> PoolPlan | None:
        return None


class Harness:
    def __init__(self, *answers: Placement | Exception) -> None:
        self.core, self.registry, self.spans = Core(), CollectorRegistry(), MemorySpanSink()
        self.core.answers = list(answers)
        metrics = ConductorMetrics(self.registry, "baton")
        self.telemetry = ConductorTelemetry(self.core, metrics, self.core.clock, "c0", self.spans)

    def place(self, epoch: int = 1, trace: str = "") -> Placement:
        return self.telemetry.place(
            PlacementQuery(
                RequestId("r"), Epoch(epoch), TenantId(""), 5, 5, (), frozenset(), "", trace
            )
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"baton_conductor_{name}", labels)


def test_decisions_are_counted_by_policy_and_kind() -> None:
    harness = Harness(PAIR, PAIR, ALONE, ONE_POOL)
    assert [harness.place(epoch) for epoch in (1, 2, 1, 1)] == [PAIR, PAIR, ALONE, ONE_POOL]
    kinds = {kind: harness.value("decisions_total", policy="baton", kind=kind)
             for kind in ("pair", "alone", "one_pool")}  # fmt: skip
    assert kinds == {"pair": 2, "alone": 1, "one_pool": 1}
    assert harness.value("replacements_total") == 1
    assert harness.value("decision_seconds_count") == 4
    assert harness.value("decision_seconds_sum") == pytest.approx(0.001)
    assert harness.spans.spans == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Overloaded("full"), "overloaded"),
        (Invalid("too long"), "impossible"),
        (Unavailable("nobody"), "nobody"),
        (BatonError("odd"), "bug"),
        (KeyError("a bug"), "bug"),
    ],
)
def test_refusals_are_counted_by_reason_and_passed_on(error: Exception, reason: str) -> None:
    harness = Harness(error)
    with pytest.raises(type(error)):
        harness.place()
    assert harness.value("refusals_total", reason=reason) == 1
    assert harness.value("decision_seconds_count") == 1


def test_each_placement_of_a_traced_request_gets_a_child_span() -> None:
    harness = Harness(PAIR, Overloaded("full"), PAIR)
    harness.place(trace=QUESTION.traceparent)
    with pytest.raises(Overloaded):
        harness.place(2, trace=QUESTION.traceparent)
    harness.place(trace="what is no span")
    first, second = harness.spans.spans
    assert (first.name, first.parent_id, first.error) == ("decide", QUESTION.span_id, "")
    assert first.attributes == {
        "baton.epoch": 1,
        "baton.policy": "baton",
        "baton.kind": "pair",
        "baton.reason": "best of 2",
        "baton.candidates": 2,
        "baton.predicted_first_token_seconds": 0.25,
    }
    assert first.end_seconds - first.begin_seconds == pytest.approx(0.00025)
    assert (second.parent_id, second.error) == (QUESTION.span_id, "full")
    assert first.context.span_id != second.context.span_id


async def test_cluster_gauges_are_read_at_scrape_time() -> None:
    cluster = ConductorHarness()
    gone = replace(prefill_member("p1"), state=WorkerState.DRAINING)
    await cluster.announce(
        prefill_member("p0"), gone, decode_member("d0"), member("s", Role.KVSTORE)
    )
    cluster.add_stored_blocks("s", *(BlockKey(bytes([number]) * 16) for number in range(3)))
    plans: dict[str, PoolPlan] = {}
    registry = CollectorRegistry()
    leading = [False]
    gauges = ClusterGauges(
        cluster.membership, cluster.mirror, lambda: plans, cluster.clock, lambda: leading[0]
    )
    registry.register(gauges)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"baton_conductor_{name}", labels)

    cluster.clock.advance(4.0)
    assert value("members", role="prefill", state="ready") == 1
    assert value("members", role="prefill", state="draining") == 1
    assert value("members", role="decode", state="ready") == 1
    assert value("members", role="kvstore", state="ready") == 1
    assert value("members", role="router", state="ready") == 0  # zero rather than absent
    assert value("registry_age_seconds") == 4.0
    assert (value("mirror_blocks"), value("mirror_nodes")) == (3, 1)
    assert value("planned_workers", pool="decode") is None  # no plan exists yet
    plans[""] = PoolPlan(3, 5, "why", 1, 1, 12.5, 100.0, 10.0, 0.5)
    assert value("planned_workers", pool="prefill") == 3
    assert value("planned_workers", pool="decode") == 5
    assert value("forecast_requests_per_second") == 12.5
    assert value("is_leader") == 0
    leading[0] = True
    assert value("is_leader") == 1
    cluster.mirror.drop_node(WorkerId("s"))
    assert (value("mirror_blocks"), value("mirror_nodes")) == (0, 0)
