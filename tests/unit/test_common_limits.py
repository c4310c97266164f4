"""A tenant's limits over several routers: used from anywhere, exceeded by no more than is said."""

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
from baton.core.ids import TenantId
from router.tenants.admission import AdmissionController, RequestAdmission
from router.tenants.fair_limiter import FairLimiter
from router.tenants.leaky_bucket import LeakyBucket
from router.tenants.metrics import TenantMetrics
from router.tenants.quota_client import QuotaClient
from router.tenants.quota_store import LEASE_SECONDS, MemoryQuotaStore
from router.tenants.rate_limit_errors import RateLimited
from router.tenants.request_usage import RequestUsage
from router.tenants.tenant import Tenant, TenantLimits
from router.tenants.tenant_directory import TenantDirectory, build_tenant_directory

A = TenantId("a")


class Notes:
    def note_spent(self, tenant: TenantId, spent: RequestUsage) -> None: ...

    def note_refused(self, tenant: TenantId, reason: str) -> None: ...


class EagerClock(ManualClock):
    """Whoever sleeps moves it."""

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)


class Router:
    def __init__(self, name: str, fleet: "Fleet") -> None:
        self.metrics = TenantMetrics(CollectorRegistry())
        self.bank = QuotaClient(fleet.treasury, name, fleet.clock, self.metrics.limits_split)
        self.entrance = AdmissionController(
            FairLimiter(1000), lambda: fleet.roll, lambda: len(fleet.routers), Notes(), fleet.clock,
            self.bank,
        )  # fmt: skip
        self.num_begun = 0
        """Requests that its door let in, whatever became of them."""
        self._fleet = fleet

    @asynccontextmanager
    async def visit(self, tokens: int = 0) -> AsyncIterator[RequestAdmission]:
        """Of one prompt with so many tokens. Raises RateLimited."""
        visit = self.entrance.enter(A)
        await visit.prepare()
        with visit:
            self.num_begun += 1
            if tokens:
                await visit.prepare_promise(tokens)
                visit.promise([tokens], 1, 0)
            yield visit

    async def admits(self, tokens: int = 0) -> bool:
        try:
            async with self.visit(tokens):
                return True
        except RateLimited:
            return False

    async def turn(self) -> None:
        await self.bank.turn(self._fleet.roll, self.entrance.share)

    async def hurry(self) -> None:
        await self.bank.hurry(self._fleet.roll, self.entrance.share)


class Fleet:
    """Routers that share the limits of one tenant."""

    def __init__(self, count: int, limits: TenantLimits) -> None:
        self.clock = EagerClock(1000.0)
        self.treasury = MemoryQuotaStore(self.clock)
        self.routers: list[Router] = []
        self.limit(limits)
        for number in range(count):
            self.routers.append(Router(f"r{number}", self))

    def limit(self, limits: TenantLimits) -> None:
        self.roll: TenantDirectory = build_tenant_directory(
            {A: Tenant(A, limits=limits)}, (), needs_keys=True
        )


async def admitted(router: Router, attempts: int) -> int:
    return sum([await router.admits() for _ in range(attempts)])


async def test_all_of_a_limit_is_there_at_one_router() -> None:
    fleet = Fleet(4, TenantLimits(requests_per_minute=60))
    assert await admitted(fleet.routers[0], 100) == 60
    fleet.clock.advance(10)
    assert await admitted(fleet.routers[1], 100) == 10


async def test_routers_that_take_turns_get_all_of_it_and_no_more() -> None:
    fleet = Fleet(2, TenantLimits(requests_per_minute=60))
    counts = [0, 0]
    for number in range(100):
        counts[number % 2] += await fleet.routers[number % 2].admits()
    assert counts == [30, 30]


async def test_a_flood_at_one_router_leaves_others_their_part() -> None:
    fleet = Fleet(2, TenantLimits(requests_per_minute=600))
    flooded, quiet = fleet.routers
    await quiet.admits()
    await admitted(flooded, 1000)
    refused = 0
    for _ in range(300):  # a minute: five a second are the quiet one's part
        fleet.clock.advance(0.2)
        await admitted(flooded, 10)
        refused += not await quiet.admits()
    assert refused == 0


