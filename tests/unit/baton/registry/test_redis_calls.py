"""Tests that a cancelled caller of Redis stays cancelled, that all failures of calls become one
error type, and what URLs and errors of Redis mean."""

import asyncio

import pytest
from redis.asyncio.connection import SSLConnection
from redis.exceptions import MovedError, OutOfMemoryError, RedisError, ResponseError

from baton.errors import Invalid, Unavailable
from baton.registry.bounded_parser import BoundedParser, NotPrimary
from baton.registry.redis_client import call_redis, connect_redis, error_reason
from baton.registry.redis_pools import SentinelPool

URL = "redis://:password@127.0.0.1:1/0"
SCRIPT = "ERR Error running script (call to f_0b): @user_script:3: @user_script: 3:"
"""How Redis 6 begins the error of a script."""


async def test_cancellation_swallowed_by_the_client_still_cancels_the_caller() -> None:
    """Although the call returned a result, its caller must not continue."""
    began, continued = asyncio.Event(), []

    async def answer() -> int:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 1
        raise AssertionError

    async def ask() -> None:
        continued.append(await call_redis(URL, answer()))

    asking = asyncio.create_task(ask())
    await began.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert continued == []


async def test_call_during_cancellation_is_answered() -> None:
    """A task that is being cancelled can still make a final call."""

    async def answer() -> int:
        return 2

    async def leave() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await call_redis(URL, answer())
        raise AssertionError

    leaving = asyncio.create_task(leave())
    await asyncio.sleep(0)
    leaving.cancel()
    assert await leaving == 2


async def test_call_that_takes_too_long_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"Redis at 127\.0\.0\.1:1 failed: TimeoutError"):
        await call_redis(URL, asyncio.Event().wait(), seconds=0.001)


@pytest.mark.parametrize(
    ("reply", "kind", "reason"),
    [
        ("READONLY You can't write.", NotPrimary, "READONLY You can't write."),
        ("OOM command not allowed.", OutOfMemoryError, "OOM command not allowed."),
        ("MISCONF Errors writing to the AOF", ResponseError, "MISCONF Errors writing to the AOF"),
        (f"{SCRIPT} -READONLY You can't write.", NotPrimary, "READONLY You can't write."),
        (f"{SCRIPT} Script attempted to access", ResponseError, f"{SCRIPT} Script attempted to"),
        ("MOVED 7 127.0.0.1:2", MovedError, "MOVED 7 127.0.0.1:2; Baton needs a Redis whose"),
    ],
)
def test_errors_of_redis_are_shown_in_its_words(
    reply: str, kind: type[RedisError], reason: str
) -> None:
    error = BoundedParser.parse_error(reply)
    assert isinstance(error, kind)
    assert error_reason(error).startswith(reason)


def test_sentinels_and_their_primary_have_options_of_their_own() -> None:
    url = "rediss+sentinel://u:p%40@a:1,[::1],b/main%201/3?sentinel_password=s&ssl_ca_certs=/ca"
    pool = connect_redis(url).connection_pool
    assert isinstance(pool, SentinelPool)
    assert pool.service_name == "main 1"
    server, shown = pool.connection_kwargs, ("host", "port", "db", "username", "password")
    assert [server.get(name) for name in shown] == [None, None, 3, "u", "p@"]
    sentinels = [each.connection_pool for each in pool.sentinel_manager.sentinels]
    assert [[each.connection_kwargs[name] for name in shown] for each in sentinels] == [
        ["a", 1, 0, None, "s"], ["::1", 26379, 0, None, "s"], ["b", 26379, 0, None, "s"],
    ]  # fmt: skip
    for each in (pool, *sentinels):
        assert issubclass(each.connection_class, SSLConnection)
        assert each.connection_kwargs["ssl_ca_certs"] == "/ca"


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("http://a", "must specify one of the following schemes"),
        ("redis+sentinel://a:1", "it should be .*HOST:26379/SERVICE"),
        ("redis+sentinel:///main", "a host is missing"),
        ("redis+sentinel://a,/main", "a host is missing"),
        ("redis+sentinel://a/main/x", "may end with /DB, a number"),
        ("redis+sentinel://a:b/main", "Port could not be cast"),
    ],
)
def test_malformed_urls_are_refused(url: str, wrong: str) -> None:
    with pytest.raises(Invalid, match=f"redis_url is not a valid Redis URL: .*{wrong}") as refused:
        connect_redis(url)
    assert refused.value.param == "redis_url"
