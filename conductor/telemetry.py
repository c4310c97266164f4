"""The conductor's telemetry: metrics, a span for each decision about a traced request, and a log
line for each failed decision."""

from collections.abc import Sequence

import structlog

from baton.clock import Clock
from baton.core.placement import Placement, PlacementQuery
from baton.core.pool_plan import PoolPlan
from baton.core.trace_context import TraceContext, parse_traceparent
from baton.errors import BatonError
from baton.obs.span import Span, SpanKind, SpanSink, Value
from baton.rpc.conductor_service import ConductorCore
from conductor.metrics import ConductorMetrics, placement_kind

log = structlog.get_logger(__name__)


class ConductorTelemetry:
    """Wraps another :class:`baton.rpc.conductor_service.ConductorCore` and records its decisions.
    ``name`` is the conductor's id. If ``spans`` is None, nothing is traced."""

    def __init__(
        self,
        core: ConductorCore,
        metrics: ConductorMetrics,
        clock: Clock,
        name: str,
        spans: SpanSink | None = None,
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._name = name
        self._spans = spans
        self._num_traced = 0

    def use_spans(self, spans: SpanSink | None) -> None:
        """From now on, emit spans to ``spans``, or trace nothing if it is None."""
        self._spans = spans

    def place(self, query: PlacementQuery) -> Placement:
        """Place a request. Raises the errors of the wrapped core."""
        start, epoch, trace = self._clock.monotonic(), query.epoch, query.trace
        parent = parse_traceparent(trace) if trace and self._spans is not None else None
        try:
            placement = self._core.place(query)
        except Exception as error:
            now = self._clock.monotonic()
            self._metrics.record_rejected(error, now - start)
            if isinstance(error, BatonError):
                log.debug(
                    "request_not_placed",
                    request_id=query.request_id,
                    epoch=epoch,
                    error=str(error),
                )
            if parent is not None:
                self._emit_span(parent, start, now, {"baton.epoch": epoch}, str(error))
            raise
        now = self._clock.monotonic()
        self._metrics.record_placed(placement, epoch, now - start)
        if parent is not None:
            self._emit_span(parent, start, now, _attributes(placement, epoch))
        return placement

    def describe(self) -> tuple[Sequence[str], str]:
        return self._core.describe()

    def pool_plan(self, model: str = "") -> PoolPlan | None:
        return self._core.pool_plan(model)

    def _emit_span(
        self,
        parent: TraceContext,
        start: float,
        end: float,
        attributes: dict[str, Value],
        error: str = "",
    ) -> None:
        """Emit the span of one decision. Each decision gets a span of its own, since a router may
        request several placements of one request, from this conductor and from others."""
        assert self._spans is not None
        self._num_traced += 1
        context = parent.child(self._name, self._num_traced)
        kind = SpanKind.SERVER
        span = Span(
            context, parent.span_id, "decide", start, end, attributes, error=error, kind=kind
        )
        self._spans.emit([span])


def _attributes(placement: Placement, epoch: int) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "baton.epoch": epoch,
        "baton.policy": placement.policy,
        "baton.kind": placement_kind(placement),
        "baton.reason": placement.reason,
        "baton.candidates": len(placement.prefill_alternatives) + len(placement.mixed_alternatives),
    }
    if placement.ttft_seconds is not None:
        attributes["baton.predicted_first_token_seconds"] = placement.ttft_seconds
    return attributes
