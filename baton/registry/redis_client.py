"""Connects to Redis or Valkey, with timeouts on everything."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton.errors import Invalid, Unavailable
from baton.registry.bounded_parser import BoundedParser

T = TypeVar("T")
TIMEOUT_SECONDS = 2.0

CALL_SECONDS = 2 * TIMEOUT_SECONDS
"""How long a call may take, with its wait for a connection."""

MAX_CONNECTIONS = 64
"""Maximum number of connections of one client; further calls wait for a free one."""

RETRIES = 1
"""One immediate retry on a new connection, since a restart of the server breaks pooled ones. More
retries, with pauses, would make every caller wait for a Redis that is down."""


def connect_redis(url: str) -> "redis.asyncio.Redis":
    """Return a client, which connects when it is first used. Raises Invalid if ``url`` is not a
    Redis URL."""
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=TIMEOUT_SECONDS,
            socket_timeout=TIMEOUT_SECONDS,
            socket_connect_timeout=TIMEOUT_SECONDS,
            health_check_interval=0,
            protocol=3,
            parser_class=BoundedParser,
            retry=Retry(NoBackoff(), RETRIES),
        )
    except ValueError as error:
        raise Invalid(f"redis_url is not a valid Redis URL: {error}", param="redis_url") from error
    return redis.asyncio.Redis.from_pool(pool)


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
        reason = str(error) or type(error).__name__
        raise call_failed(url, reason) from error


def call_failed(url: str, reason: str) -> Unavailable:
    """Return the error of a call that failed for ``reason``."""
    return Unavailable(f"the call to Redis at {_address(url)} failed: {reason}")


def _address(url: str) -> str:
    """Return host and port, for an error message. The rest of the URL may contain a password, and
    errors are sent to other processes."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port}" if parts.hostname else parts.path
