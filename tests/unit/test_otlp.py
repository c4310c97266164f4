"""Spans are exported to an OTLP collector: every span arrives, and the process never waits for the
collector."""

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.core.trace_context import TraceContext
from baton.obs.span import Span, SpanEvent, SpanKind
from baton.obs.tracing import close_span_sink, open_span_sink
from tools.otlp_collector import SpanTree, run_collector

pytestmark = pytest.mark.timeout(60)
ROOT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


def opened(endpoint: str | None, registry: CollectorRegistry):
    return open_span_sink(
        endpoint, ManualClock(100.0), registry, role="router", process="router-7", cluster="blue"
    )


def spans() -> list[Span]:
    stage = ROOT.child("stage")
    event = SpanEvent("chunk", 101.5, {"tokens": 16})
    return [
        Span(ROOT, "", "request", 101.0, 103.0, {"baton.request_id": "r"}, kind=SpanKind.SERVER),
        Span(stage, ROOT.span_id, "stage", 101.25, 102.0, {"n": 3, "x": 0.5, "ok": True}, (event,),
             error="it broke"),
    ]  # fmt: skip


async def test_collector_receives_spans_with_their_ids_times_and_attributes() -> None:
    with run_collector() as (collector, url):
        registry = CollectorRegistry()
        sink = opened(url, registry)
        assert sink is not None
        sink.emit(spans())
        await close_span_sink(sink)  # sends the remaining spans
        root, stage = sorted(collector.spans_of(ROOT.trace_id), key=lambda span: span.begin)
    assert (root.span_id, root.parent_id, root.name) == (ROOT.span_id, "", "request")
    assert (root.begin, root.end) == (101_000_000_000, 103_000_000_000)
    assert (root.service, root.instance) == ("baton-router", "router-7")
    assert root.attributes == {"baton.request_id": "r"} and not root.error
    assert (stage.parent_id, stage.error) == (ROOT.span_id, "it broke")
    assert stage.attributes == {"n": 3, "x": 0.5, "ok": True}
    assert stage.events == ("chunk",)
    tree = SpanTree([root, stage])
    assert tree.roots == [root] and tree.orphans == [] and tree.children_of(root) == [stage]
    assert registry.get_sample_value("baton_trace_spans_total", {"result": "made"}) == 2
    assert registry.get_sample_value("baton_trace_spans_total", {"result": "sent"}) == 2


async def test_span_without_its_parent_is_an_orphan() -> None:
    with run_collector() as (collector, url):
        sink = opened(url, CollectorRegistry())
        assert sink is not None
        sink.emit(spans()[1:])
        await close_span_sink(sink)
        [stage] = collector.spans_of(ROOT.trace_id)
    assert SpanTree([stage]).orphans == [stage]
    assert SpanTree([stage], client_span=ROOT.span_id).orphans == []


async def test_collector_wait_returns_once_all_spans_are_there() -> None:
    with run_collector() as (collector, url):
        sink = opened(url, CollectorRegistry())
        assert sink is not None
        sink.emit(spans())
        found = collector.wait(Counter({"request": 1, "stage": 1}), ROOT.trace_id, 30.0)
        assert {span.name for span in found} == {"request", "stage"}
        await close_span_sink(sink)


def test_without_an_endpoint_there_is_no_sink() -> None:
    registry = CollectorRegistry()
    assert opened(None, registry) is None
    assert list(registry.collect()) == []
