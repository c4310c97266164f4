"""Tests that a cancelled caller of Redis stays cancelled, and that all failures of calls become one
error type."""

import asyncio

import pytest

from baton.errors import Unavailable
from baton.registry.redis_client import call_redis

URL = "redis://:password@127.0.0.1:1/0"


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
