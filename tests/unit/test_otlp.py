"""Spans on their way to a collector: what is told arrives, and nobody waits for it."""

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.core.trace_context import TraceContext
from baton.obs.span import Span, SpanEvent, SpanKind
from baton.obs.tracing import close_span_sink, open_span_sink
from tools.otlp_collector import SpanTree, collecting

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


async def test_a_collector_gets_each_span_with_the_ids_and_times_that_it_was_given() -> None:
    with collecting() as (collector, url):
        registry = CollectorRegistry()
        told = opened(url, registry)
        assert told is not None
        told.emit(spans())
        await close_span_sink(told)  # sends what is left
        root, stage = sorted(collector.of(ROOT.trace_id), key=lambda span: span.begin)
    assert (root.span_id, root.parent_id, root.name) == (ROOT.span_id, "", "request")
    assert (root.begin, root.end) == (101_000_000_000, 103_000_000_000)
    assert (root.service, root.instance) == ("baton-router", "router-7")
    assert root.attributes == {"baton.request_id": "r"} and not root.error
    assert (stage.parent_id, stage.error) == (ROOT.span_id, "it broke")
    assert stage.attributes == {"n": 3, "x": 0.5, "ok": True}
    assert stage.events == ("chunk",)
    tree = SpanTree([root, stage])
    assert tree.roots == [root] and tree.orphans == [] and tree.below(root) == [stage]
    assert registry.get_sample_value("baton_trace_spans_total", {"result": "made"}) == 2
    assert registry.get_sample_value("baton_trace_spans_total", {"result": "sent"}) == 2


async def test_a_span_whose_parent_never_came_is_an_orphan() -> None:
    with collecting() as (collector, url):
        told = opened(url, CollectorRegistry())
        assert told is not None
        told.emit(spans()[1:])
        await close_span_sink(told)
        [stage] = collector.of(ROOT.trace_id)
    assert SpanTree([stage]).orphans == [stage]
    assert SpanTree([stage], client_span=ROOT.span_id).orphans == []


async def test_waiting_for_names_returns_as_soon_as_they_are_there() -> None:
    with collecting() as (collector, url):
        told = opened(url, CollectorRegistry())
        assert told is not None
        told.emit(spans())
        found = collector.wait(Counter({"request": 1, "stage": 1}), ROOT.trace_id, 30.0)
        assert {span.name for span in found} == {"request", "stage"}
        await close_span_sink(told)


def test_without_an_endpoint_there_is_nothing() -> None:
    registry = CollectorRegistry()
    assert opened(None, registry) is None
    assert list(registry.collect()) == []
