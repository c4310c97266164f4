"""Tests that the spans of a traced request form a single tree, whatever the request's outcome."""

import asyncio
from collections.abc import Iterable

import pytest

from baton.clock import ManualClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.placement import Placement, PlacementQuery
from baton.core.request import RequestOutput
from baton.core.trace_context import TraceContext, parse_traceparent
from baton.errors import Overloaded
from baton.obs.span import Span
from baton.text.tokenizer import Tokenizer
from router.generation.record import GenerationRecord
from router.telemetry.tracing import RequestTrace, RequestTracer, build_request_spans
from testkit.fakes.span_sink import MemorySpanSink
from tests.router_harness import CHAT, COMPLETE, chat, open_harness, write_tokenizer
from tests.unit.router.generation.test_generation import GenerationHarness

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def drawn(spans: Iterable[Span], above: str = "") -> list[str]:
    """Return the span names, indented below their parents. All spans must belong to one tree, below
    the span whose id is ``above``."""
    spans = list(spans)
    assert len({span.context.span_id for span in spans}) == len(spans)
    assert len({span.context.trace_id for span in spans}) == 1

    def below(parent: str, depth: int) -> list[str]:
        lines = []
        for span in sorted(spans, key=lambda span: span.begin_seconds):
            if span.parent_id == parent:
                assert span.begin_seconds <= span.end_seconds, span
                lines += ["  " * depth + span.name, *below(span.context.span_id, depth + 1)]
        return lines

    lines = below(above, 0)
    assert len(lines) == len(spans), "each span's parent must be in the tree"
    return lines


WHOLE = ["request", "  tokenise", "  place", "  attempt", "    first token", "    stream"]


async def test_spans_of_an_answer_are_one_tree_below_the_clients_span(tokenizer: Tokenizer) -> None:
    spans = MemorySpanSink()
    async with open_harness(tokenizer) as (router, client):
        router.service.telemetry.tracer = RequestTracer(spans, 0.0, router.service.clock)
        response = await client.post(CHAT, json=chat(), headers={"traceparent": SAMPLED})
    assert drawn(spans.spans, above=SPAN_ID) == WHOLE
    named = {span.name: span for span in spans.spans}
    assert named["request"].context.trace_id == TRACE_ID
    assert named["request"].attributes == {
        "baton.request_id": response.headers["x-baton-request-id"],
        "baton.endpoint": "chat",
        "http.response.status_code": 200,
        "gen_ai.usage.input_tokens": response.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": response.json()["usage"]["completion_tokens"],
    }
    assert named["attempt"].attributes["baton.prefill"] == "p0"
    assert named["attempt"].attributes["baton.decode"] == "d0"
    # The workers received the attempt's span as the parent, and the conductor the placement's span.
    for worker in (router.prefill, router.decode):
        [job] = worker.submitted
        assert job.spec.trace == named["attempt"].context.traceparent
    assert router.placer.queries[0].trace == named["place"].context.traceparent
    assert not any(span.error for span in spans.spans)


async def test_each_choice_has_its_own_spans(tokenizer: Tokenizer) -> None:
    spans = MemorySpanSink()
    async with open_harness(tokenizer) as (router, client):
        router.service.telemetry.tracer = RequestTracer(spans, 1.0, router.service.clock)
        await client.post(COMPLETE, json={"prompt": "Hi", "n": 3, "max_tokens": 4})
    names = sorted(line.strip() for line in drawn(spans.spans))
    assert names == sorted(line.strip() for line in [*WHOLE[:2], *3 * WHOLE[2:]])


@pytest.mark.parametrize(
    ("sample", "traceparent", "traced"),
    [
        (0.0, None, False),
        (1.0, None, True),
        (1.0, UNSAMPLED, False),
        (0.0, SAMPLED, True),
        (0.0, "nonsense", False),
    ],
)
async def test_client_decides_about_sampling_and_otherwise_the_sample_rate(
    tokenizer: Tokenizer, sample: float, traceparent: str | None, traced: bool
) -> None:
    spans = MemorySpanSink()
    async with open_harness(tokenizer) as (router, client):
        router.service.telemetry.tracer = RequestTracer(spans, sample, router.service.clock)
        headers = {"traceparent": traceparent} if traceparent else {}
        await client.post(CHAT, json=chat(), headers=headers)
        assert bool(router.prefill.submitted[0].spec.trace) is traced
        assert bool(router.placer.queries[0].trace) is traced
    assert bool(spans.spans) is traced