async def test_a_flood_is_not_asked_about_once_each() -> None:
    fleet = Fleet(2, TenantLimits(requests_per_minute=60, concurrent_requests=10))
    await admitted(fleet.routers[0], 60)
    before = fleet.treasury.num_exchanges
    assert await admitted(fleet.routers[0], 1000) == 0
    assert fleet.treasury.num_exchanges <= before + 2


async def test_the_treasury_is_off_the_path_of_a_steady_stream() -> None:
    fleet = Fleet(2, TenantLimits(60_000, 6_000_000, 100))
    router = fleet.routers[0]
    waited = 0
    for number in range(1000):
        before = fleet.treasury.num_exchanges
        assert await router.admits(100)
        waited += fleet.treasury.num_exchanges - before
        fleet.clock.advance(0.01)
        await router.hurry()
        if number % 50 == 49:
            await router.turn()
    assert waited <= 15  # of 2000 that would be asked
    assert fleet.treasury.num_exchanges <= 100


async def test_what_one_router_does_not_use_comes_back_to_the_others() -> None:
    fleet = Fleet(2, TenantLimits(requests_per_minute=6000))
    first, second = fleet.routers
    assert await admitted(first, 200) == 200
    for _ in range(10):
        await first.turn()
    assert await admitted(second, 6000) == 6000 - 200 - 600  # a tenth is kept for the first
    fleet.clock.advance(4)  # who has drawn nothing for so long
    assert await admitted(second, 6000) == 600 + 400


async def test_tokens_that_were_not_used_are_there_for_others() -> None:
    fleet = Fleet(2, TenantLimits(tokens_per_minute=1000))
    first, second = fleet.routers
    async with first.visit(900):
        assert not await second.admits(200)
    await first.turn()
    fleet.clock.advance(0.3)  # so long the second believes that there are none
    assert await second.admits(900)


async def test_headers_tell_of_all_routers() -> None:
    fleet = Fleet(2, TenantLimits(60, 1000))
    first, second = fleet.routers
    async with first.visit(100) as visit:
        assert visit.headers()["x-ratelimit-limit-requests"] == "60"
        assert visit.headers()["x-ratelimit-remaining-requests"] == "59"
        assert visit.headers()["x-ratelimit-remaining-tokens"] == "900"
        async with second.visit(100) as other:
            assert other.headers()["x-ratelimit-remaining-requests"] == "57"  # one is the first's
            assert other.headers()["x-ratelimit-remaining-tokens"] == "750"


async def test_seats_are_shared_and_come_back() -> None:
    fleet = Fleet(2, TenantLimits(concurrent_requests=3))
    first, second = fleet.routers
    async with AsyncExitStack() as held:
        for router in (first, first, second):
            await held.enter_async_context(router.visit())
        assert not await first.admits()
        assert not await second.admits()
    await first.hurry()
    fleet.clock.advance(0.1)  # so long the second believes that there is none
    async with AsyncExitStack() as held:
        for _ in range(2):
            await held.enter_async_context(second.visit())


async def test_a_seat_that_was_given_back_can_be_had_again_at_once() -> None:
    fleet = Fleet(2, TenantLimits(concurrent_requests=2))
    for _ in range(5):
        for router in fleet.routers:
            assert await router.admits()
            await router.hurry()


async def test_a_seat_that_is_just_being_given_up_is_waited_for() -> None:
    fleet = Fleet(2, TenantLimits(concurrent_requests=1))
    first, second = fleet.routers
    assert await first.admits()

    async def gives_up() -> None:
        await first.hurry()

    giving = asyncio.ensure_future(gives_up())
    assert await second.admits()
    await giving


async def test_the_seats_of_a_router_that_died_come_back() -> None:
    fleet = Fleet(2, TenantLimits(concurrent_requests=1))
    first, second = fleet.routers
    async with first.visit():
        assert not await second.admits()
        fleet.clock.advance(LEASE_SECONDS + 1)
        assert await second.admits()


