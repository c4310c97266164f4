"""Connects to Redis or Valkey, with timeouts on everything."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton.errors import Invalid, Unavailable
from baton.registry.bounded_parser import BoundedParser
from baton.registry.limits import MAX_REDIS_CONNECTIONS
from baton.registry.redis_pools import open_pool

T = TypeVar("T")
TIMEOUT_SECONDS = 2.0

CALL_SECONDS = 2 * TIMEOUT_SECONDS
"""How long a call may take, with its wait for a connection."""

RETRIES = 1
"""One immediate retry on a new connection, since a restart of the server, or a failover to another
one, breaks pooled ones. More retries, with pauses, would make every caller wait for a Redis that is
down."""

_CLUSTER_CODES = ("MOVED", "ASK", "CROSSSLOT", "CLUSTERDOWN")


def connect_redis(
    url: str, *, max_connections: int = MAX_REDIS_CONNECTIONS, retries: int = RETRIES
) -> Redis:
    """Return a client, which connects when it is first used. Raises Invalid if ``url`` is not a
    Redis URL."""
    try:
        pool = open_pool(
            url,
            max_connections=max_connections,
            timeout=TIMEOUT_SECONDS,
            socket_timeout=TIMEOUT_SECONDS,
            socket_connect_timeout=TIMEOUT_SECONDS,
            health_check_interval=0,
            protocol=3,
            parser_class=BoundedParser,
            retry=Retry(NoBackoff(), retries),
        )
    except ValueError as error:
        raise Invalid(f"redis_url is not a valid Redis URL: {error}", param="redis_url") from error
    return Redis.from_pool(pool)


async def call_redis(url: str, call: Awaitable[T], seconds: float = CALL_SECONDS) -> T:
    """Await a Redis call and return its result. Raises Unavailable when the call fails or takes too
    long. When a call is cancelled, the client library sometimes returns a result nevertheless; this
    function then raises CancelledError."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        async with asyncio.timeout(seconds):
            answer = await call
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
        return answer
    except (RedisError, OSError, TimeoutError) as error:
        raise call_failed(url, error_reason(error)) from error


def call_failed(url: str, reason: str) -> Unavailable:
    """Return the error of a call that failed for ``reason``."""
    return Unavailable(f"the call to Redis at {_address(url)} failed: {reason}")


def error_reason(error: Exception) -> str:
    """Return why a call failed, in Redis's own words with their code (OOM, READONLY, NOPERM …) if
    it has refused the call."""
    text = str(error) or type(error).__name__
    code = getattr(error, "status_code", None)  # redis-py takes codes that it knows from the text
    if code in _CLUSTER_CODES:
        text += "; Baton needs a Redis whose cluster mode is off (cluster-enabled no)"
    return f"{code} {text}" if code else text


def _address(url: str) -> str:
    """Return hosts and ports, for an error message. The rest of the URL may contain a password, and
    errors are sent to other processes."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path
