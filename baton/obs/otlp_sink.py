"""Exports spans to a collector over OTLP, with OpenTelemetry's own SDK."""

import threading
from collections.abc import Iterable, Sequence

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from prometheus_client import CollectorRegistry, Counter

from baton.clock import Clock
from baton.config.otlp_protocol import OtlpProtocol
from baton.obs.span import Span, SpanKind

MAX_WAITING = 8192
"""Spans not yet sent, some kilobytes each; beyond this, the oldest are dropped."""

BATCH_SPANS = 512
BATCH_SECONDS = 1.0
SEND_SECONDS = 5.0
"""Timeout for the collector to accept a batch, retries included."""

CLOSE_SECONDS = 2.0
"""Time to send the last spans when the program stops."""

_KINDS = {
    SpanKind.INTERNAL: api.SpanKind.INTERNAL,
    SpanKind.SERVER: api.SpanKind.SERVER,
    SpanKind.CLIENT: api.SpanKind.CLIENT,
}


def create_span_counter(registry: CollectorRegistry | None) -> Counter:
    return Counter(
        "baton_trace_spans_total",
        "Spans, by what became of them: made here, sent, or failed to be sent.",
        ["result"],
        registry=registry,
    )


class OtlpSpanSink:
    """Implements :class:`baton.obs.span.SpanSink`. A thread of the SDK sends the spans; if the
    collector is slow or down, spans are lost, but requests are not affected. ``endpoint`` is a URL:
    http is plain text, https is TLS. ``resource`` describes the process."""

    def __init__(
        self,
        endpoint: str,
        resource: dict[str, str],
        clock: Clock,
        counter: Counter | None = None,
        protocol: OtlpProtocol = OtlpProtocol.GRPC,
    ) -> None:
        """Open the sink. ``counter`` is a counter that :func:`create_span_counter` returned."""
        self._clock = clock
        self._ids = _PresetIds()
        self._counter = counter or create_span_counter(None)
        exporter = _CountedExporter(_create_exporter(endpoint, protocol), self._counter)
        self._processor = BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_WAITING,
            schedule_delay_millis=BATCH_SECONDS * 1000,
            max_export_batch_size=BATCH_SPANS,
        )
        provider = TracerProvider(
            sampler=ALWAYS_ON,  # sampling was decided where the trace began
            resource=Resource.create(dict(resource)),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("baton")
        self._made_counter = self._counter.labels("made")

    def emit(self, spans: Iterable[Span]) -> None:
        offset = self._clock.wall_nanoseconds() - int(self._clock.monotonic() * 1e9)
        for span in spans:
            self._emit(span, offset)
            self._made_counter.inc()

    def close(self) -> None:
        """Send the remaining spans, as far as time permits. Blocks for CLOSE_SECONDS at most."""
        closing = threading.Thread(target=self._processor.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _emit(self, span: Span, offset: int) -> None:
        self._ids.next_trace = int(span.context.trace_id, 16)
        self._ids.next_span = int(span.context.span_id, 16)
        made = self._tracer.start_span(
            span.name,
            context=_parent_context(span),
            kind=_KINDS[span.kind],
            attributes=span.attributes,
            start_time=offset + int(span.begin_seconds * 1e9),
        )
        for event in span.events:
            made.add_event(event.name, event.attributes, offset + int(event.at_seconds * 1e9))
        if span.error:
            made.set_status(api.StatusCode.ERROR, span.error)
        made.end(offset + int(span.end_seconds * 1e9))


def _create_exporter(endpoint: str, protocol: OtlpProtocol) -> SpanExporter:
    if protocol is OtlpProtocol.HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as ByHttp

        return ByHttp(endpoint=protocol.url(endpoint), timeout=SEND_SECONDS)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGrpc

    return ByGrpc(endpoint=protocol.url(endpoint), timeout=SEND_SECONDS)


class _PresetIds(IdGenerator):
    """Gives the SDK the ids that the spans already have."""

    def __init__(self) -> None:
        self.next_trace = 0
        self.next_span = 0

    def generate_span_id(self) -> int:
        return self.next_span

    def generate_trace_id(self) -> int:
        return self.next_trace


class _CountedExporter(SpanExporter):
    def __init__(self, exporter: SpanExporter, counter: Counter) -> None:
        self._exporter = exporter
        self._sent = counter.labels("sent")
        self._failed = counter.labels("failed")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        counter = self._sent if result is SpanExportResult.SUCCESS else self._failed
        counter.inc(len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _parent_context(span: Span) -> Context:
    """Return the context of the span's parent. It is never None, since the SDK would take None for
    the thread's current context."""
    if not span.parent_id:
        return Context()
    parent = api.SpanContext(
        int(span.context.trace_id, 16),
        int(span.parent_id, 16),
        is_remote=True,
        trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED),
    )
    return api.set_span_in_context(api.NonRecordingSpan(parent), Context())
