"""Tests the export of spans to an OTLP collector: every span arrives, and the process never waits
for the collector."""

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.config import load_settings
from baton.config.otlp_protocol import OtlpProtocol
from baton.core.trace_context import TraceContext
from baton.errors import Invalid
from baton.obs.span import Span, SpanEvent, SpanKind, SpanSink
from baton.obs.tracing import SpanExport
from tests.otlp_collector import SpanTree, run_collector, run_http_collector

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


@pytest.mark.parametrize(
    "variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"]
)
async def test_spans_are_sent_by_http_if_opentelemetrys_variable_says_so(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv(variable, "http/protobuf")
    with run_http_collector() as (collector, url):
        registry = CollectorRegistry()
        export = opened(url, registry)
        assert export.sink is not None
        export.sink.emit(spans())
        await export.close()
        root, stage = sorted(collector.spans_of(ROOT.trace_id), key=lambda span: span.begin)
    assert (root.name, root.begin, root.service) == ("request", 101_000_000_000, "baton-router")
    assert (stage.parent_id, stage.error, stage.events) == (ROOT.span_id, "it broke", ("chunk",))
    assert registry.get_sample_value("baton_trace_spans_total", {"result": "sent"}) == 2
    assert registry.get_sample_value("baton_trace_spans_total", {"result": "failed"}) == 0


def test_unknown_protocol_is_an_error_where_there_is_an_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    assert load_settings().trace_endpoint is None
    message = "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'; it must be grpc or http/protobuf"
    with pytest.raises(Invalid, match=message):
        load_settings(trace_endpoint="http://collector")


@pytest.mark.parametrize(
    ("endpoint", "by_grpc", "by_http"),
    [
        ("http://collector", "http://collector:4317", "http://collector:4318/v1/traces"),
        ("http://collector:9/", "http://collector:9", "http://collector:9/v1/traces"),
        ("http://[::1]", "http://[::1]:4317", "http://[::1]:4318/v1/traces"),
        ("https://collector", "https://collector", "https://collector/v1/traces"),
    ],
)
def test_each_protocol_has_its_port_and_path(endpoint: str, by_grpc: str, by_http: str) -> None:
    assert OtlpProtocol.GRPC.url(endpoint) == by_grpc
    assert OtlpProtocol.HTTP.url(endpoint) == by_http


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
