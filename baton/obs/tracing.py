"""Opens and closes the sink that exports spans to a collector, if one is configured."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry

from baton.clock import Clock
from baton.obs.span import SpanSink

if TYPE_CHECKING:
    from prometheus_client import Counter


class ClosableSpanSink(SpanSink, Protocol):
    def close(self) -> None:
        """Send the remaining spans. Blocks for a few seconds at most."""
        ...


class SpanExport:
    """Exports a program's spans to the collector at ``endpoint``, which can change. ``sink`` is
    None while there is no endpoint; OpenTelemetry is not imported before there is one."""

    def __init__(
        self, clock: Clock, registry: CollectorRegistry, *, role: str, process: str, cluster: str
    ) -> None:
        self.sink: ClosableSpanSink | None = None
        self._endpoint: str | None = None
        self._clock = clock
        self._registry = registry
        self._counter: Counter | None = None
        self._resource = {
            "service.name": f"baton-{role}",
            "service.namespace": cluster,
            "service.instance.id": process,
        }

    def open(self, endpoint: str | None) -> None:
        """Start to export to ``endpoint``; None exports nothing. Call this before any other
        method. Raises Invalid if OpenTelemetry's variables name an unknown protocol."""
        self._endpoint = endpoint
        if endpoint is None:
            return
        from baton.config.environment import otlp_protocol
        from baton.obs.otlp_sink import OtlpSpanSink, create_span_counter

        self._counter = self._counter or create_span_counter(self._registry)
        self.sink = OtlpSpanSink(
            endpoint, self._resource, self._clock, self._counter, otlp_protocol()
        )

    async def change(
        self, endpoint: str | None, use_sink: Callable[[SpanSink | None], None]
    ) -> None:
        """Export to another endpoint. ``use_sink`` is called with None first, then with the new
        sink; spans that are emitted in between are lost."""
        if endpoint == self._endpoint:
            return
        use_sink(None)
        await self.close()
        await asyncio.to_thread(self.open, endpoint)
        use_sink(self.sink)

    async def close(self) -> None:
        """Close the sink, if there is one."""
        sink, self.sink = self.sink, None
        if sink is not None:
            await asyncio.to_thread(sink.close)
