"""Sees each decision of a conductor, and tells of it: metrics, a span, a line in the log."""

from collections.abc import Sequence

import structlog

from baton.clock import Clock
from baton.core.ids import BlockKey
from baton.core.placement import Placement
from baton.core.pool_plan import PoolPlan
from baton.core.trace_context import TraceContext, parse_traceparent
from baton.errors import BatonError
from baton.obs.span import Span, SpanKind, SpanSink, Value
from baton.rpc.conductor_service import ConductorCore
from conductor.metrics import ConductorMetrics, placement_kind

log = structlog.get_logger(__name__)


class ConductorTelemetry:
    """Implements :class:`baton.rpc.conductor_service.ConductorCore` by another one. ``name`` is the
    conductor's; without ``spans`` nothing is traced."""

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

    def place(
        self,
        *,
        request_id: str,
        epoch: int,
        num_tokens: int,
        max_new_tokens: int,
        keys: tuple[BlockKey, ...],
        excluded: frozenset[str],
        trace: str = "",
        session: str = "",
    ) -> Placement:
        """Raises what the other one does."""
        began = self._clock.monotonic()
        question = parse_traceparent(trace) if trace and self._spans is not None else None
        try:
            placement = self._core.place(
                request_id=request_id,
                epoch=epoch,
                num_tokens=num_tokens,
                max_new_tokens=max_new_tokens,
                keys=keys,
                excluded=excluded,
                session=session,
            )
        except Exception as error:
            now = self._clock.monotonic()
            self._metrics.note_refused(error, now - began)
            if isinstance(error, BatonError):
                log.debug(
                    "request_not_placed", request_id=request_id, epoch=epoch, error=str(error)
                )
            if question is not None:
                self._tell(question, began, now, {"baton.epoch": epoch}, str(error))
            raise
        now = self._clock.monotonic()
        self._metrics.note_placed(placement, epoch, now - began)
        if question is not None:
            self._tell(question, began, now, _told(placement, epoch))
        return placement

    def describe(self) -> tuple[Sequence[str], str]:
        return self._core.describe()

    def pool_plan(self) -> PoolPlan | None:
        return self._core.pool_plan()

    def _tell(
        self,
        question: TraceContext,
        began: float,
        ended: float,
        attributes: dict[str, Value],
        error: str = "",
    ) -> None:
        """A question may be asked several times, here and at others: each is a span of its own."""
        assert self._spans is not None
        self._num_traced += 1
        context = question.child(self._name, self._num_traced)
        kind = SpanKind.SERVER
        span = Span(
            context, question.span_id, "decide", began, ended, attributes, error=error, kind=kind
        )
        self._spans.emit([span])


def _told(placement: Placement, epoch: int) -> dict[str, Value]:
    told: dict[str, Value] = {
        "baton.epoch": epoch,
        "baton.policy": placement.policy,
        "baton.kind": placement_kind(placement),
        "baton.reason": placement.reason,
        "baton.candidates": len(placement.prefill_alternatives),
    }
    if placement.ttft_seconds is not None:
        told["baton.predicted_first_token_seconds"] = placement.ttft_seconds
    return told
