"""Tests the metrics and spans that a prefill and a decode worker record for requests."""

from collections import Counter
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from baton.core.ids import Epoch, RequestId
from baton.core.request import FinishReason, RequestSpec
from baton.core.task import Task
from baton.core.trace_context import TraceContext
from baton.obs.span import Span
from baton.worker.context import WorkerConfig
from testkit.fakes.span_sink import MemorySpanSink
from tests.sim.test_kv_transfer import run_disaggregated
from tests.sim.worker_cluster import (
    Cluster,
    Node,
    cluster,
    collect,
    is_finished,
    request,
)

ATTEMPT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


def traced(spec: RequestSpec) -> RequestSpec:
    return replace(spec, trace=ATTEMPT.traceparent)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(f"baton_worker_{name}", labels)
    return -1.0 if found is None else found


async def settled(running: Cluster) -> None:
    for node in (running.prefill, running.decode):
        await node.wait_until_free()


async def test_a_disaggregated_request_is_counted_on_both_workers() -> None:
    prompt, max_tokens = list(range(50)), 6
    async with cluster() as running:
        await run_disaggregated(running, request("r", prompt, max_tokens))
        await settled(running)
        await running.prefill.worker.inspect()
        prefill_metrics, decode_metrics = running.prefill.metrics, running.decode.metrics
        layout_bytes = running.decode.runner.block_size_bytes
    assert value(prefill_metrics, "requests_total", task="prefill", outcome="done") == 1
    assert value(decode_metrics, "requests_total", task="decode", outcome="done") == 1
    # Chunks of 8 tokens: seven steps prefill the prompt, and the last one samples the first token.
    assert value(prefill_metrics, "step_seconds_count", kind="prefill") == 7
    assert value(prefill_metrics, "computed_tokens_total", phase="prefill") == 50
    assert value(prefill_metrics, "prefix_tokens_total", source="computed") == 50
    assert value(prefill_metrics, "prefix_tokens_total", source="device") == 0
    assert value(prefill_metrics, "queue_seconds_count") == 1
    assert value(prefill_metrics, "kv_export_seconds_count") == 1
    # The decode worker generates five more tokens, one per step.
    assert value(decode_metrics, "step_seconds_count", kind="decode") == 5
    assert value(decode_metrics, "computed_tokens_total", phase="decode") == 5
    assert value(decode_metrics, "batch_requests_sum") == 5
    assert value(decode_metrics, "kv_transfer_bytes_total", transport="memory") == 13 * layout_bytes
    assert value(decode_metrics, "kv_transfer_exposed_seconds_count") == 1
    assert value(decode_metrics, "queue_seconds_count") == 0


async def test_an_answer_of_one_token_is_done_although_the_router_cancels_its_placement() -> None:
    """Once the router has the answer, it cancels the request on both workers. The KV transfer to
    the decode worker may not have ended by then, but the prefill worker must still count the
    request as done."""
    spec = request("r", list(range(50)), 1)
    async with cluster() as running:
        streams = [node.worker.open_stream() for node in (running.prefill, running.decode)]
        streams[0].submit(spec, Task.PREFILL, None)
        streams[1].submit(spec, Task.DECODE, running.prefill.ref)
        await collect(streams[0], is_finished)
        for stream in streams:
            stream.cancel(spec.request_id, spec.epoch)
        await settled(running)
        prefill_metrics = running.prefill.metrics
    assert value(prefill_metrics, "requests_total", task="prefill", outcome="done") == 1
    assert value(prefill_metrics, "requests_total", task="prefill", outcome="cancelled") < 1


async def test_cached_prompt_tokens_are_counted_as_cached() -> None:
    async with cluster() as running:
        for name in ("a", "b"):
            await run_disaggregated(running, request(name, list(range(41)), 2))
            await settled(running)
        prefill_metrics = running.prefill.metrics
    assert value(prefill_metrics, "prefix_tokens_total", source="computed") == 41 + 1
    assert value(prefill_metrics, "prefix_tokens_total", source="device") == 40


async def test_block_and_sequence_gauges_match_the_engine() -> None:
    async with cluster(prefill_blocks=32) as running:
        stream = running.prefill.worker.open_stream()
        stream.submit(request("r", list(range(20)), 4), Task.PREFILL, None)
        await collect(stream, bool)
        worker = running.prefill.worker
        await worker._load_monitor.refresh(worker._jobs)
        prefill_metrics = running.prefill.metrics
        states = ("free", "filling", "idle", "referenced", "quarantined")
        blocks = {state: value(prefill_metrics, "blocks", state=state) for state in states}
        assert blocks == {
            "free": 27, "filling": 0, "idle": 0, "referenced": 5, "quarantined": 0,
        }  # fmt: skip
        assert value(prefill_metrics, "sequences", state="exported") == 1
        assert value(prefill_metrics, "preemptions_total") == 0
        stream.close()
        await running.prefill.wait_until_free()
    assert value(prefill_metrics, "requests_total", task="prefill", outcome="cancelled") == 1


async def test_refused_and_dropped_requests_are_counted() -> None:
    async with cluster(config=WorkerConfig(max_jobs=1)) as running:
        stream = running.decode.worker.open_stream()
        stream.submit(request("long", list(range(20)), 100), Task.PREFILL_AND_DECODE, None)
        stream.submit(request("late", list(range(20)), 4), Task.PREFILL_AND_DECODE, None)
        refused = await collect(stream, is_finished)
        assert refused[-1].request_id == "late"
        stream.close()
        await running.decode.wait_until_free()
        decode_metrics = running.decode.metrics
    assert value(decode_metrics, "failures_total", status="RESOURCE_EXHAUSTED") == 1
    assert value(decode_metrics, "requests_total", task="whole", outcome="cancelled") == 1


