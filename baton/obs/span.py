"""Trace spans, which describe the stages of a request. They are made after the request has ended,
from the times at which its stages began and ended, so requests that are not traced cost nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from baton.core.trace_context import TraceContext

Value = str | int | float | bool


class SpanKind(StrEnum):
    """OpenTelemetry's kinds. A SERVER span answers a CLIENT span of another process."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    at_seconds: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """One stage of a request. ``parent_id`` is empty for the root of a trace. Times are from the
    process's monotonic clock. ``error`` says what went wrong; it is empty if nothing did."""

    context: TraceContext
    parent_id: str
    name: str
    begin_seconds: float
    end_seconds: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    error: str = ""
    kind: SpanKind = SpanKind.INTERNAL


class SpanSink(Protocol):
    """Receives spans. ``emit`` is called in the event loop, and never blocks or raises."""

    def emit(self, spans: Iterable[Span]) -> None: ...
