"""Runs one test suite over the store of tenants' usage in Redis and over its in-memory
implementation."""

from collections import Counter
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from baton.clock import ManualClock
from baton.core.ids import TenantId
from baton.errors import Unavailable
from router.limits import MAX_COUNTERS_PER_FLUSH
from router.tenants.metrics import TenantMetrics
from router.tenants.redis_usage_store import RedisUsageStore
from router.tenants.request_usage import RequestUsage
from router.tenants.usage_recorder import UsageRecorder
from router.tenants.usage_store import MemoryUsageStore, UsageField, UsageStore, day_of

A, B = TenantId("a"), TenantId("b")
MONDAY, TUESDAY = "2030-01-07", "2030-01-08"
FIRST_DAY_SECONDS = 1_893_974_400.0  # the beginning of ``MONDAY``


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[UsageStore]:
    if request.param == "memory":
        yield MemoryUsageStore()
        return
    async with Redis.from_url(valkey_url) as client:
        await client.flushdb()
    usage = RedisUsageStore(valkey_url, "test")
    yield usage
    await usage.close()


async def test_the_counts_of_several_routers_add_up(store: UsageStore) -> None:
    mine = {(MONDAY, A, UsageField.PROMPT): 10, (TUESDAY, A, UsageField.PROMPT): 1}
    await store.add("router-0/1", 1, mine)
    await store.add(
        "router-1/1", 1, {(MONDAY, A, UsageField.PROMPT): 5, (MONDAY, B, UsageField.CACHED): 2}
    )
    assert await store.read([MONDAY]) == {
        (MONDAY, A, UsageField.PROMPT): 15,
        (MONDAY, B, UsageField.CACHED): 2,
    }
    assert (await store.read([MONDAY, TUESDAY]))[TUESDAY, A, UsageField.PROMPT] == 1
    assert await store.read(["2029-01-01"]) == {}


async def test_a_report_with_a_repeated_number_counts_once(store: UsageStore) -> None:
    counts = {(MONDAY, A, UsageField.REQUESTS): 1}
    for number in (1, 1, 2, 1):
        await store.add("router-0/1", number, counts)
    await store.add("router-0/2", 1, counts)  # the router's next incarnation
    assert await store.read([MONDAY]) == {(MONDAY, A, UsageField.REQUESTS): 3}


async def test_a_usage_recorder_sends_everything_in_bounded_batches(store: UsageStore) -> None:
    clock = ManualClock(FIRST_DAY_SECONDS)
    recorder = UsageRecorder(TenantMetrics(CollectorRegistry()), clock)
    for number in range(MAX_COUNTERS_PER_FLUSH // 3):
        recorder.record_usage(TenantId(f"t{number}"), RequestUsage(1, 20, 5, 3))
    clock.advance(86_400.0)
    recorder.record_refusal(A, "tokens")
    await recorder.flush(store, "router-0/1")
    assert recorder.unsent() == {}
    counts = await store.read([MONDAY, TUESDAY])
    totals: Counter[UsageField] = Counter()
    for (_, _, field), amount in counts.items():
        totals[field] += amount
    assert totals == {
        UsageField.REQUESTS: MAX_COUNTERS_PER_FLUSH // 3,
        UsageField.PROMPT: 20 * (MAX_COUNTERS_PER_FLUSH // 3),
        UsageField.CACHED: 5 * (MAX_COUNTERS_PER_FLUSH // 3),
        UsageField.COMPLETION: 3 * (MAX_COUNTERS_PER_FLUSH // 3),
        UsageField.REFUSED: 1,
    }
    assert counts[TUESDAY, A, UsageField.REFUSED] == 1


async def test_lost_reports_are_sent_again_and_count_once() -> None:
    clock, store = ManualClock(FIRST_DAY_SECONDS), MemoryUsageStore()
    recorder = UsageRecorder(TenantMetrics(CollectorRegistry()), clock)
    store.is_reachable = False
    for _ in range(2):
        recorder.record_usage(A, RequestUsage(1, 10, 0, 1))
        with pytest.raises(Unavailable):
            await recorder.flush(store, "r")
    assert recorder.unsent()[MONDAY, A, UsageField.PROMPT] == 20
    store.is_reachable, store.drops_replies = True, True
    with pytest.raises(Unavailable):
        await recorder.flush(store, "r")  # the first ten arrive, but the confirmation is lost
    store.drops_replies = False
    await recorder.flush(store, "r")
    assert (await store.read([MONDAY]))[MONDAY, A, UsageField.PROMPT] == 20


async def test_a_redis_that_is_gone_is_unavailable() -> None:
    store = RedisUsageStore("redis://127.0.0.1:1/0", "test")
    with pytest.raises(Unavailable):
        await store.add("r", 1, {(MONDAY, A, UsageField.REQUESTS): 1})
    await store.close()


def test_days_are_utc_days() -> None:
    assert day_of(int(FIRST_DAY_SECONDS * 1e9)) == MONDAY
    assert day_of(int((FIRST_DAY_SECONDS - 1) * 1e9)) == "2030-01-06"


async def test_malformed_usage_in_redis_is_ignored(valkey_url: str) -> None:
    usage = RedisUsageStore(valkey_url, "odd")
    async with Redis.from_url(valkey_url) as client:
        for amount in ("9" * 5000, "-1", "x", ""):
            await client.hset(f"baton:odd:usage:day:{MONDAY}", "a/prompt_tokens", amount)
            assert await usage.read([MONDAY]) == {}
    await usage.close()
