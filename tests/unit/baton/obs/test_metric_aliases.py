"""Tests the names of vLLM under which some metrics are exported: values, labels and types."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from baton.core.ids import RequestId
from baton.engine.block_pool import BlockCounts
from baton.engine.result import EngineStats, ScheduledPrompt, StepWork
from baton.obs.metric_aliases import METRIC_ALIASES, VLLM_ALIASES, render_metrics
from baton.worker.metrics import EngineGauges, WorkerMetrics
from router.telemetry.metrics import RouterMetrics
from tests.unit.router.telemetry.test_router_metrics import answered

DOCS = Path(__file__).parents[4] / "docs"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def vllm_samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }


def of(model: str, **labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"model_name": model, **labels}.items()))


def router_metrics(aliases: str) -> RouterMetrics:
    metrics = RouterMetrics(aliases=METRIC_ALIASES[aliases])
    metrics.add_models(["a", "b"])
    records = [answered(number, 40, 1.0 + number) for number in range(2)]
    records[1].finish_reason = "tool_calls"
    for record in records:
        record.model = "a"
        metrics.record_begin(record)
        metrics.record_answer(record)
    metrics.record_request(records, 2)
    return metrics


def test_aliases_of_a_router_have_its_values() -> None:
    found = vllm_samples(router_metrics("vllm").render().decode())
    assert {name: found[name, of("a")] for name, labels in found if labels == of("a")} == {
        "vllm:prompt_tokens_total": 41,
        "vllm:prompt_tokens_cached_total": 40,
        "vllm:prefix_cache_queries_total": 41,
        "vllm:prefix_cache_hits_total": 24,
        "vllm:generation_tokens_total": 2,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:e2e_request_latency_seconds_sum": 4,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:time_to_first_token_seconds_sum": 1,
        "vllm:request_time_per_output_token_seconds_count": 0,
        "vllm:request_time_per_output_token_seconds_sum": 0,
    }
    success = "vllm:request_success_total"
    assert found[success, of("a", finished_reason="length")] == 1
    assert found[success, of("a", finished_reason="stop")] == 1
    assert found[success, of("a", finished_reason="abort")] == 0
    assert found[success, of("b", finished_reason="stop")] == 0
    bucket = "vllm:time_to_first_token_seconds_bucket"
    assert found[bucket, of("a", le="0.5")] == 0
    assert found[bucket, of("a", le="1.0")] == found[bucket, of("a", le="+Inf")] == 1


def test_aliases_of_a_worker_have_its_values_and_its_model() -> None:
    registry, gauges = CollectorRegistry(), EngineGauges()
    metrics = WorkerMetrics(registry)
    registry.register(gauges)
    gauges.labels = {"role": "mixed", "model": "a"}
    gauges.stats = EngineStats(
        running=3, waiting=2, exported=5, reserved=1, queued_tokens=9, num_steps=1,
        pool=BlockCounts(
            num_blocks=20, free=4, filling=1, idle=10, referenced=4, quarantined=1
        ),
        num_preemptions=7, num_pauses=0, num_drafted_tokens=6, num_accepted_tokens=4,
    )  # fmt: skip
    prompt = ScheduledPrompt(RequestId("r"), 1.0, 0.25)
    metrics.record_step(StepWork(4, 10, 0.1, is_prefill=True), (prompt,))
    found = vllm_samples(render_metrics(registry, VLLM_ALIASES).decode())
    assert {name: found[name, of("a")] for name, labels in found if labels == of("a")} == {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 6 / 20,
        "vllm:num_preemptions_total": 7,
        "vllm:spec_decode_num_draft_tokens_total": 6,
        "vllm:spec_decode_num_accepted_tokens_total": 4,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:request_queue_time_seconds_sum": 0.25,
    }
    assert found["vllm:request_queue_time_seconds_bucket", of("a", le="0.1")] == 0
    assert found["vllm:request_queue_time_seconds_bucket", of("a", le="0.25")] == 1


def test_aliases_keep_the_type_and_are_off_by_default() -> None:
    text = router_metrics("vllm").render().decode()
    assert "# TYPE vllm:prompt_tokens_total counter" in text
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in text
    assert "vllm:" not in RouterMetrics().render().decode()
    ours, plain = (
        [line for line in body.splitlines() if "vllm:" not in line and "_created" not in line]
        for body in (text, router_metrics("none").render().decode())
    )
    assert ours == plain


def test_documented_aliases_are_those_of_the_table() -> None:
    page = (DOCS / "metrics.md").read_text()
    rows = re.findall(r"^\| `(vllm:\w+)` \| `(baton_\w+)`", page, re.MULTILINE)
    assert [tuple(name.removesuffix("_total") for name in row) for row in rows] == [
        (alias.name, alias.source) for alias in VLLM_ALIASES
    ]