# -- spans ----------------------------------------------------------------------------------


def stages(spans: list[Span], job: str) -> list[str]:
    """Return the names of the child spans of the span named ``job``, in order of time. Check that
    each child lies within that span."""
    [found] = [span for span in spans if span.name == job]
    assert found.parent_id == ATTEMPT.span_id
    below = [span for span in spans if span.parent_id == found.context.span_id]
    for span in below:
        assert found.begin_seconds <= span.begin_seconds <= span.end_seconds <= found.end_seconds
    return [span.name for span in sorted(below, key=lambda s: (s.begin_seconds, s.end_seconds))]


def assert_complete(spans: list[Span]) -> None:
    """Check that each span's parent is the router's attempt or one of ``spans``, and that no span
    id occurs twice."""
    known = {span.context.span_id for span in spans}
    assert len(known) == len(spans)
    assert all(span.parent_id in known | {ATTEMPT.span_id} for span in spans)


async def test_spans_of_a_disaggregated_request() -> None:
    spans = MemorySpanSink()
    async with cluster(spans=spans) as running:
        await run_disaggregated(running, traced(request("r", list(range(50)), 6)))
        await settled(running)
    assert_complete(spans.spans)
    assert stages(spans.spans, "prefill job") == ["queue", "prefill", "kv export"]
    assert stages(spans.spans, "decode job") == ["kv transfer wait", "queue", "kv import", "decode"]
    named = {span.name: span for span in spans.spans if span.name != "queue"}
    computed = [event.attributes["baton.computed_tokens"] for event in named["prefill"].events]
    assert computed == [8, 16, 24, 32, 40, 48, 50]
    assert named["decode"].attributes == {"baton.tokens": 6}
    assert named["kv import"].attributes["baton.transport"] == "memory"
    assert named["prefill job"].attributes["baton.outcome"] == "done"
    assert named["decode job"].attributes["baton.outcome"] == "done"


async def test_spans_of_a_request_on_a_single_worker() -> None:
    spans = MemorySpanSink()
    async with cluster(spans=spans) as running:
        stream = running.decode.worker.open_stream()
        stream.submit(traced(request("r", list(range(20)), 4)), Task.PREFILL_AND_DECODE, None)
        await collect(stream, is_finished)
        stream.close()
        await running.decode.wait_until_free()
    assert_complete(spans.spans)
    assert stages(spans.spans, "whole job") == ["queue", "prefill", "decode"]


async def test_a_request_with_prompt_logprobs_has_the_usual_spans() -> None:
    spans = MemorySpanSink()
    async with cluster(spans=spans) as running:
        await run_disaggregated(
            running, traced(request("r", list(range(20)), 4, prompt_logprobs=1))
        )
        await settled(running)
        prefill_metrics = running.prefill.metrics
    assert stages(spans.spans, "prefill job") == ["queue", "prefill", "kv export"]
    assert value(prefill_metrics, "prefix_tokens_total", source="computed") == 20


async def test_untraced_requests_record_no_spans() -> None:
    spans = MemorySpanSink()
    async with cluster(spans=spans) as running:
        await run_disaggregated(running, request("r", list(range(20)), 4))
        await run_disaggregated(
            running, replace(request("s", list(range(20)), 4), trace="nonsense")
        )
        await settled(running)
    assert spans.spans == []


@pytest.mark.parametrize("moment", [1, 2])
async def test_a_cancelled_request_ends_its_spans_too(moment: int) -> None:
    spans = MemorySpanSink()
    async with cluster(spans=spans) as running:
        spec = traced(request("r", list(range(50)), 60))
        gate = running.decode.runner.close_after(moment)
        await run_disaggregated(running, spec, cancel_after=moment)
        gate.open()
        await settled(running)
    assert_complete(spans.spans)
    jobs = {s.name: s.attributes["baton.outcome"] for s in spans.spans if s.name.endswith("job")}
    assert set(jobs) == {"prefill job", "decode job"}
    assert jobs["decode job"] == "cancelled"


async def test_a_migrated_request_has_a_span_of_its_job_and_of_its_export() -> None:
    """The span of the export to the next worker is a child of the attempt that exported the KV. So
    it has a parent even if the next attempt never starts."""
    spans = MemorySpanSink()
    config = WorkerConfig(drain_grace_seconds=0.0)
    async with cluster(config=config, spans=spans) as running:
        node = running.decode
        gate = node.runner.close_after(4)
        stream = node.worker.open_stream()
        stream.submit(traced(request("r", list(range(20)), 200)), Task.PREFILL_AND_DECODE, None)
        outputs = await collect(stream, bool)
        node.worker.start_drain()
        await gate.open_slowly(stream, outputs)
        assert outputs[-1].finish_reason is FinishReason.MIGRATED
        await drop_export(running, node, Epoch(2))
        await settled(running)
        decode_metrics = node.metrics
    assert_complete(spans.spans)
    counted = Counter(
        (span.name, span.attributes["baton.outcome"], span.attributes["baton.epoch"])
        for span in spans.spans
        if span.name.endswith("job")
    )
    assert counted == {("whole job", "migrated", 1): 1, ("prefill job", "cancelled", 2): 1}
    assert stages(spans.spans, "prefill job") == ["kv export"]
    assert value(decode_metrics, "requests_total", task="whole", outcome="migrated") == 1


async def drop_export(running: Cluster, node: Node, epoch: Epoch) -> None:
    """Close the stream of the exported request, as a router does when it gives up on the
    request."""
    export = next(iter(node.worker._jobs))
    assert (export.request_id, export.spec.epoch) == (RequestId("r"), epoch)
    export.stream.close()