async def test_each_gives_its_part_while_the_treasury_is_gone() -> None:
    fleet = Fleet(2, TenantLimits(requests_per_minute=60, concurrent_requests=10))
    first, second = fleet.routers
    fleet.treasury.reachable = False
    assert await admitted(first, 100) == 30
    assert not first.bank.is_open
    async with AsyncExitStack() as held:
        for _ in range(5):
            await held.enter_async_context(second.visit())
        assert not await second.admits()
    fleet.treasury.reachable = True
    await first.turn()  # tells what was spent
    assert first.bank.is_open
    assert await admitted(second, 100) == 25  # of its part: it does not know yet
    await second.turn()
    assert second.bank.is_open
    fleet.clock.advance(7)
    assert await admitted(second, 100) == 6  # seven have come back, and the first has drawn one


async def test_alone_nobody_is_asked() -> None:
    fleet = Fleet(1, TenantLimits(60, 1000, 10))
    [router] = fleet.routers
    assert await admitted(router, 100) == 60
    assert fleet.treasury.num_exchanges == 0
    fleet.routers.append(Router("r1", fleet))
    await router.turn()  # tells what it spent alone
    assert not await fleet.routers[1].admits()


async def test_whoever_leaves_while_the_treasury_is_asked_costs_no_seat() -> None:
    fleet = Fleet(2, TenantLimits(requests_per_minute=60, concurrent_requests=2))
    first, second = fleet.routers
    exchange, asked = fleet.treasury.exchange, asyncio.Event()

    async def never(router: str, asks: object) -> list[object]:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    fleet.treasury.exchange = never  # type: ignore[method-assign,assignment]
    leaving = asyncio.ensure_future(first.admits())
    await asked.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    fleet.treasury.exchange = exchange  # type: ignore[method-assign]
    async with first.visit(), second.visit():
        pass


class LimitsMachine(RuleBasedStateMachine):
    """Requests at any router, promises, settlements, turns, outages: one bucket that drains at the
    limit's rate never holds more than the limit, and a tenth; twice the limit with outages."""

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
    def come(self, data: st.DataObject, share: float, times: int) -> None:
        router = data.draw(st.sampled_from(self.fleet.routers))
        tokens = math.ceil(share * (self.limits.tokens_per_minute or 0) / times)
        for _ in range(times):
            self.loop.run_until_complete(self._come(router, tokens))

    async def _come(self, router: Router, tokens: int) -> None:
        """Who is refused for its tokens once it was read counts as a request, and nobody before."""
        held, num_begun = AsyncExitStack(), router.num_begun
        try:
            visit = await held.enter_async_context(router.visit(tokens))
        except RateLimited:
            visit = None
        self._spend(self.requests, self.limits.requests_per_minute, router.num_begun - num_begun)
        if visit is None:
            return
        self._spend(self.tokens, self.limits.tokens_per_minute, tokens)
        self.open.append((held, visit, tokens))

    def _spend(self, meter: LeakyBucket, limit: int | None, amount: int) -> None:
        assert limit is not None
        meter.remaining(limit, self.fleet.clock.monotonic())
        meter.spend(amount)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Nothing was used: all tokens are given back."""
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
        for router in self.fleet.routers:  # so that leases don't end
            self.loop.run_until_complete(router.turn())

    @rule(reachable=st.booleans(), deaf=st.booleans())
    def fail(self, reachable: bool, deaf: bool) -> None:
        self.fleet.treasury.reachable, self.fleet.treasury.deaf = reachable, deaf
        self.outage = self.outage or deaf or not reachable

    @invariant()
    def no_more_than_the_limit_and_the_slack(self) -> None:
        now = self.fleet.clock.monotonic()
        for meter, limit in (
            (self.requests, self.limits.requests_per_minute),
            (self.tokens, self.limits.tokens_per_minute),
        ):
            assert limit is not None
            parts = len(self.fleet.routers) if self.outage else 0  # a part is one at least
            assert meter.spent(limit, now) <= self.slack * limit + parts + 1e-3

    @invariant()
    def no_more_at_once(self) -> None:
        limit = self.limits.concurrent_requests
        assert limit is not None
        if not self.outage:
            assert len(self.open) <= limit

    def teardown(self) -> None:
        for held, _, _ in self.open:
            self.loop.run_until_complete(held.aclose())
        for router in self.fleet.routers:
            assert all(account.is_idle for account in router.entrance.accounts().values())
        self.loop.close()


TestLimits = LimitsMachine.TestCase
TestLimits.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
