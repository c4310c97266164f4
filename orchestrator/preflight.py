"""Checks that run before anything is started, so that a wrong setup fails at once with a one-line
error."""

import asyncio
import http.client
import json
import socket

from baton.errors import Unavailable
from baton.network.pinned_tls import pinned_tls_context

PROBE_TIMEOUT_SECONDS = 3.0


def check_port(host: str, port: int) -> None:
    """Raise Unavailable if it is not possible to listen on ``host:port``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        raise Unavailable(
            f"port {port} on {host} can't be used: {error.strerror}; stop the process that "
            "listens on it, or choose another port with --port"
        ) from error


def check_redis(url: str, cluster: str) -> None:
    """Raise Invalid if ``url`` is not a Redis URL, and Unavailable if the primary there can't be
    reached or does not accept what members write. Not for the thread of an event loop."""
    asyncio.run(_check_redis(url, cluster))


async def _check_redis(url: str, cluster: str) -> None:
    from baton.registry.redis import RedisRegistry

    registry = RedisRegistry(url, cluster)
    try:
        await registry.ping()
    finally:
        await registry.close()


def is_redis_reachable(url: str) -> bool:
    """Whether the server at ``url`` answers, though it may refuse writes."""
    import redis

    try:
        with redis.Redis.from_url(
            url, socket_timeout=PROBE_TIMEOUT_SECONDS, socket_connect_timeout=PROBE_TIMEOUT_SECONDS
        ) as client:
            return bool(client.ping())
    except (redis.RedisError, OSError):
        return False


def router_obstacle(host: str, port: int, certificate: str | None = None) -> str:
    """Return why a router does not accept requests for all of its models, that is, what ``/ready``
    says; an empty text if it does. The request does not go through a proxy."""
    tls = pinned_tls_context(certificate)
    connection = (
        http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_SECONDS)
        if tls is None
        else http.client.HTTPSConnection(host, port, timeout=PROBE_TIMEOUT_SECONDS, context=tls)
    )
    try:
        connection.request("GET", "/ready")
        answer = json.load(connection.getresponse())
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"a router does not respond: {error}"
    finally:
        connection.close()
    without = [name for name, is_ready in answer.get("models", {}).items() if not is_ready]
    if without:
        return f"a router knows no ready worker of {', '.join(without)}"
    return "" if answer["ready"] else f"a router is not ready: {answer['reason']}"


def reachable_host(host: str) -> str:
    """Return the address at which a client on this machine reaches a server that listens on
    ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def http_url(host: str, port: int, *, tls: bool = False) -> str:
    host, scheme = reachable_host(host), "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
