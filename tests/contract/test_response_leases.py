"""Runs one test suite over the leases of background responses in Redis and over their in-memory
implementation."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from baton.clock import ManualClock
from baton.core.ids import TenantId
from baton.errors import Unavailable
from router.responses.redis_response_leases import RedisResponseLeases
from router.responses.response_lease import LEASE_SECONDS, LeaseKey, LeaseState, ResponseLeases
from testkit.fakes.response_leases import MemoryResponseLeases

KEY = LeaseKey(TenantId("a"), "resp_1")
OTHER = LeaseKey(TenantId("b"), "resp_1")
HELD, CANCELLED, ENDED = LeaseState.HELD, LeaseState.CANCELLED, LeaseState.ENDED
REDIS_LEASE_SECONDS = 0.4


class Leases:
    """Leases, and a way to let a part of LEASE_SECONDS pass."""

    def __init__(self, url: str | None) -> None:
        self._clock = ManualClock()
        self.leases: ResponseLeases = (
            MemoryResponseLeases(self._clock)
            if url is None
            else RedisResponseLeases(url, "test", REDIS_LEASE_SECONDS)
        )

    async def elapse(self, part: float) -> None:
        if isinstance(self.leases, MemoryResponseLeases):
            self._clock.advance(part * LEASE_SECONDS)
        else:
            await asyncio.sleep(part * REDIS_LEASE_SECONDS)


@pytest.fixture(params=["memory", "redis"])
async def timed(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[Leases]:
    async with Redis.from_url(valkey_url) as client:
        await client.flushdb()
    timed = Leases(None if request.param == "memory" else valkey_url)
    yield timed
    await timed.leases.close()


async def test_a_held_lease_does_not_end(timed: Leases) -> None:
    leases = timed.leases
    for _ in range(3):
        assert await leases.renew([KEY, OTHER]) == [HELD, HELD]
        await timed.elapse(0.6)
        assert not await leases.end_if_lapsed(KEY)
    await leases.release(KEY)
    assert await leases.end_if_lapsed(KEY)
    assert not await leases.end_if_lapsed(OTHER)


async def test_a_lapsed_lease_is_taken_again_unless_it_was_ended(timed: Leases) -> None:
    leases = timed.leases
    await leases.renew([KEY, OTHER])
    await timed.elapse(1.2)
    assert await leases.end_if_lapsed(KEY)
    assert await leases.end_if_lapsed(KEY)
    assert await leases.renew([KEY, OTHER]) == [ENDED, HELD]
    await timed.elapse(1.2)
    assert await leases.renew([KEY, OTHER]) == [ENDED, HELD]


async def test_a_cancellation_reaches_the_holder(timed: Leases) -> None:
    leases = timed.leases
    assert not await leases.cancel(KEY)
    await leases.renew([KEY, OTHER])
    assert await leases.cancel(KEY)
    assert await leases.cancel(KEY)
    assert await leases.renew([KEY, OTHER]) == [CANCELLED, HELD]
    assert not await leases.end_if_lapsed(KEY)


async def test_a_cancellation_does_not_renew_a_lease(timed: Leases) -> None:
    leases = timed.leases
    await leases.renew([KEY])
    await timed.elapse(0.7)
    assert await leases.cancel(KEY)
    await timed.elapse(0.7)
    assert not await leases.cancel(KEY)
    assert await leases.end_if_lapsed(KEY)
    assert not await leases.cancel(KEY)


async def test_a_state_that_no_router_wrote_counts_as_none(valkey_url: str) -> None:
    leases = RedisResponseLeases(valkey_url, "odd")
    async with Redis.from_url(valkey_url) as client:
        await client.set("baton:odd:responses:a:lease:resp_1", b"\xff")
        assert not await leases.cancel(KEY)
        assert await leases.renew([KEY]) == [HELD]
        assert 0 < await client.pttl("baton:odd:responses:a:lease:resp_1") <= LEASE_SECONDS * 1000
    await leases.close()


async def test_a_redis_that_is_gone_is_unavailable() -> None:
    leases = RedisResponseLeases("redis://127.0.0.1:1/0", "test")
    with pytest.raises(Unavailable):
        await leases.renew([KEY])
    for call in (leases.cancel, leases.end_if_lapsed, leases.release):
        with pytest.raises(Unavailable):
            await call(KEY)
    await leases.close()
