"""Receives spans over OTLP, by gRPC or HTTP, in this process and keeps them."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A received span. Times are in nanoseconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    instance: str
    begin: int
    end: int
    attributes: dict[str, str | int | float | bool]
    events: tuple[str, ...]
    error: str


class Collector(pb_grpc.TraceServiceServicer):
    """Collects received spans in :attr:`spans`; :meth:`wait` waits for the spans of a trace."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self._changed = Condition()

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        self.receive(request)
        return pb.ExportTraceServiceResponse()

    def receive(self, request: pb.ExportTraceServiceRequest) -> None:
        """Keep the spans of a request; from any thread."""
        with self._changed:
            self.spans.extend(_received(request))
            self._changed.notify_all()

    def wait(self, names: Counter[str], trace_id: str, seconds: float) -> list[ReceivedSpan]:
        """Wait for at most ``seconds`` until the trace has as many spans of each name as ``names``
        says; return its spans."""

        def complete() -> bool:
            return not names - Counter(span.name for span in self.spans_of(trace_id))

        with self._changed:
            self._changed.wait_for(complete, seconds)
            return self.spans_of(trace_id)

    def spans_of(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]


@dataclass(slots=True)
class SpanTree:
    """The spans of one trace. A span whose parent was not received is an orphan, unless its parent
    is ``client_span``, the client's own span."""

    spans: list[ReceivedSpan]
    client_span: str = ""
    _children: dict[str, list[ReceivedSpan]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for span in sorted(self.spans, key=lambda span: (span.begin, span.name)):
            self._children[span.parent_id].append(span)

    @property
    def roots(self) -> list[ReceivedSpan]:
        return self._children[self.client_span]

    @property
    def orphans(self) -> list[ReceivedSpan]:
        known = {span.span_id for span in self.spans} | {self.client_span}
        return [span for span in self.spans if span.parent_id not in known]

    def children_of(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        return self._children[span.span_id]

    def describe(self) -> str:
        """Return one line per span, indented below its parent."""
        return "\n".join(line for root in self.roots for line in self._lines(root, 0))

    def _lines(self, span: ReceivedSpan, depth: int) -> Iterator[str]:
        millis = (span.end - span.begin) / 1e6
        yield f"{'  ' * depth}{span.name}  {span.instance}  {millis:.2f} ms  {span.error}".rstrip()
        for child in self.children_of(span):
            yield from self._lines(child, depth + 1)


@contextmanager
def run_collector(port: int = 0) -> Iterator[tuple[Collector, str]]:
    """Run a collector on loopback; yield it and its URL."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextmanager
def run_http_collector() -> Iterator[tuple[Collector, str]]:
    """Run a collector for OTLP/HTTP on loopback; yield it and its URL."""
    collector = Collector()
    handler = type("Handler", (_Handler,), {"collector": collector})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield collector, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    collector: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        is_known = (self.path, self.headers["content-type"]) == ("/v1/traces", PROTOBUF)
        if is_known:
            self.collector.receive(pb.ExportTraceServiceRequest.FromString(body))
        answer = pb.ExportTraceServiceResponse().SerializeToString()
        self.send_response(200 if is_known else 404)
        self.send_header("content-type", PROTOBUF)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log."""


def _received(request: pb.ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for group in request.resource_spans:
        resource = {each.key: each.value.string_value for each in group.resource.attributes}
        for scope in group.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    resource.get("service.name", ""),
                    resource.get("service.instance.id", ""),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    {each.key: _plain(each.value) for each in span.attributes},
                    tuple(event.name for event in span.events),
                    span.status.message
                    if span.status.code == span.status.STATUS_CODE_ERROR
                    else "",
                )


def _plain(value: AnyValue) -> str | int | float | bool:
    kind = value.WhichOneof("value")
    assert kind in ("string_value", "int_value", "double_value", "bool_value"), kind
    plain: str | int | float | bool = getattr(value, kind)
    return plain
