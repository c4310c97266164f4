"""Tests how the router decides whether an answer met its SLO, and how it counts the outcomes."""

import pytest
from prometheus_client import CollectorRegistry

from baton.core.ids import Epoch, Incarnation, RequestId, TenantId, TokenId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement, ScoredWorker
from baton.core.request import RequestOutput
from router.generation.record import GenerationRecord
from router.limits import MAX_TENANT_LABELS
from router.telemetry.metrics import RouterMetrics
from router.telemetry.slo import SloOutcome, SloTargets
from router.tenants.metrics import TenantMetrics

SLO = SloTargets(ttft_seconds=2.0, itl_seconds=0.05)
PREFILL_WORKER, DECODE_WORKER = (
    WorkerRef(WorkerId(name), f"{name}:1", Incarnation(1)) for name in ("p0", "d0")
)


def answered(
    first: float = 1.0,
    gap: float = 0.04,
    own: float | None = None,
    predicted: float | None = None,
    reason: str = "stop",
    tenant: str = "blue",
    promised: bool = True,
) -> GenerationRecord:
    """Return the record of an answer of three tokens. ``first`` is its TTFT, ``gap`` its ITL, and
    ``own`` the service time of its prompt, all in seconds."""
    record = GenerationRecord(RequestId("r"), 10.0, 5, TenantId(tenant), promised, model="m")
    scores = [ScoredWorker(WorkerId("p1"), 0.5, service_seconds=9.0)]
    if own is not None:
        scores.append(ScoredWorker(PREFILL_WORKER.id, 1.0, service_seconds=own))
    placement = Placement(
        PREFILL_WORKER, DECODE_WORKER, "why", ttft_seconds=predicted, prefill_alternatives=scores
    )
    record.record_placement(Epoch(1), placement, 10.1)
    tokens = tuple(TokenId(token) for token in (1, 2, 3))
    record.record_output(RequestOutput(RequestId("r"), Epoch(1), 0, tokens[:1]), 10.0 + first)
    record.record_output(RequestOutput(RequestId("r"), Epoch(1), 1, tokens[1:]), 10.0 + first + gap)
    record.record_end(reason, 10.0 + first + 2 * gap)
    return record


@pytest.mark.parametrize(
    ("record", "verdict"),
    [
        (answered(), SloOutcome.MET),
        (answered(first=2.0, gap=0.0499), SloOutcome.MET),
        (answered(first=2.01), SloOutcome.LATE),
        (answered(first=2.5, own=0.6), SloOutcome.MET),  # a long prompt may take longer
        (answered(first=2.7, own=0.6), SloOutcome.LATE),
        (answered(gap=0.06), SloOutcome.SLOW),
        (answered(first=3.0, gap=0.06), SloOutcome.LATE),
        (answered(reason="error"), SloOutcome.FAILED),
        (answered(first=9.0, reason="cancelled"), None),
        (answered(first=9.0, promised=False), None),
        (GenerationRecord(RequestId("r"), 0.0, 5, finish_reason="error"), SloOutcome.FAILED),
    ],
)
def test_slo_verdict_of_an_answer(record: GenerationRecord, verdict: SloOutcome | None) -> None:
    assert SLO.judge(record) is verdict


def test_without_a_ttft_slo_no_answer_is_late() -> None:
    assert SloTargets(0.0, 0.05).judge(answered(first=99.0)) is SloOutcome.MET


def test_single_token_has_no_inter_token_latency() -> None:
    record = GenerationRecord(RequestId("r"), 0.0, 5)
    record.record_output(RequestOutput(RequestId("r"), Epoch(1), 0, (TokenId(1),)), 1.0)
    record.record_end("length", 50.0)
    assert SLO.judge(record) is SloOutcome.MET


def test_verdicts_are_counted_in_total_and_by_tenant() -> None:
    metrics = RouterMetrics(SLO)
    metrics.add_models(["m"])
    for record in (answered(), answered(gap=1.0), answered(tenant="red", reason="error"),
                   answered(promised=False)):  # fmt: skip
        metrics.record_answer(record)
    value = metrics.registry.get_sample_value
    counted = {
        v: value("baton_slo_answers_total", {"model": "m", "verdict": v.value}) for v in SloOutcome
    }
    assert counted == {
        SloOutcome.MET: 1,
        SloOutcome.LATE: 0,
        SloOutcome.SLOW: 1,
        SloOutcome.FAILED: 1,
    }
    name = "baton_tenant_slo_answers_total"
    assert value(name, {"tenant": "blue", "verdict": "met"}) == 1
    assert value(name, {"tenant": "blue", "verdict": "missed"}) == 1
    assert value(name, {"tenant": "red", "verdict": "missed"}) == 1


def test_predicted_ttft_is_compared_with_the_actual_one() -> None:
    metrics = RouterMetrics(SLO)
    metrics.record_answer(answered(first=1.0, predicted=0.5))
    metrics.record_answer(answered(first=1.0))
    value = metrics.registry.get_sample_value
    name, labels = "baton_time_to_first_token_prediction_ratio", {"model": "m"}
    assert (value(f"{name}_count", labels), value(f"{name}_sum", labels)) == (1, 2.0)


def test_tenants_beyond_the_label_limit_share_a_label() -> None:
    registry = CollectorRegistry()
    tenants = TenantMetrics(registry)
    for number in range(MAX_TENANT_LABELS + 5):
        tenants.record_slo_outcome(TenantId(f"t{number}"), met=True)
    labels = {"tenant": "other", "verdict": "met"}
    assert registry.get_sample_value("baton_tenant_slo_answers_total", labels) == 5
