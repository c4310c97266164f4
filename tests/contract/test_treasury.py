"""One suite over the treasury in Redis and its in-memory twin: what routers draw of limits."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from baton.clock import ManualClock
from baton.core.ids import TenantId
from baton.errors import Unavailable
from router.tenants.quota_store import (
    LEASE_SECONDS,
    MemoryQuotaStore,
    QuotaGrant,
    QuotaRequest,
    QuotaStore,
    RateGrant,
    RateRequest,
    SlotRequest,
)
from router.tenants.redis_quota_store import RedisQuotaStore

A, B = TenantId("a"), TenantId("b")
LIMIT = 10  # a minute: one comes back every six seconds


class House:
    """A treasury, and a way to say that a router has been silent for some time."""

    def __init__(self, treasury: QuotaStore, silence: Callable[[str, float], Any]) -> None:
        self.treasury = treasury
        self.silence = silence

    async def draw(self, router: str, least: int, most: int = 0, settled: int = 0) -> RateGrant:
        draw = RateRequest(LIMIT, settled, least, max(least, most))
        [grant] = await self.treasury.exchange(router, [QuotaRequest(A, 2, requests=draw)])
        return grant.requests

    async def hold(self, router: str, running: int, wanted: int, limit: int = 4) -> int:
        ask = QuotaRequest(A, 2, hold=SlotRequest(limit, running, wanted))
        [grant] = await self.treasury.exchange(router, [ask])
        return grant.seats


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[RedisQuotaStore]:
    treasury = RedisQuotaStore(url, "test", exchange_seconds=30)
    try:
        yield treasury
    finally:
        await treasury.close()


@pytest.fixture(params=["memory", "redis"])
async def house(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[House]:
    if request.param == "memory":
        clock = ManualClock(1000.0)

        async def advance(_: str, seconds: float) -> None:
            clock.advance(seconds)

        yield House(MemoryQuotaStore(clock), advance)
        return
    async with Redis.from_url(valkey_url) as client, opened(valkey_url) as treasury:
        await client.flushdb()

        async def backdate(router: str, seconds: float) -> None:
            for name in (f"seen:{router}", f"drew:{router}"):
                at = float(await client.hget("baton:test:limits:a", name) or 0)
                await client.hset("baton:test:limits:a", name, f"{at - seconds * 1000:.3f}")

        yield House(treasury, backdate)


async def test_no_more_is_drawn_than_there_is(house: House) -> None:
    granted = [(await house.draw("r0", 4)).granted for _ in range(3)]
    assert granted == [4, 4, 0]
    assert (await house.draw("r1", 2)).granted == 2
    last = await house.draw("r0", 1)
    assert last.granted == 0
    assert last.left == pytest.approx(-LIMIT / 10, abs=0.1)  # it has had its share
    other = await house.draw("r1", 1)
    assert other.left == pytest.approx(0, abs=0.1)


async def test_what_is_spare_gets_less_as_the_treasury_empties(house: House) -> None:
    granted = [(await house.draw("r0", 1, 5)).granted for _ in range(8)]
    assert granted == [3, 2, 2, 1, 1, 1, 0, 0]


async def test_what_is_settled_counts_and_what_is_given_back_is_there(house: House) -> None:
    await house.draw("r0", 0, settled=13)
    assert (await house.draw("r1", 1)).left == pytest.approx(-3, abs=0.1)
    assert (await house.draw("r0", 3, settled=-7)).granted == 3
    await house.draw("r0", 0, settled=-100)
    assert (await house.draw("r1", 10)).granted == 10


async def test_a_flood_at_one_router_leaves_room_at_another(house: House) -> None:
    await house.draw("r1", 1)
    for _ in range(8):
        assert (await house.draw("r0", 1)).granted == 1
    assert (await house.draw("r0", 1)).granted == 0  # one in ten is kept
    assert (await house.draw("r1", 1)).granted == 1
    await house.silence("r1", 4)  # in four seconds nothing has come back yet
    assert (await house.draw("r0", 1, settled=-1)).granted == 1


async def test_seats_are_those_of_all_routers(house: House) -> None:
    assert await house.hold("r0", 0, 3) == 3
    assert await house.hold("r1", 0, 3) == 1
    assert await house.hold("r0", 0, 3) == 3  # said again
    assert await house.hold("r0", 1, 1) == 1
    assert await house.hold("r1", 1, 4) == 3
    assert await house.hold("r2", 2, 2) == 2  # they are there, whatever the limit


async def test_a_router_that_is_dead_holds_nothing_any_more(house: House) -> None:
    assert await house.hold("r0", 4, 4) == 4
    assert await house.hold("r1", 0, 1) == 0
    await house.silence("r0", LEASE_SECONDS + 1)
    assert await house.hold("r1", 0, 1) == 1


async def test_tenants_have_nothing_to_do_with_each_other(house: House) -> None:
    asks = [
        QuotaRequest(A, 1, requests=RateRequest(LIMIT, 0, 10, 10), hold=SlotRequest(1, 0, 1)),
        QuotaRequest(B, 1, tokens=RateRequest(7, 0, 7, 7)),
        QuotaRequest(B, 1, requests=RateRequest(3, 0, 3, 3), tokens=RateRequest(7, 0, 1, 1)),
    ]
    granted = await house.treasury.exchange("r0", asks)
    assert [(g.requests.granted, g.tokens.granted, g.seats) for g in granted] == [
        (10, 0, 1), (0, 7, 0), (3, 0, 0),
    ]  # fmt: skip
    assert await house.treasury.exchange("r0", []) == []


async def test_a_treasury_that_is_gone() -> None:
    twin = MemoryQuotaStore(ManualClock())
    twin.reachable = False
    async with opened("redis://127.0.0.1:1/0") as real:
        for treasury in (twin, real):
            with pytest.raises(Unavailable):
                await treasury.exchange(
                    "r0", [QuotaRequest(A, 1, requests=RateRequest(1, 0, 1, 1))]
                )
            with pytest.raises(Unavailable):
                await treasury.ping()


draws = st.builds(
    lambda limit, settled, least, more: RateRequest(limit, settled, least, least + more),
    st.sampled_from([5, 10]), st.integers(-4, 4), st.integers(0, 4), st.integers(0, 8),
)  # fmt: skip
asks = st.builds(
    QuotaRequest, st.just(A), st.integers(1, 3), st.none() | draws, st.none() | draws,
    st.none() | st.builds(SlotRequest, st.integers(1, 5), st.integers(0, 3), st.integers(0, 6)),
)  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(["r0", "r1", "r2"]), asks), max_size=12))
@settings(max_examples=40, deadline=None)
async def test_both_grant_the_same(valkey_url: str, told: list[tuple[str, QuotaRequest]]) -> None:
    """The twin's clock goes with the server's: what is exactly a router's part at one moment is
    less than that a moment later."""
    clock = ManualClock(1000.0)
    twin = MemoryQuotaStore(clock)
    async with Redis.from_url(valkey_url) as client, opened(valkey_url) as real:
        await client.flushdb()
        then = await _seconds(client)
        for router, ask in told:
            now = await _seconds(client)
            clock.advance(now - then)
            then = now
            [expected] = await twin.exchange(router, [ask])
            [granted] = await real.exchange(router, [ask])
            assert _counts(granted) == _counts(expected)
            assert granted.requests.left == pytest.approx(expected.requests.left, abs=0.2)
            assert granted.tokens.left == pytest.approx(expected.tokens.left, abs=0.2)


async def _seconds(client: Redis) -> float:
    seconds, microseconds = await client.time()
    return float(seconds) + microseconds / 1e6


def _counts(grant: QuotaGrant) -> tuple[int, int, int]:
    return grant.requests.granted, grant.tokens.granted, grant.seats


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("requests", "inf 0"),
        ("requests", "nan 0"),
        ("requests", "-1e308 1e308"),
        ("seats:other", "-1000000"),
        ("seats:other", "nan"),
        ("requests:me", "1e400 0"),
    ],
)
async def test_whoever_writes_to_redis_grants_nothing_impossible(
    valkey_url: str, field: str, value: str
) -> None:
    """Nonsense is as good as no answer, and nobody is granted more than they asked for."""
    ask = QuotaRequest(
        A, 2, requests=RateRequest(LIMIT, least=1, most=3), hold=SlotRequest(4, 1, 2)
    )
    async with Redis.from_url(valkey_url) as client, opened(valkey_url) as treasury:
        await client.flushdb()
        seconds, _ = await client.time()
        await client.hset("baton:test:limits:a", field, value)
        await client.hset("baton:test:limits:a", "seen:other", str(seconds * 1000))
        try:
            [grant] = await treasury.exchange("me", [ask])
        except Unavailable:
            return
        assert 0 <= grant.requests.granted <= 3 and math.isfinite(grant.requests.left)
        assert 1 <= grant.seats <= 2
