"""Runs one test suite over the quota store in Redis and over its in-memory implementation. The
store grants each router a share of the tenants' limits."""

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
    QuotaGrant,
    QuotaRequest,
    QuotaStore,
    RateGrant,
    RateRequest,
    SlotRequest,
)
from router.tenants.redis_quota_store import RedisQuotaStore
from testkit.fakes.quota_store import MemoryQuotaStore

A, B = TenantId("a"), TenantId("b")
LIMIT = 10  # requests per minute: one is refilled every six seconds


class QuotaHarness:
    """A quota store. ``silence`` makes the store believe that a router was silent for some
    seconds."""

    def __init__(self, store: QuotaStore, silence: Callable[[str, float], Any]) -> None:
        self.store = store
        self.silence = silence

    async def draw(self, router: str, least: int, most: int = 0, settled: int = 0) -> RateGrant:
        draw = RateRequest(LIMIT, settled, least, max(least, most))
        [grant] = await self.store.exchange(router, [QuotaRequest(A, 2, requests=draw)])
        return grant.requests

    async def reserve(self, router: str, running: int, wanted: int, limit: int = 4) -> int:
        request = QuotaRequest(A, 2, slots=SlotRequest(limit, running, wanted))
        [grant] = await self.store.exchange(router, [request])
        return grant.num_slots


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[RedisQuotaStore]:
    store = RedisQuotaStore(url, "test", exchange_seconds=30)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(params=["memory", "redis"])
