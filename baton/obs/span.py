"""A stage of a request, once it is over: made from what was written down anyway.

Nothing is traced while a request runs. Whoever knows when its stages began and ended tells of them
afterwards, so that a request that is not traced costs nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from baton.core.trace_context import TraceContext

Value = str | int | float | bool


class SpanKind(StrEnum):
    """SERVER answers a CLIENT span of another process."""

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
    """``parent_id`` is empty for the root of a tree. Times are those of the process's monotonic
    clock. ``error`` says what went wrong, and is empty when nothing did."""

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
    """Where spans go. Called from the event loop; never waits, never raises."""

    def emit(self, spans: Iterable[Span]) -> None: ...


class MemorySpanSink:
    """The twin: keeps what it is told."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def emit(self, spans: Iterable[Span]) -> None:
        self.spans.extend(spans)
