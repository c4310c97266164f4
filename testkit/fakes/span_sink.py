"""A sink of spans."""

from collections.abc import Iterable

from baton.obs.span import Span


class MemorySpanSink:
    """Implements :class:`baton.obs.span.SpanSink`: keeps spans in memory."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def emit(self, spans: Iterable[Span]) -> None:
        self.spans.extend(spans)
