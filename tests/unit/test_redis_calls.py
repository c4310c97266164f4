"""Calls of Redis: who is cancelled stays cancelled, and what goes wrong has one name."""

import asyncio

import pytest

from baton.errors import Unavailable
from baton.registry.redis_client import call_redis

URL = "redis://:password@127.0.0.1:1/0"


async def test_a_client_that_swallows_a_cancellation() -> None:
    """It has answered, but nobody goes on."""
    began, gone_on = asyncio.Event(), []

    async def answer() -> int:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 1
        raise AssertionError

    async def ask() -> None:
        gone_on.append(await call_redis(URL, answer()))

    asking = asyncio.create_task(ask())
    await began.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert gone_on == []


async def test_calls_of_whoever_is_being_cancelled() -> None:
    """A last word is answered."""

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


async def test_a_call_that_takes_too_long() -> None:
    with pytest.raises(Unavailable, match=r"Redis at 127\.0\.0\.1:1 can't be asked: TimeoutError"):
        await call_redis(URL, asyncio.Event().wait(), seconds=0.001)