async def harness(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[QuotaHarness]:
    if request.param == "memory":
        clock = ManualClock(1000.0)

        async def advance(_: str, seconds: float) -> None:
            clock.advance(seconds)

        yield QuotaHarness(MemoryQuotaStore(clock), advance)
        return
    async with Redis.from_url(valkey_url) as client, opened(valkey_url) as store:
        await client.flushdb()

        async def backdate(router: str, seconds: float) -> None:
            for name in (f"seen:{router}", f"drew:{router}"):
                at = float(await client.hget("baton:test:limits:a", name) or 0)
                await client.hset("baton:test:limits:a", name, f"{at - seconds * 1000:.3f}")

        yield QuotaHarness(store, backdate)


async def test_no_more_is_granted_than_the_limit(harness: QuotaHarness) -> None:
    granted = [(await harness.draw("r0", 4)).granted for _ in range(3)]
    assert granted == [4, 4, 0]
    assert (await harness.draw("r1", 2)).granted == 2
    last = await harness.draw("r0", 1)
    assert last.granted == 0
    assert last.remaining == pytest.approx(-LIMIT / 10, abs=0.1)  # r0 has used up its share
    other = await harness.draw("r1", 1)
    assert other.remaining == pytest.approx(0, abs=0.1)


async def test_extra_grants_shrink_as_the_limit_is_used_up(harness: QuotaHarness) -> None:
    granted = [(await harness.draw("r0", 1, 5)).granted for _ in range(8)]
    assert granted == [3, 2, 2, 1, 1, 1, 0, 0]


async def test_settled_amounts_are_charged_and_refunds_are_available_again(
    harness: QuotaHarness,
) -> None:
    await harness.draw("r0", 0, settled=13)
    assert (await harness.draw("r1", 1)).remaining == pytest.approx(-3, abs=0.1)
    assert (await harness.draw("r0", 3, settled=-7)).granted == 3
    await harness.draw("r0", 0, settled=-100)
    assert (await harness.draw("r1", 10)).granted == 10


async def test_a_flood_at_one_router_leaves_a_reserve_for_another(harness: QuotaHarness) -> None:
    await harness.draw("r1", 1)
    for _ in range(8):
        assert (await harness.draw("r0", 1)).granted == 1
    assert (await harness.draw("r0", 1)).granted == 0  # one in ten is reserved for other routers
    assert (await harness.draw("r1", 1)).granted == 1
    await harness.silence("r1", 4)  # in four seconds nothing has been refilled yet
    assert (await harness.draw("r0", 1, settled=-1)).granted == 1


async def test_concurrency_slots_are_shared_by_all_routers(harness: QuotaHarness) -> None:
    assert await harness.reserve("r0", 0, 3) == 3
    assert await harness.reserve("r1", 0, 3) == 1
    assert await harness.reserve("r0", 0, 3) == 3  # a repeated request
    assert await harness.reserve("r0", 1, 1) == 1
    assert await harness.reserve("r1", 1, 4) == 3
    assert await harness.reserve("r2", 2, 2) == 2  # running requests keep their slots


async def test_the_slots_of_a_dead_router_are_released(harness: QuotaHarness) -> None:
    assert await harness.reserve("r0", 4, 4) == 4
    assert await harness.reserve("r1", 0, 1) == 0
    await harness.silence("r0", LEASE_SECONDS + 1)
    assert await harness.reserve("r1", 0, 1) == 1


async def test_tenants_have_separate_limits(harness: QuotaHarness) -> None:
    requests = [
        QuotaRequest(A, 1, requests=RateRequest(LIMIT, 0, 10, 10), slots=SlotRequest(1, 0, 1)),
        QuotaRequest(B, 1, tokens=RateRequest(7, 0, 7, 7)),
        QuotaRequest(B, 1, requests=RateRequest(3, 0, 3, 3), tokens=RateRequest(7, 0, 1, 1)),
    ]
    granted = await harness.store.exchange("r0", requests)
    assert [(g.requests.granted, g.tokens.granted, g.num_slots) for g in granted] == [
        (10, 0, 1), (0, 7, 0), (3, 0, 0),
    ]  # fmt: skip
    assert await harness.store.exchange("r0", []) == []


async def test_an_unreachable_quota_store_is_unavailable() -> None:
    in_memory = MemoryQuotaStore(ManualClock())
    in_memory.is_reachable = False
    async with opened("redis://127.0.0.1:1/0") as in_redis:
        for store in (in_memory, in_redis):
            with pytest.raises(Unavailable):
                await store.exchange("r0", [QuotaRequest(A, 1, requests=RateRequest(1, 0, 1, 1))])
            with pytest.raises(Unavailable):
                await store.ping()


rate_requests = st.builds(
    lambda limit, settled, least, more: RateRequest(limit, settled, least, least + more),
    st.sampled_from([5, 10]), st.integers(-4, 4), st.integers(0, 4), st.integers(0, 8),
)  # fmt: skip
quota_requests = st.builds(
    QuotaRequest, st.just(A), st.integers(1, 3),
    st.none() | rate_requests, st.none() | rate_requests,
    st.none() | st.builds(SlotRequest, st.integers(1, 5), st.integers(0, 3), st.integers(0, 6)),
)  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(["r0", "r1", "r2"]), quota_requests), max_size=12))
@settings(max_examples=40, deadline=None)
async def test_both_stores_grant_the_same(
    valkey_url: str, requests: list[tuple[str, QuotaRequest]]
) -> None:
    """A router's share changes with time, so the in-memory store gets the clock of the Redis
    server."""
    clock = ManualClock(1000.0)
    in_memory = MemoryQuotaStore(clock)
    async with Redis.from_url(valkey_url) as client, opened(valkey_url) as in_redis:
        await client.flushdb()
        then = await _seconds(client)
        for router, request in requests:
            now = await _seconds(client)
            clock.advance(now - then)
            then = now
            [expected] = await in_memory.exchange(router, [request])
            [granted] = await in_redis.exchange(router, [request])
            assert _counts(granted) == _counts(expected)
            # What was refilled until Redis looked at its clock: at most 10 per minute.
            near = 0.2 + (await _seconds(client) - now) * 10 / 60
            for got, wanted in (
                (granted.requests, expected.requests),
                (granted.tokens, expected.tokens),
            ):
                assert got.remaining == pytest.approx(wanted.remaining, abs=near)


async def _seconds(client: Redis) -> float:
    seconds, microseconds = await client.time()
    return float(seconds) + microseconds / 1e6


def _counts(grant: QuotaGrant) -> tuple[int, int, int]:
    return grant.requests.granted, grant.tokens.granted, grant.num_slots


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
async def test_malformed_values_in_redis_never_grant_more_than_was_requested(
    valkey_url: str, field: str, value: str
) -> None:
    """The store must either raise Unavailable or grant 0 to 3, the requested maximum."""
    request = QuotaRequest(
        A, 2, requests=RateRequest(LIMIT, min_amount=1, max_amount=3), slots=SlotRequest(4, 1, 2)
    )
    async with Redis.from_url(valkey_url) as client, opened(valkey_url) as store:
        await client.flushdb()
        seconds, _ = await client.time()
        await client.hset("baton:test:limits:a", field, value)
        await client.hset("baton:test:limits:a", "seen:other", str(seconds * 1000))
        try:
            [grant] = await store.exchange("me", [request])
        except Unavailable:
            return
        assert 0 <= grant.requests.granted <= 3 and math.isfinite(grant.requests.remaining)
        assert 1 <= grant.num_slots <= 2
