"""Tests that many scripts can run in Redis at once, and that each call gets its own reply, even if
other calls fail or are cancelled."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from baton.errors import Unavailable
from baton.registry.limits import MAX_SCRIPT_BYTES
from baton.registry.redis_client import connect_redis
from baton.registry.redis_scripts import RedisScripts

APPEND = "redis.call('RPUSH', KEYS[1], ARGV[1]) return 'ok ' .. #ARGV[1]"
FAIL = "return redis.error_reply('WRONG on purpose')"
LIST = "list"


@pytest.fixture
async def redis(valkey_url: str) -> AsyncIterator[Redis]:
    async with connect_redis(valkey_url) as client:
        await client.flushdb()
        await client.script_flush()
        yield client


def append(scripts: RedisScripts, value: str | bytes) -> asyncio.Task[object]:
    return asyncio.ensure_future(scripts.run(APPEND, (LIST,), (value,)))


async def test_each_call_gets_its_reply(redis: Redis, valkey_url: str) -> None:
    scripts = RedisScripts(valkey_url, redis)
    calls = [append(scripts, "x" * number) for number in range(1, 201)]
    assert await asyncio.gather(*calls) == [f"ok {number}".encode() for number in range(1, 201)]
    assert await redis.llen(LIST) == 200


async def test_calls_that_wait_share_a_round_trip(redis: Redis, valkey_url: str) -> None:
    sent: list[int] = []

    class Counting(RedisScripts):
        async def _send(self) -> None:
            sent.append(len(self._waiting))
            await super()._send()

    scripts = Counting(valkey_url, redis)
    await asyncio.gather(*(append(scripts, "x") for _ in range(100)))
    assert sent == [100, 36]  # at most 64 at a time


async def test_a_large_call_is_sent_alone(redis: Redis, valkey_url: str) -> None:
    scripts = RedisScripts(valkey_url, redis)
    large = b"x" * (MAX_SCRIPT_BYTES + 1)
    replies = await asyncio.gather(
        append(scripts, b"a"), append(scripts, large), append(scripts, b"b")
    )
    assert list(replies) == [b"ok 1", f"ok {len(large)}".encode(), b"ok 1"]


async def test_a_failed_script_fails_alone(redis: Redis, valkey_url: str) -> None:
    scripts = RedisScripts(valkey_url, redis)
    failed = asyncio.ensure_future(scripts.run(FAIL, (LIST,), ("",)))
    others = [append(scripts, "x") for _ in range(3)]
    assert await asyncio.gather(*others) == [b"ok 1"] * 3
    with pytest.raises(Unavailable, match="WRONG on purpose"):
        await failed


async def test_a_restarted_redis_gets_the_script_again(redis: Redis, valkey_url: str) -> None:
    scripts = RedisScripts(valkey_url, redis)
    assert await scripts.run(APPEND, (LIST,), ("a",)) == b"ok 1"
    await redis.script_flush()
    assert await scripts.run(APPEND, (LIST,), ("b",)) == b"ok 1"
    assert await redis.lrange(LIST, 0, -1) == [b"a", b"b"]


@pytest.mark.parametrize("cancelled", [0, 1, 5])
async def test_a_cancelled_call_does_not_lose_others(
    redis: Redis, valkey_url: str, cancelled: int
) -> None:
    """The first call sends the scripts of all calls, while the others wait."""
    scripts = RedisScripts(valkey_url, redis)
    calls = [append(scripts, str(number)) for number in range(6)]
    for _ in range(3):
        await asyncio.sleep(0)
    calls[cancelled].cancel()
    replies = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(replies.pop(cancelled), asyncio.CancelledError)
    assert replies == [b"ok 1"] * 5
    stored = {int(value) for value in await redis.lrange(LIST, 0, -1)}
    assert stored >= set(range(6)) - {cancelled}
    assert await scripts.run(APPEND, (LIST,), ("after",)) == b"ok 5"


async def test_all_calls_fail_if_redis_is_unreachable() -> None:
    url = "redis://127.0.0.1:1"
    async with connect_redis(url) as client:
        scripts = RedisScripts(url, client)
        replies = await asyncio.gather(
            *(append(scripts, "x") for _ in range(3)), return_exceptions=True
        )
    assert all(isinstance(reply, Unavailable) for reply in replies)


async def test_calls_behind_one_without_a_reply_fail_with_it() -> None:
    """Tests a Redis that accepts connections and never replies: the calls are too large to share a
    round trip, and none waits for the timeouts of the ones before it."""

    connections: list[asyncio.Task[None] | None] = []

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        await reader.read()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(ignore, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        async with connect_redis(url) as client:
            scripts = RedisScripts(url, client, call_seconds=0.05)
            calls = [append(scripts, b"x" * MAX_SCRIPT_BYTES) for _ in range(4)]
            errors = await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*filter(None, connections), return_exceptions=True)
    assert all(isinstance(error, Unavailable) for error in errors)
    assert {str(error).partition("failed: ")[2] for error in errors} == {"no reply within 0.05 s"}
