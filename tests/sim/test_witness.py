"""What two workers tell of requests that they share: exact counts, and the stages of a trace."""

from collections import Counter
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from baton.core.ids import Epoch, RequestId
from baton.core.request import FinishReason, RequestSpec
from baton.core.task import Task
from baton.core.trace_context import TraceContext
from baton.obs.span import MemorySpanSink, Span
from baton.worker.worker import WorkerConfig
from tests.sim.test_handoff import hand_off
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


async def test_a_handed_over_request_is_counted_on_both_sides() -> None:
    prompt, max_tokens = list(range(50)), 6
    async with cluster() as running:
        await hand_off(running, request("r", prompt, max_tokens))
        await settled(running)
        await running.prefill.worker.inspect()
        reader, writer = running.prefill.metrics, running.decode.metrics
        layout_bytes = running.decode.runner.block_size_bytes
    assert value(reader, "requests_total", task="prefill", outcome="done") == 1
    assert value(writer, "requests_total", task="decode", outcome="done") == 1
    # Chunks of 8 tokens: seven steps read the prompt, and the last token of it is sampled there.
    assert value(reader, "step_seconds_count", kind="prefill") == 7
    assert value(reader, "computed_tokens_total", phase="prefill") == 50
    assert value(reader, "prefix_tokens_total", source="computed") == 50
    assert value(reader, "prefix_tokens_total", source="device") == 0
    assert value(reader, "queue_seconds_count") == 1
    assert value(reader, "handoff_held_seconds_count") == 1
    # Five more tokens, one step each.
    assert value(writer, "step_seconds_count", kind="decode") == 5
    assert value(writer, "computed_tokens_total", phase="decode") == 5
    assert value(writer, "batch_requests_sum") == 5
    assert value(writer, "handoff_bytes_total", transport="memory") == 13 * layout_bytes
    assert value(writer, "handoff_exposed_seconds_count") == 1
    assert value(writer, "queue_seconds_count") == 0


async def test_a_prompt_that_is_known_is_counted_as_cached() -> None:
    async with cluster() as running:
        for name in ("a", "b"):
            await hand_off(running, request(name, list(range(41)), 2))
            await settled(running)
        reader = running.prefill.metrics
    assert value(reader, "prefix_tokens_total", source="computed") == 41 + 1
    assert value(reader, "prefix_tokens_total", source="device") == 40


async def test_blocks_and_requests_are_those_of_the_engine() -> None:
    async with cluster(prefill_blocks=32) as running:
        stream = running.prefill.worker.open_stream()
        stream.submit(request("r", list(range(20)), 4), Task.PREFILL, None)
        await collect(stream, bool)
        await running.prefill.worker._refresh_load()
        reader = running.prefill.metrics
        states = ("free", "filling", "idle", "referenced", "quarantined")
        blocks = {state: value(reader, "blocks", state=state) for state in states}
        assert blocks == {
            "free": 27, "filling": 0, "idle": 0, "referenced": 5, "quarantined": 0,
        }  # fmt: skip
        assert value(reader, "sequences", state="held") == 1
        assert value(reader, "preemptions_total") == 0
        stream.close()
        await running.prefill.wait_until_free()
    assert value(reader, "requests_total", task="prefill", outcome="dropped") == 1


async def test_what_is_refused_and_what_fails_is_counted_by_its_status() -> None:
    async with cluster(config=WorkerConfig(max_jobs=1)) as running:
        stream = running.decode.worker.open_stream()
        stream.submit(request("long", list(range(20)), 100), Task.WHOLE, None)
        stream.submit(request("late", list(range(20)), 4), Task.WHOLE, None)
        refused = await collect(stream, is_finished)
        assert refused[-1].request_id == "late"
        stream.close()
        await running.decode.wait_until_free()
        writer = running.decode.metrics
    assert value(writer, "failures_total", status="RESOURCE_EXHAUSTED") == 1
    assert value(writer, "requests_total", task="whole", outcome="dropped") == 1


# -- spans ----------------------------------------------------------------------------------


def stages(spans: list[Span], job: str) -> list[str]:
    """Of the job of that name, in order; each within the job."""
    [found] = [span for span in spans if span.name == job]
    assert found.parent_id == ATTEMPT.span_id
    below = [span for span in spans if span.parent_id == found.context.span_id]
    for span in below:
        assert found.begin_seconds <= span.begin_seconds <= span.end_seconds <= found.end_seconds
    return [span.name for span in sorted(below, key=lambda s: (s.begin_seconds, s.end_seconds))]


