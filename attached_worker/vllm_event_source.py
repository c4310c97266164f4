"""Where a server publishes its KV events: as the operator says, or as the server says itself."""

from dataclasses import dataclass

import orjson
import structlog

from attached_worker.http_exchange import ServerAddress, fetch
from baton.errors import Invalid

ASK_SECONDS = 5.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where a server publishes events, and where it sends earlier ones again: ZMQ endpoints."""

    events: str
    replay: str


async def find_events(address: ServerAddress) -> EventSource | None:
    """Ask a server for its events. Return None if it has none, or none that can be used, or if it
    is older than vLLM 0.32, which can't be asked. Raises Unavailable."""
    try:
        asked = await fetch(address, "GET", "/kv_event_sources", seconds=ASK_SECONDS)
        ranks = [
            (each["endpoint"], each["replay_endpoint"]) for each in orjson.loads(asked).values()
        ]
    except (Invalid, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not ranks:
        return None
    if len(ranks) > 1:
        log.warning("kv_events_unusable", reason="the server has several data-parallel ranks")
        return None
    events, replay = ranks[0]
    if not replay:
        log.warning("kv_events_unusable", reason="--kv-events-config has no replay_endpoint")
        return None
    return EventSource(_reachable(events, address), _reachable(replay, address))


def _reachable(endpoint: str, address: ServerAddress) -> str:
    """Return the endpoint for others than the server, which may listen at every address."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    return endpoint.replace("//*:", f"//{host}:")
