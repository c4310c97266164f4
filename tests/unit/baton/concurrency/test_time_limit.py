"""Tests that ``TimeLimit``, which is faster, behaves like ``asyncio.timeout``: the same tests run
with both."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from baton.concurrency.time_limit import TICK_SECONDS, TimeLimit

Limit = Callable[[float], AbstractAsyncContextManager[Callable[[], bool]]]


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[Callable[[], bool]]:
    with TimeLimit(seconds) as limit:
        yield lambda: limit.expired


@asynccontextmanager
async def asyncio_timeout(seconds: float) -> AsyncIterator[Callable[[], bool]]:
    async with asyncio.timeout(seconds) as limit:
        yield limit.expired


@pytest.fixture(params=[time_limit, asyncio_timeout])
def limited(request: pytest.FixtureRequest) -> Limit:
    return request.param  # type: ignore[no-any-return]


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_block_that_ends_in_time_is_not_affected(limited: Limit) -> None:
    async with limited(60.0) as expired:
        await asyncio.sleep(0)
    assert not expired()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_block_that_exceeds_the_limit_raises_timeout_error(limited: Limit) -> None:
    with pytest.raises(TimeoutError):
        async with limited(0.001) as expired:
            await forever()
    assert expired()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_inner_limit_can_expire(limited: Limit) -> None:
    async with limited(60.0) as outer:
        with pytest.raises(TimeoutError):
            async with limited(0.001):
                await forever()
        await asyncio.sleep(0)
    assert not outer()


async def test_outer_limit_can_expire(limited: Limit) -> None:
    with pytest.raises(TimeoutError):
        async with limited(0.001):
            async with limited(60.0) as inner:
                await forever()
    assert not inner()


async def test_timeout_error_of_the_block_does_not_expire_the_limit(limited: Limit) -> None:
    with pytest.raises(TimeoutError, match="theirs"):
        async with limited(60.0) as expired:
            raise TimeoutError("theirs")
    assert not expired()


async def test_cancellation_has_precedence_over_the_limit(limited: Limit) -> None:
    """A cancelled task ends by its cancellation, even if the limit expires in the same iteration of
    the event loop."""

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


async def test_time_in_which_the_process_stood_still_counts_as_one_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop's clock jumps, as it does if the process was stopped (SIGSTOP). Each jump, of
    any length, uses up one tick (``TICK_SECONDS``) of the limit."""
    loop, jumped = asyncio.get_running_loop(), 0.0
    real_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_time() + jumped)
    jumps_before_end = 9  # the ten ticks of 5 seconds, except the last one
    with pytest.raises(TimeoutError):
        with TimeLimit(10 * TICK_SECONDS) as limit:
            for _ in range(jumps_before_end):
                jumped += 1000.0
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            assert not limit.expired
            jumped += 1000.0
            await forever()
