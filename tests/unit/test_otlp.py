"""Tests the export of spans to an OTLP collector: every span arrives, and the process never waits
for the collector."""

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.core.trace_context import TraceContext
from baton.obs.span import Span, SpanEvent, SpanKind, SpanSink
from baton.obs.tracing import SpanExport
from tools.otlp_collector import SpanTree, run_collector

pytestmark = pytest.mark.timeout(60)
ROOT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


def opened(endpoint: str | None, registry: CollectorRegistry) -> SpanExport:
    export = SpanExport(
        ManualClock(100.0), registry, role="router", process="router-7", cluster="blue"
    )
    export.open(endpoint)
    return export


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
        export = opened(url, registry)
        assert export.sink is not None
        export.sink.emit(spans())
        await export.close()  # sends the remaining spans
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
        export = opened(url, CollectorRegistry())
        assert export.sink is not None
        export.sink.emit(spans()[1:])
        await export.close()
        [stage] = collector.spans_of(ROOT.trace_id)
    assert SpanTree([stage]).orphans == [stage]
    assert SpanTree([stage], client_span=ROOT.span_id).orphans == []


async def test_collector_wait_returns_once_all_spans_are_there() -> None:
    with run_collector() as (collector, url):
        export = opened(url, CollectorRegistry())
        assert export.sink is not None
        export.sink.emit(spans())
        found = collector.wait(Counter({"request": 1, "stage": 1}), ROOT.trace_id, 30.0)
        assert {span.name for span in found} == {"request", "stage"}
        await export.close()


def test_without_an_endpoint_there_is_no_sink() -> None:
    registry = CollectorRegistry()
    assert opened(None, registry).sink is None
    assert list(registry.collect()) == []


async def test_the_endpoint_can_change() -> None:
    registry, used = CollectorRegistry(), list[SpanSink | None]()
    with run_collector() as (one, one_url), run_collector() as (other, other_url):
        export = opened(one_url, registry)
        first = export.sink
        assert first is not None
        first.emit(spans()[:1])
        await export.change(one_url, used.append)
        assert (export.sink, used) == (first, [])
        await export.change(other_url, used.append)
        assert export.sink is not None and used == [None, export.sink]
        export.sink.emit(spans()[1:])
        await export.change(None, used.append)
        assert used[2:] == [None, None] and export.sink is None
        await export.change(one_url, used.append)
        await export.close()
    assert [span.name for span in one.spans_of(ROOT.trace_id)] == ["request"]
    assert [span.name for span in other.spans_of(ROOT.trace_id)] == ["stage"]
    assert registry.get_sample_value("baton_trace_spans_total", {"result": "sent"}) == 2