def assert_whole(spans: list[Span]) -> None:
    """No orphan, no id twice."""
    known = {span.context.span_id for span in spans}
    assert len(known) == len(spans)
    assert all(span.parent_id in known | {ATTEMPT.span_id} for span in spans)


async def test_the_stages_of_a_handed_over_request() -> None:
    spans = MemorySpanSink()
    async with cluster(spans=spans) as running:
        await hand_off(running, traced(request("r", list(range(50)), 6)))
        await settled(running)
    assert_whole(spans.spans)
    assert stages(spans.spans, "prefill job") == ["queue", "prefill", "hand-off"]
    assert stages(spans.spans, "decode job") == ["hand-off wait", "queue", "pull", "decode"]
    named = {span.name: span for span in spans.spans if span.name != "queue"}
    told = [event.attributes["baton.computed_tokens"] for event in named["prefill"].events]
    assert told == [8, 16, 24, 32, 40, 48, 50]
    assert named["decode"].attributes == {"baton.tokens": 6}
    assert named["pull"].attributes["baton.transport"] == "memory"
    assert named["prefill job"].attributes["baton.outcome"] == "done"
    assert named["decode job"].attributes["baton.outcome"] == "done"


async def test_a_request_that_one_worker_does_alone() -> None:
    spans = MemorySpanSink()
    async with cluster(spans=spans) as running:
        stream = running.decode.worker.open_stream()
        stream.submit(traced(request("r", list(range(20)), 4)), Task.WHOLE, None)
        await collect(stream, is_finished)
        stream.close()
        await running.decode.wait_until_free()
    assert_whole(spans.spans)
    assert stages(spans.spans, "whole job") == ["queue", "prefill", "decode"]


async def test_a_prompt_that_is_scored_has_the_stages_of_others() -> None:
    spans = MemorySpanSink()
    async with cluster(spans=spans) as running:
        await hand_off(running, traced(request("r", list(range(20)), 4, prompt_logprobs=1)))
        await settled(running)
        reader = running.prefill.metrics
    assert stages(spans.spans, "prefill job") == ["queue", "prefill", "hand-off"]
    assert value(reader, "prefix_tokens_total", source="computed") == 20


async def test_what_is_not_traced_leaves_nothing() -> None:
    spans = MemorySpanSink()
    async with cluster(spans=spans) as running:
        await hand_off(running, request("r", list(range(20)), 4))
        await hand_off(running, replace(request("s", list(range(20)), 4), trace="nonsense"))
        await settled(running)
    assert spans.spans == []


@pytest.mark.parametrize("moment", [1, 2])
async def test_a_cancelled_request_ends_its_spans_too(moment: int) -> None:
    spans = MemorySpanSink()
    async with cluster(spans=spans) as running:
        spec = traced(request("r", list(range(50)), 60))
        gate = running.decode.runner.close_after(moment)
        await hand_off(running, spec, cancel_after=moment)
        gate.open()
        await settled(running)
    assert_whole(spans.spans)
    jobs = {s.name: s.attributes["baton.outcome"] for s in spans.spans if s.name.endswith("job")}
    assert set(jobs) == {"prefill job", "decode job"}
    assert jobs["decode job"] == "dropped"


async def test_a_moved_answer_is_one_job_here_and_a_held_one_after_it() -> None:
    """The heir is held under the attempt that it comes from, so its span has a parent."""
    spans = MemorySpanSink()
    config = WorkerConfig(finish_seconds=0.0)
    async with cluster(config=config, spans=spans) as running:
        node = running.decode
        gate = node.runner.close_after(4)
        stream = node.worker.open_stream()
        stream.submit(traced(request("r", list(range(20)), 200)), Task.WHOLE, None)
        outputs = await collect(stream, bool)
        node.worker.start_drain()
        await gate.open_slowly(stream, outputs)
        assert outputs[-1].finish_reason is FinishReason.MOVED
        await take_over(running, node, Epoch(2))
        await settled(running)
        writer = node.metrics
    assert_whole(spans.spans)
    counted = Counter(
        (span.name, span.attributes["baton.outcome"], span.attributes["baton.epoch"])
        for span in spans.spans
        if span.name.endswith("job")
    )
    assert counted == {("whole job", "moved", 1): 1, ("prefill job", "dropped", 2): 1}
    assert stages(spans.spans, "prefill job") == ["hand-off"]
    assert value(writer, "requests_total", task="whole", outcome="moved") == 1


async def take_over(running: Cluster, node: Node, epoch: Epoch) -> None:
    """The router gives the held answer up."""
    held = next(iter(node.worker._jobs.values()))
    assert (held.request_id, held.spec.epoch) == (RequestId("r"), epoch)
    held.stream.close()
