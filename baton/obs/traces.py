"""Opens the way of spans to a collector, where there is one."""

import asyncio
from typing import Protocol

from prometheus_client import CollectorRegistry

from baton.clock import Clock
from baton.obs.span import Spans


class OpenSpans(Spans, Protocol):
    def close(self) -> None:
        """Sends what is left; blocks for some seconds at most."""
        ...


def open_spans(
    endpoint: str | None,
    clock: Clock,
    registry: CollectorRegistry,
    *,
    role: str,
    process: str,
    cluster: str,
) -> OpenSpans | None:
    """None without an ``endpoint``: then OpenTelemetry is not even imported."""
    if endpoint is None:
        return None
    from baton.obs.otlp import OtlpSpans

    resource = {
        "service.name": f"baton-{role}",
        "service.namespace": cluster,
        "service.instance.id": process,
    }
    return OtlpSpans(endpoint, resource, clock, registry)


async def close_spans(spans: OpenSpans | None) -> None:
    """When a program ends."""
    if spans is not None:
        await asyncio.to_thread(spans.close)
