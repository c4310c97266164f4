"""One way to connect to Redis or Valkey, with time-outs on everything."""

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from baton.errors import Invalid, Unavailable

T = TypeVar("T")
TIMEOUT_SECONDS = 2.0


def connect(url: str) -> "redis.asyncio.Redis":
    """Connects on first use. Raises Invalid for what is no Redis URL."""
    try:
        return redis.asyncio.Redis.from_url(
            url,
            socket_timeout=TIMEOUT_SECONDS,
            socket_connect_timeout=TIMEOUT_SECONDS,
            health_check_interval=0,
            max_connections=64,
        )
    except ValueError as error:
        raise Invalid(f"redis_url is {url!r}: {error}", param="redis_url") from error


@contextmanager
def translated(url: str) -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise Unavailable(f"Redis at {url} can't be reached: {error}") from error


async def bounded(url: str, call: Awaitable[T]) -> T:
    """Awaits a Redis call. Raises Unavailable when it fails or takes too long."""
    with translated(url):
        async with asyncio.timeout(2 * TIMEOUT_SECONDS):
            return await call
