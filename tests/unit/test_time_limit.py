"""A time limit is ``asyncio.timeout``, only faster: both are asked the same."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from baton.concurrency.time_limit import TimeLimit

Limit = Callable[[float], AbstractAsyncContextManager[Callable[[], bool]]]


@asynccontextmanager
async def ours(seconds: float) -> AsyncIterator[Callable[[], bool]]:
    with TimeLimit(seconds) as limit:
        yield lambda: limit.expired


@asynccontextmanager
async def asyncios(seconds: float) -> AsyncIterator[Callable[[], bool]]:
    async with asyncio.timeout(seconds) as limit:
        yield limit.expired


@pytest.fixture(params=[ours, asyncios])
def limited(request: pytest.FixtureRequest) -> Limit:
    return request.param  # type: ignore[no-any-return]


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_what_ends_in_time(limited: Limit) -> None:
    async with limited(60.0) as expired:
        await asyncio.sleep(0)
    assert not expired()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_what_does_not(limited: Limit) -> None:
    with pytest.raises(TimeoutError):
        async with limited(0.001) as expired:
            await forever()
    assert expired()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_the_inner_one_s_time_is_up(limited: Limit) -> None:
    async with limited(60.0) as outer:
        with pytest.raises(TimeoutError):
            async with limited(0.001):
                await forever()
        await asyncio.sleep(0)
    assert not outer()


async def test_the_outer_one_s_time_is_up(limited: Limit) -> None:
    with pytest.raises(TimeoutError):
        async with limited(0.001):
            async with limited(60.0) as inner:
                await forever()
    assert not inner()


async def test_another_s_timeout_error_is_not_ours(limited: Limit) -> None:
    with pytest.raises(TimeoutError, match="theirs"):
        async with limited(60.0) as expired:
            raise TimeoutError("theirs")
    assert not expired()


async def test_whoever_is_cancelled_meanwhile_is_cancelled(limited: Limit) -> None:
    """Also where the time is up in the same turn of the loop."""

    async def wait() -> None:
        async with limited(0.0):
            await forever()

    task = asyncio.create_task(wait())
    asyncio.get_running_loop().call_later(0.0, task.cancel)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
