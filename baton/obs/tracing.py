"""Opens the way of spans to a collector, where there is one."""

import asyncio
from typing import Protocol

from prometheus_client import CollectorRegistry

from baton.clock import Clock
from baton.obs.span import SpanSink


class ClosableSpanSink(SpanSink, Protocol):
    def close(self) -> None:
        """Sends what is left; blocks for some seconds at most."""
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
    """None without an ``endpoint``: then OpenTelemetry is not even imported."""
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
    """When a program ends."""
    if spans is not None:
        await asyncio.to_thread(spans.close)
