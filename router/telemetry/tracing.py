"""Decides which requests are traced, and emits their spans once they have ended (docs/tracing.md).

While a request runs, only its trace context is passed on to workers and conductors. After the
request has ended, its spans are made from the times in its records.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from re import fullmatch

from baton.clock import Clock
from baton.core.trace_context import TraceContext, parse_traceparent
from baton.obs.span import Span, SpanKind, SpanSink, Value
from router.generation.record import GenerationRecord, PlacementRecord

SAMPLED_DIGITS = 8
"""How many of the last hex digits of a trace id decide whether the request is sampled. In trace ids
that are made from the router's own request ids, these digits are random, too."""


@dataclass(slots=True)
class RequestTrace:
    """A traced request that is in progress. Times are monotonic, in seconds. ``parent_id`` is the
    id of the client's span, empty if there is none."""

    root: TraceContext
    parent_id: str
    request_id: str
    began_at: float
    prepared_at: float | None = None
    records: Sequence[GenerationRecord] = ()

    def set_records(self, records: Sequence[GenerationRecord], now: float) -> None:
        """Set the records of the answers. Call this when their generation starts, at the time
        ``now``."""
        self.prepared_at = now
        self.records = records
        for record in records:
            record.trace = self.root


class RequestTracer:
    """Traces requests. If the client has not decided whether its request is traced, it is traced
    with probability ``sample`` (0 to 1)."""

    def __init__(self, spans: SpanSink, sample: float, clock: Clock) -> None:
        self._spans = spans
        self._limit = int(sample * 16**SAMPLED_DIGITS)
        self._clock = clock

    def begin(self, request_id: str, traceparent: str | None) -> RequestTrace | None:
        """Begin a trace, or return None if the request is not traced. If the client sent no valid
        ``traceparent``, the trace id is made from ``request_id``: from its last 32 hex digits if it
        ends with that many, else from its hash."""
        client_context = parse_traceparent(traceparent) if traceparent else None
        if client_context is None:
            trace_id = _trace_id(request_id)
            sampled = int(trace_id[-SAMPLED_DIGITS:], 16) < self._limit
            parent = TraceContext(trace_id, "", sampled)
        else:
            parent = client_context
        if not parent.is_sampled:
            return None
        root = parent.child("request", request_id)
        return RequestTrace(root, parent.span_id, request_id, self._clock.monotonic())

    def end(self, trace: RequestTrace, endpoint: str, status: int) -> None:
        """Emit the spans of a request. Call this once, however the request ended."""
        self._spans.emit(build_request_spans(trace, endpoint, status, self._clock.monotonic()))


def build_request_spans(
    trace: RequestTrace, endpoint: str, status: int, now: float
) -> Iterator[Span]:
    """Yield the router's spans: the request, its preparation, and each answer's placement queries
    and attempts."""
    attributes: dict[str, Value] = {
        "baton.request_id": trace.request_id,
        "baton.endpoint": endpoint,
        "http.response.status_code": status,
        "gen_ai.usage.input_tokens": sum(each.num_prompt_tokens for each in trace.records),
        "gen_ai.usage.output_tokens": sum(each.num_tokens for each in trace.records),
    }
    yield Span(
        trace.root,
        trace.parent_id,
        "request",
        trace.began_at,
        now,
        attributes,
        error=_error(trace.records, status),
        kind=SpanKind.SERVER,
    )
    prepared_at = trace.prepared_at if trace.prepared_at is not None else now
    tokenise = trace.root.child("tokenise")
    yield Span(tokenise, trace.root.span_id, "tokenise", trace.began_at, prepared_at)
    for record in trace.records:
        yield from _generation_spans(record, now)


def _generation_spans(record: GenerationRecord, now: float) -> Iterator[Span]:
    ended_at = now if record.total_seconds is None else record.arrived_at + record.total_seconds
    for placed in record.placements:
        yield _placement_span(record, placed.epoch, placed.queried_at, placed.placed_at, placed)
        yield from _attempt_spans(record, placed, ended_at)
    if record.pending_query is not None:  # a query without an answer
        epoch, asked_at = record.pending_query
        yield _placement_span(record, epoch, asked_at, ended_at)


def _placement_span(
    record: GenerationRecord,
    epoch: int,
    asked_at: float,
    answered_at: float,
    placed: PlacementRecord | None = None,
) -> Span:
    assert record.trace is not None
    attributes: dict[str, Value] = {"baton.epoch": epoch}
    if placed is not None:
        attributes["baton.policy"] = placed.placement.policy
        attributes["baton.reason"] = placed.placement.reason
    return Span(
        record.query_span(epoch),
        record.trace.span_id,
        "place",
        asked_at,
        answered_at,
        attributes,
        error="" if placed is not None else record.error or "no placement",
        kind=SpanKind.CLIENT,
    )


def _attempt_spans(
    record: GenerationRecord, placed: PlacementRecord, answer_end: float
) -> Iterator[Span]:
    """Yield the spans of the attempt on one placement: the whole attempt, the wait for the first
    token, and the stream of the tokens that this attempt contributed to the answer."""
    assert record.trace is not None
    context = record.attempt_span(placed.epoch)
    began_at = placed.placed_at
    ended_at = answer_end if placed.ended_at is None else placed.ended_at
    yield Span(
        context,
        record.trace.span_id,
        "attempt",
        began_at,
        ended_at,
        _placed_attributes(record, placed),
        error=placed.error or (record.error if placed is record.placements[-1] else ""),
        kind=SpanKind.CLIENT,
    )
    first_at = answer_end
    if record.ttft_seconds is not None:
        first_at = record.arrived_at + record.ttft_seconds
    if began_at < first_at:
        token_at = min(first_at, ended_at)
        yield Span(context.child("first token"), context.span_id, "first token", began_at, token_at)
    if record.ttft_seconds is not None and first_at < ended_at:
        stream_began_at = max(first_at, began_at)
        yield Span(context.child("stream"), context.span_id, "stream", stream_began_at, ended_at)


def _placed_attributes(record: GenerationRecord, placed: PlacementRecord) -> dict[str, Value]:
    placement = placed.placement
    attributes: dict[str, Value] = {
        "baton.epoch": placed.epoch,
        "baton.answer_id": record.request_id,
        "baton.decode": placement.decode.id,
    }
    if placement.prefill is not None:
        attributes["baton.prefill"] = placement.prefill.id
    if placed is record.placements[-1]:
        attributes["baton.cached_tokens"] = record.cached_tokens or 0
        attributes["baton.finish_reason"] = record.finish_reason
    return attributes


def _error(records: Sequence[GenerationRecord], status: int) -> str:
    """Return the error of a request's span, empty if there is none. A status from 400 to 499 (an
    invalid request, or a client that disconnected) is no error of the server."""
    failures = [record.error for record in records if record.error]
    if status >= 500:
        return failures[0] if failures else f"status {status}"
    return failures[0] if failures and status < 400 else ""


def _trace_id(request_id: str) -> str:
    digits = request_id.rpartition("-")[2]
    if fullmatch("[0-9a-f]{32}", digits) and digits.strip("0"):
        return digits
    return blake2b(request_id.encode(), digest_size=16).hexdigest()
