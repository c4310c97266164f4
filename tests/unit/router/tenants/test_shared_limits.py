"""Tests a tenant's limits that several routers share: a limit can be used up at any single router,
and is exceeded by no more than the documented slack."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.concurrency.budget import Budget
from baton.core.ids import TenantId
from router.tenants.admission import AdmissionController, RequestAdmission
from router.tenants.leaky_bucket import LeakyBucket
from router.tenants.metrics import TenantMetrics
from router.tenants.quota_client import QuotaClient
from router.tenants.quota_store import LEASE_SECONDS
from router.tenants.rate_limit_errors import RateLimited
from router.tenants.request_usage import RequestUsage
from router.tenants.tenant import Tenant, TenantLimits
from router.tenants.tenant_directory import TenantDirectory, build_tenant_directory
from testkit.fakes.quota_store import MemoryQuotaStore

A = TenantId("a")


class FakeUsageSink:
    def record_usage(self, tenant: TenantId, spent: RequestUsage) -> None: ...

    def record_refusal(self, tenant: TenantId, reason: str) -> None: ...


class EagerClock(ManualClock):
    """A clock whose sleeps advance the time and return immediately."""

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)


class Router:
    def __init__(self, name: str, fleet: "Fleet") -> None:
        self.metrics = TenantMetrics(CollectorRegistry())
        self.quota_client = QuotaClient(
            fleet.quota_store, name, fleet.clock, self.metrics.quota_store_unreachable
        )
        self.controller = AdmissionController(
            Budget(1000), lambda: fleet.directory, lambda: len(fleet.routers),
            FakeUsageSink(), fleet.clock, self.quota_client,
        )  # fmt: skip
        self.num_begun = 0
        """The number of requests that were admitted, whatever their outcome."""
        self._fleet = fleet

    @asynccontextmanager
    async def admitted_request(self, tokens: int = 0) -> AsyncIterator[RequestAdmission]:
        """Admit a request with one prompt of ``tokens`` tokens. Raises RateLimited."""
        admission = self.controller.create_admission(A)
        await admission.draw_request_quota()
        with admission:
            self.num_begun += 1
            if tokens:
                await admission.draw_token_quota(tokens)
                admission.reserve_tokens([tokens], 1, 0)
            yield admission

    async def admits(self, tokens: int = 0) -> bool:
        try:
            async with self.admitted_request(tokens):
                return True
        except RateLimited:
            return False

    async def turn(self) -> None:
        await self.quota_client.exchange_all(self._fleet.directory, self.controller.share)

    async def hurry(self) -> None:
        await self.quota_client.exchange_due(self._fleet.directory, self.controller.share)


class Fleet:
    """Routers that share the limits of one tenant."""

    def __init__(self, count: int, limits: TenantLimits) -> None:
        self.clock = EagerClock(1000.0)
        self.quota_store = MemoryQuotaStore(self.clock)
        self.routers: list[Router] = []
        self.limit(limits)
        for number in range(count):
            self.routers.append(Router(f"r{number}", self))

    def limit(self, limits: TenantLimits) -> None:
        self.directory: TenantDirectory = build_tenant_directory(
            {A: Tenant(A, limits=limits)}, (), needs_keys=True
        )


async def admitted(router: Router, attempts: int) -> int:
    return sum([await router.admits() for _ in range(attempts)])


async def test_whole_limit_can_be_used_at_one_router() -> None:
    fleet = Fleet(4, TenantLimits(requests_per_minute=60))
    assert await admitted(fleet.routers[0], 100) == 60
    fleet.clock.advance(10)
    assert await admitted(fleet.routers[1], 100) == 10


async def test_alternating_routers_get_exactly_the_limit() -> None:
    fleet = Fleet(2, TenantLimits(requests_per_minute=60))
    counts = [0, 0]
    for number in range(100):
        counts[number % 2] += await fleet.routers[number % 2].admits()
    assert counts == [30, 30]


async def test_flood_at_one_router_leaves_others_their_share() -> None:
    fleet = Fleet(2, TenantLimits(requests_per_minute=600))
    flooded, quiet = fleet.routers
    await quiet.admits()
    await admitted(flooded, 1000)
    refused = 0
    for _ in range(300):  # one minute: the quiet router's share is five requests a second
        fleet.clock.advance(0.2)
        await admitted(flooded, 10)
        refused += not await quiet.admits()
    assert refused == 0


async def test_flood_does_not_query_the_quota_store_once_per_request() -> None:
    fleet = Fleet(2, TenantLimits(requests_per_minute=60, concurrent_requests=10))
    await admitted(fleet.routers[0], 60)
    before = fleet.quota_store.num_exchanges
    assert await admitted(fleet.routers[0], 1000) == 0
    assert fleet.quota_store.num_exchanges <= before + 2


async def test_steady_stream_rarely_waits_for_the_quota_store() -> None:
    fleet = Fleet(2, TenantLimits(60_000, 6_000_000, 100))
    router = fleet.routers[0]
    waited = 0
    for number in range(1000):
        before = fleet.quota_store.num_exchanges
        assert await router.admits(100)
        waited += fleet.quota_store.num_exchanges - before
        fleet.clock.advance(0.01)
        await router.hurry()
        if number % 50 == 49:
            await router.turn()
    assert waited <= 15  # of 2000, if each request queried the store twice
    assert fleet.quota_store.num_exchanges <= 100


async def test_unused_share_returns_to_the_other_routers() -> None:
    fleet = Fleet(2, TenantLimits(requests_per_minute=6000))
    first, second = fleet.routers
    assert await admitted(first, 200) == 200
    for _ in range(10):
        await first.turn()
    assert await admitted(second, 6000) == 6000 - 200 - 600  # a tenth is reserved for the first
    fleet.clock.advance(4)  # the first router has drawn nothing for this long
    assert await admitted(second, 6000) == 600 + 400


async def test_unused_tokens_become_available_to_other_routers() -> None:
    fleet = Fleet(2, TenantLimits(tokens_per_minute=1000))
    first, second = fleet.routers
    async with first.admitted_request(900):
        assert not await second.admits(200)
    await first.turn()
    fleet.clock.advance(0.3)  # until now, the second router has cached that no tokens are left
    assert await second.admits(900)


async def test_rate_limit_headers_count_all_routers() -> None:
    fleet = Fleet(2, TenantLimits(60, 1000))
    first, second = fleet.routers
    async with first.admitted_request(100) as admission:
        assert admission.headers()["x-ratelimit-limit-requests"] == "60"
        assert admission.headers()["x-ratelimit-remaining-requests"] == "59"
        assert admission.headers()["x-ratelimit-remaining-tokens"] == "900"
        async with second.admitted_request(100) as other:
            # The first router has drawn one request in advance.
            assert other.headers()["x-ratelimit-remaining-requests"] == "57"
            assert other.headers()["x-ratelimit-remaining-tokens"] == "750"


async def test_concurrency_slots_are_shared_and_returned() -> None:
    fleet = Fleet(2, TenantLimits(concurrent_requests=3))
    first, second = fleet.routers
    async with AsyncExitStack() as held:
        for router in (first, first, second):
            await held.enter_async_context(router.admitted_request())
        assert not await first.admits()
        assert not await second.admits()
    await first.hurry()
    fleet.clock.advance(0.1)  # until now, the second router has cached that no slot is free
    async with AsyncExitStack() as held:
        for _ in range(2):
            await held.enter_async_context(second.admitted_request())


async def test_returned_concurrency_slot_is_available_at_once() -> None:
    fleet = Fleet(2, TenantLimits(concurrent_requests=2))
    for _ in range(5):
        for router in fleet.routers:
            assert await router.admits()
            await router.hurry()


async def test_concurrency_slot_that_is_being_returned_is_waited_for() -> None:
    fleet = Fleet(2, TenantLimits(concurrent_requests=1))
    first, second = fleet.routers
    assert await first.admits()

    async def gives_up() -> None:
        await first.hurry()

    giving = asyncio.ensure_future(gives_up())
    assert await second.admits()
    await giving


async def test_concurrency_slots_of_a_dead_router_are_freed_after_its_lease() -> None:
    fleet = Fleet(2, TenantLimits(concurrent_requests=1))
    first, second = fleet.routers
    async with first.admitted_request():
        assert not await second.admits()
        fleet.clock.advance(LEASE_SECONDS + 1)
        assert await second.admits()


async def test_routers_admit_their_own_share_while_the_quota_store_is_down() -> None:
    fleet = Fleet(2, TenantLimits(requests_per_minute=60, concurrent_requests=10))
    first, second = fleet.routers
    fleet.quota_store.is_reachable = False
    assert await admitted(first, 100) == 30
    assert not first.quota_client.is_open
    async with AsyncExitStack() as held:
        for _ in range(5):
            await held.enter_async_context(second.admitted_request())
        assert not await second.admits()
    fleet.quota_store.is_reachable = True
    await first.turn()  # reports what was spent
    assert first.quota_client.is_open
    # This is its own share: it does not yet know what the first router has spent.
    assert await admitted(second, 100) == 25
    await second.turn()
    assert second.quota_client.is_open
    fleet.clock.advance(7)
    # Seven requests have become available again, and the first has drawn one.
    assert await admitted(second, 100) == 6


async def test_single_router_does_not_query_the_quota_store() -> None:
    fleet = Fleet(1, TenantLimits(60, 1000, 10))
    [router] = fleet.routers
    assert await admitted(router, 100) == 60
    assert fleet.quota_store.num_exchanges == 0
    fleet.routers.append(Router("r1", fleet))
    await router.turn()  # reports what it spent while it was alone
    assert not await fleet.routers[1].admits()


async def test_request_cancelled_during_a_quota_query_leaks_no_slot() -> None:
    fleet = Fleet(2, TenantLimits(requests_per_minute=60, concurrent_requests=2))
    first, second = fleet.routers
    exchange, queried = fleet.quota_store.exchange, asyncio.Event()

    async def never(router: str, asks: object) -> list[object]:
        queried.set()
        await asyncio.Event().wait()
        raise AssertionError

    fleet.quota_store.exchange = never  # type: ignore[method-assign,assignment]
    leaving = asyncio.ensure_future(first.admits())
    await queried.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    fleet.quota_store.exchange = exchange  # type: ignore[method-assign]
    async with first.admitted_request(), second.admitted_request():
        pass


class LimitsMachine(RuleBasedStateMachine):
    """Runs requests at any router, token reservations, settlements, exchanges with the quota store,
    and outages of the store. One leaky bucket per limit, which drains at the limit's rate, counts
    what all routers admit. It never holds more than 110% of the limit, or, after an outage, 210% of
    the limit plus one request or token per router."""

    @initialize(
        count=st.integers(2, 4),
        requests=st.integers(1, 300),
        tokens=st.integers(20, 3000),
        at_once=st.integers(1, 12),
    )
    def start(self, count: int, requests: int, tokens: int, at_once: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.limits = TenantLimits(requests, tokens, at_once)
        self.fleet = Fleet(count, self.limits)
        self.requests, self.tokens = LeakyBucket(), LeakyBucket()
        self.open: list[tuple[AsyncExitStack, RequestAdmission, int]] = []
        self.outage = False

    @property
    def slack(self) -> float:
        return 2.1 if self.outage else 1.1

    @rule(data=st.data(), share=st.floats(0, 1), times=st.integers(1, 40))
    def admit_requests(self, data: st.DataObject, share: float, times: int) -> None:
        router = data.draw(st.sampled_from(self.fleet.routers))
        tokens = math.ceil(share * (self.limits.tokens_per_minute or 0) / times)
        for _ in range(times):
            self.loop.run_until_complete(self._admit_request(router, tokens))

    async def _admit_request(self, router: Router, tokens: int) -> None:
        """Admit a request if the limits allow it. A request that is refused because of its tokens,
        after it was read, counts as a request; one that was refused earlier does not."""
        held, num_begun = AsyncExitStack(), router.num_begun
        try:
            admission = await held.enter_async_context(router.admitted_request(tokens))
        except RateLimited:
            admission = None
        self._spend(self.requests, self.limits.requests_per_minute, router.num_begun - num_begun)
        if admission is None:
            return
        self._spend(self.tokens, self.limits.tokens_per_minute, tokens)
        self.open.append((held, admission, tokens))

    def _spend(self, meter: LeakyBucket, limit: int | None, amount: int) -> None:
        assert limit is not None
        meter.remaining(limit, self.fleet.clock.monotonic())
        meter.spend(amount)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end_request(self, data: st.DataObject) -> None:
        """End a request that has used no tokens: all tokens that it had reserved are given back."""
        entry = data.draw(st.sampled_from(self.open))
        self.open.remove(entry)
        held, _, tokens = entry
        self.loop.run_until_complete(held.aclose())
        self._spend(self.tokens, self.limits.tokens_per_minute, -tokens)

    @rule(data=st.data())
    def turn(self, data: st.DataObject) -> None:
        self.loop.run_until_complete(data.draw(st.sampled_from(self.fleet.routers)).turn())

    @rule(data=st.data())
    def hurry(self, data: st.DataObject) -> None:
        self.loop.run_until_complete(data.draw(st.sampled_from(self.fleet.routers)).hurry())

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.fleet.clock.advance(seconds)
        for router in self.fleet.routers:  # so that leases don't expire
            self.loop.run_until_complete(router.turn())

    @rule(reachable=st.booleans(), deaf=st.booleans())
    def set_outage(self, reachable: bool, deaf: bool) -> None:
        self.fleet.quota_store.is_reachable, self.fleet.quota_store.drops_replies = reachable, deaf
        self.outage = self.outage or deaf or not reachable

    @invariant()
    def usage_stays_within_the_limit_and_its_slack(self) -> None:
        now = self.fleet.clock.monotonic()
        for meter, limit in (
            (self.requests, self.limits.requests_per_minute),
            (self.tokens, self.limits.tokens_per_minute),
        ):
            assert limit is not None
            parts = len(self.fleet.routers) if self.outage else 0  # a share is at least one request
            assert meter.spent(limit, now) <= self.slack * limit + parts + 1e-3

    @invariant()
    def concurrency_stays_within_the_limit(self) -> None:
        limit = self.limits.concurrent_requests
        assert limit is not None
        if not self.outage:
            assert len(self.open) <= limit

    def teardown(self) -> None:
        for held, _, _ in self.open:
            self.loop.run_until_complete(held.aclose())
        for router in self.fleet.routers:
            assert all(account.is_idle for account in router.controller.quotas().values())
        self.loop.close()


TestLimits = LimitsMachine.TestCase
TestLimits.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
