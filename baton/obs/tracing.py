"""Opens and closes the sink that exports spans to a collector, if one is configured."""

import asyncio
from typing import Protocol

from prometheus_client import CollectorRegistry

from baton.clock import Clock
from baton.obs.span import SpanSink


class ClosableSpanSink(SpanSink, Protocol):
    def close(self) -> None:
        """Send the remaining spans. Blocks for a few seconds at most."""
        ...


def open_span_sink(
    endpoint: str | None,
    clock: Clock,
    registry: CollectorRegistry,
    *,
    role: str,
    process: str,
    cluster: str,
) -> ClosableSpanSink | None:
    """Open a sink. If ``endpoint`` is None, return None without importing OpenTelemetry."""
    if endpoint is None:
        return None
    from baton.obs.otlp_sink import OtlpSpanSink

    resource = {
        "service.name": f"baton-{role}",
        "service.namespace": cluster,
        "service.instance.id": process,
    }
    return OtlpSpanSink(endpoint, resource, clock, registry)


async def close_span_sink(spans: ClosableSpanSink | None) -> None:
    """Close the sink, if there is one, when a program stops."""
    if spans is not None:
        await asyncio.to_thread(spans.close)