def test_sample_rate_is_met_and_trace_ids_come_from_request_ids() -> None:
    tracing = RequestTracer(MemorySpanSink(), 0.25, ManualClock())
    ids = [f"cmpl-{number * 2654435761 % 2**128:032x}" for number in range(1, 4001)]
    begun = [tracing.begin(request_id, None) for request_id in ids]
    assert 0.22 < sum(trace is not None for trace in begun) / len(ids) < 0.28
    for request_id, trace in zip(ids, begun, strict=True):
        assert trace is None or trace.root.trace_id == request_id.removeprefix("cmpl-")
    everything = RequestTracer(MemorySpanSink(), 1.0, ManualClock())
    assert all(everything.begin(request_id, None) for request_id in ids)


async def test_without_tracing_no_context_is_propagated(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        await client.post(CHAT, json=chat(), headers={"traceparent": SAMPLED})
        assert router.prefill.submitted[0].spec.trace == router.placer.queries[0].trace == ""


async def test_refused_request_ends_with_its_placement_span(tokenizer: Tokenizer) -> None:
    spans = MemorySpanSink()

    async def refuse(query: PlacementQuery) -> Placement:
        raise Overloaded("all workers are full")

    async with open_harness(tokenizer) as (router, client):
        router.placer.place = refuse  # type: ignore[method-assign]
        router.service.telemetry.tracer = RequestTracer(spans, 1.0, router.service.clock)
        response = await client.post(CHAT, json=chat())
    assert response.status_code == 429
    assert drawn(spans.spans) == ["request", "  tokenise", "  place"]
    named = {span.name: span for span in spans.spans}
    assert named["place"].error == "all workers are full"
    assert named["request"].error == ""  # a refusal is no error of the server
    assert named["request"].attributes["http.response.status_code"] == 429


async def test_invalid_request_has_spans_too(tokenizer: Tokenizer) -> None:
    spans = MemorySpanSink()
    async with open_harness(tokenizer) as (router, client):
        router.service.telemetry.tracer = RequestTracer(spans, 1.0, router.service.clock)
        await client.post(CHAT, json={"model": "demo"})
    assert drawn(spans.spans) == ["request", "  tokenise"]
    assert spans.spans[0].attributes["http.response.status_code"] == 400


def traced(scene: GenerationHarness) -> RequestTrace:
    root = TraceContext(TRACE_ID, SPAN_ID)
    trace = RequestTrace(root, "", "r", 0.0)
    trace.set_records([scene.record], 0.0)
    return trace


@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_failover_stays_in_the_tree(victim: str) -> None:
    """The failed attempt's span has the error, and the next attempt continues the stream."""
    scene = GenerationHarness(automatic=False)
    trace = traced(scene)
    collecting = asyncio.create_task(scene.collect())
    await asyncio.sleep(0.01)
    if victim == "d0":
        scene.p0.step()
        scene.d0.step()
        await scene.wait_for_tokens(2)
    scene.workers[victim].kill()
    while not (scene.d1.submitted or len(scene.d0.submitted) > 1):
        await asyncio.sleep(0.001)
    first, second = {
        job.spec.epoch: job.spec.trace
        for worker in scene.workers.values()
        for job in worker.submitted
    }.items()
    while not collecting.done():
        for worker in scene.workers.values():
            worker.step()
        await asyncio.sleep(0)
    await collecting
    spans = list(build_request_spans(trace, "chat", 200, scene.record.arrived_at + 1e9))
    parts = ["    first token"] if victim == "p0" else ["    first token", "    stream"]
    again = ["    first token", "    stream"] if victim == "p0" else ["    stream"]
    assert [line for line in drawn(spans) if line != "  tokenise"] == [
        "request", "  place", "  attempt", *parts, "  place", "  attempt", *again,
    ]  # fmt: skip
    attempts = sorted(
        (span for span in spans if span.name == "attempt"), key=lambda span: span.begin_seconds
    )
    assert victim in attempts[0].error and not attempts[1].error
    assert [span.context for span in attempts] == [
        parse_traceparent(first[1]),
        parse_traceparent(second[1]),
    ]


def test_spans_have_the_times_of_the_record() -> None:
    record = GenerationRecord(RequestId("r"), 10.0, 3)
    scene_trace = RequestTrace(TraceContext(TRACE_ID, SPAN_ID), "", "r", 10.0)
    scene_trace.set_records([record], 10.5)
    worker = GenerationHarness().d0.ref
    record.record_query(Epoch(1), 10.6)
    record.record_placement(Epoch(1), Placement(None, worker, "why", policy="p"), 11.0)
    record.record_output(RequestOutput(RequestId("r"), Epoch(1), 0, (TokenId(1),)), 12.0)
    record.record_end("stop", 15.0)
    spans = {
        span.name: (span.begin_seconds, span.end_seconds)
        for span in build_request_spans(scene_trace, "chat", 200, 15.5)
    }
    assert spans == {
        "request": (10.0, 15.5),
        "tokenise": (10.0, 10.5),
        "place": (10.6, 11.0),
        "attempt": (11.0, 15.0),
        "first token": (11.0, 12.0),
        "stream": (12.0, 15.0),
    }
