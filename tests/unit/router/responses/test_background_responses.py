"""Tests background responses over two routers that share stores in memory: statuses, cancellation,
bounds, and what happens when a response's router or Redis goes away."""

import asyncio
from collections.abc import Awaitable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from baton.clock import ManualClock
from baton.core.ids import TenantId
from baton.errors import Invalid, Overloaded, Unavailable
from router.errors import ApiError
from router.responses import background_responses
from router.responses.background_responses import BackgroundResponses
from router.responses.response_lease import LEASE_SECONDS, LeaseKey, LeaseState
from router.responses.response_service import ResponseService
from router.responses.response_store import ResponseLimits
from router.responses.stored_response import StoredResponse, encode_items
from router.tenants.rate_limit_errors import RateLimited
from router.tenants.tenant_directory import TenantDirectory
from testkit.fakes.response_leases import MemoryResponseLeases
from testkit.fakes.response_store import MemoryResponseStore
from tests.responses_harness import enough_memory

ALICE, BOB = TenantId("alice"), TenantId("bob")


def queued(name: str = "1", **fields: Any) -> StoredResponse:
    response = {"id": f"resp_{name}", "status": "queued", "background": True, "output": []}
    return StoredResponse({**response, **fields}, encode_items([{"id": "msg_1"}]))


def completed(name: str = "1", text: str = "Hi") -> StoredResponse:
    return queued(name, status="completed", output=[{"text": text}])


class FlakyStore(MemoryResponseStore):
    is_reachable = True

    async def replace(self, tenant: TenantId, stored: StoredResponse) -> bool:
        if not self.is_reachable:
            raise Unavailable("gone")
        return await super().replace(tenant, stored)


class Shared:
    """The stores that all routers share, and the clock of routers and stores."""

    def __init__(self, **limits: Any) -> None:
        self.clock = ManualClock()
        self.store = FlakyStore(ResponseLimits(**limits), self.clock)
        self.leases = MemoryResponseLeases(self.clock)

    def make_router(self, directory: TenantDirectory | None = None) -> ResponseService:
        directory = directory or TenantDirectory()
        background = BackgroundResponses(self.store, self.leases, lambda: directory, self.clock)
        return ResponseService(self.store, self.leases, background, self.clock)

    async def elapse(self, seconds: float) -> None:
        """Advance the clock in steps of 0.1 s, and let all tasks run after each step."""
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            await settle()

    async def status(self, router: ResponseService, name: str = "1") -> object:
        return (await router.get(ALICE, f"resp_{name}", enough_memory())).status


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def running(router: ResponseService) -> Any:
    """Run a router's background responses until the ``with`` block ends, then stop them as a router
    does when it shuts down."""
    task = asyncio.create_task(router.background.run())
    await settle()
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        await router.background.stop()


class Generations:
    """Generates responses. A generation waits until ``released`` is set, and then raises ``error``,
    unless that is None."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.num_cancelled = 0
        self.error: BaseException | None = None

    async def generate(self, response_id: str) -> StoredResponse:
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return completed(response_id.removeprefix("resp_"))


async def test_a_response_goes_from_queued_to_completed() -> None:
    shared, generations = Shared(), Generations()
    router, other = shared.make_router(), shared.make_router()
    closed: list[str] = []
    with ExitStack() as held:
        held.callback(closed.append, "closed")
        async with running(router):
            answer = await router.background.start(
                ALICE, queued(), generations.generate, held.pop_all()
            )
            assert answer == orjson.dumps(queued().response)
            assert await shared.status(other) == "queued"
            await settle()
            assert await shared.status(other) == "in_progress"
            await shared.elapse(3 * LEASE_SECONDS)
            assert await shared.status(other) == "in_progress"
            generations.released.set()
            await settle()
            assert (await other.get(ALICE, "resp_1", enough_memory())).decode() == completed()
            assert closed == ["closed"]
            assert router.background.num_running == 0
    assert (await other.get(ALICE, "resp_1", enough_memory())).decode() == completed()


FAILURES: list[tuple[BaseException, str, str]] = [
    (Invalid("too long"), "invalid_prompt", "too long"),
    (RateLimited("tokens", "slower", "tokens", 1.0), "rate_limit_exceeded", "slow"),
    (Unavailable("no worker"), "server_error", "no worker"),
    (ApiError(500, "broken"), "server_error", "broken"),
    (TimeoutError(), "server_error", "in time"),
    (RuntimeError("secret"), "server_error", "internal error"),
]


@pytest.mark.parametrize(("error", "code", "message"), FAILURES)
async def test_an_error_makes_the_response_fail(
    error: BaseException, code: str, message: str
) -> None:
    shared, generations = Shared(), Generations()
    router = shared.make_router()
    generations.error = error
    generations.released.set()
    async with running(router):
        with capture_logs() as logs:
            await router.background.start(ALICE, queued(), generations.generate)
            await settle()
        response = (await router.get(ALICE, "resp_1", enough_memory())).decode_response()
        assert (response["status"], response["error"]["code"]) == ("failed", code)
        assert message in response["error"]["message"]
        crashes = [line["event"] for line in logs]
        assert crashes == ["background_response_crashed"] * isinstance(error, RuntimeError)


@pytest.mark.parametrize("through", ["own", "other"])
async def test_a_cancellation_ends_the_generation(through: str) -> None:
    shared, generations = Shared(), Generations()
    router, other = shared.make_router(), shared.make_router()
    async with running(router):
        await router.background.start(ALICE, queued(), generations.generate)
        await settle()
        asked = router if through == "own" else other
        cancelling = asyncio.create_task(asked.cancel(ALICE, "resp_1", enough_memory()))
        await shared.elapse(1.5)
        assert (await cancelling).status == "cancelled"
        assert generations.num_cancelled == 1
        again = await asked.cancel(ALICE, "resp_1", enough_memory())
        assert again.decode_response() == {**queued().response, "status": "cancelled"}
        assert router.background.num_running == 0


async def test_a_cancellation_before_the_generation_begins() -> None:
    shared, generations = Shared(), Generations()
    router = shared.make_router()
    async with running(router):
        await router.background.start(ALICE, queued(), generations.generate)
        assert router.background.cancel(LeaseKey(ALICE, "resp_1"))
        await settle()
        assert await shared.status(router) == "cancelled"
        assert generations.num_cancelled == 0


async def test_a_cancellation_waits_only_for_a_while() -> None:
    shared = Shared()
    router = shared.make_router()
    await shared.store.put(ALICE, queued())
    await shared.leases.renew([LeaseKey(ALICE, "resp_1")])  # by a router that is frozen
    cancelling = asyncio.create_task(router.cancel(ALICE, "resp_1", enough_memory()))
    await shared.elapse(5.5)
    assert (await cancelling).status == "queued"


async def test_only_background_responses_can_be_cancelled() -> None:
    shared = Shared()
    router = shared.make_router()
    await shared.store.put(
        ALICE, StoredResponse({"id": "resp_1", "status": "completed"}, encode_items([]))
    )
    with pytest.raises(ApiError, match="background: true") as error:
        await router.cancel(ALICE, "resp_1", enough_memory())
    assert error.value.status == 400
    with pytest.raises(ApiError, match="not found"):
        await router.cancel(BOB, "resp_1", enough_memory())


@pytest.mark.parametrize("through", ["own", "other"])
async def test_a_deleted_response_does_not_come_back(through: str) -> None:
    shared, generations = Shared(), Generations()
    router, other = shared.make_router(), shared.make_router()
    async with running(router):
        await router.background.start(ALICE, queued(), generations.generate)
        await settle()
        await (router if through == "own" else other).delete(ALICE, "resp_1", enough_memory())
        await shared.elapse(1.5)
        assert generations.num_cancelled == 1
    assert await shared.store.get(ALICE, "resp_1") is None


async def test_a_response_deleted_before_it_begins_is_not_generated() -> None:
    shared, generations = Shared(), Generations()
    router = shared.make_router()
    generations.released.set()
    async with running(router):
        await router.background.start(ALICE, queued(), generations.generate)
        await shared.store.delete(ALICE, "resp_1")
        await settle()
        assert router.background.num_running == generations.num_cancelled == 0
    assert await shared.store.get(ALICE, "resp_1") is None


async def test_a_response_fails_when_its_router_dies() -> None:
    shared, generations = Shared(), Generations()
    router, other = shared.make_router(), shared.make_router()
    task = asyncio.create_task(router.background.run())
    await settle()
    await router.background.start(ALICE, queued(), generations.generate)
    await settle()
    task.cancel()  # and no stop()
    await asyncio.wait([task])
    await shared.elapse(LEASE_SECONDS - 1)
    assert await shared.status(other) == "in_progress"
    await shared.elapse(2)
    for _ in range(2):
        response = (await other.get(ALICE, "resp_1", enough_memory())).decode_response()
        assert (response["status"], response["error"]) == (
            "failed",
            {"code": "server_error", "message": "the router that generated this response ended"},
        )


async def test_a_router_that_was_taken_for_dead_gives_up() -> None:
    shared, generations = Shared(), Generations()
    router, other = shared.make_router(), shared.make_router()
    async with running(router):
        await router.background.start(ALICE, queued(), generations.generate)
        await settle()
        await shared.leases.release(LeaseKey(ALICE, "resp_1"))
        assert await shared.status(other) == "failed"
        with capture_logs() as logs:
            await shared.elapse(1.5)
        assert [line["event"] for line in logs] == ["background_response_ended_elsewhere"]
        assert generations.num_cancelled == 1
        assert router.background.num_running == 0
    assert await shared.status(other) == "failed"


async def test_an_outage_of_the_leases_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, generations = Shared(), Generations()
    router = shared.make_router()
    async with running(router):
        await router.background.start(ALICE, queued(), generations.generate)
        await settle()

        async def renew(keys: object) -> list[LeaseState]:
            raise Unavailable("gone")

        with monkeypatch.context() as patched, capture_logs() as logs:
            patched.setattr(shared.leases, "renew", renew)
            await shared.elapse(5)
        assert [line["event"] for line in logs] == ["response_leases_not_renewed"]
        await shared.elapse(2)
        generations.released.set()
        await settle()
        assert await shared.status(router) == "completed"


async def test_a_shutdown_stores_what_was_not_generated_as_failed() -> None:
    shared, generations = Shared(), Generations()
    router, other = shared.make_router(), shared.make_router()
    async with running(router):
        await router.background.start(ALICE, queued(), generations.generate)
        await settle()
    response = (await other.get(ALICE, "resp_1", enough_memory())).decode_response()
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert generations.num_cancelled == 1
    with pytest.raises(Unavailable):
        await router.background.start(ALICE, queued("2"), generations.generate)


async def test_the_end_is_stored_once_the_store_is_back() -> None:
    shared, generations = Shared(), Generations()
    router = shared.make_router()
    async with running(router):
        await router.background.start(ALICE, queued(), generations.generate)
        await settle()
        shared.store.is_reachable = False
        generations.released.set()
        await shared.elapse(5)
        assert router.background.num_running == 1
        shared.store.is_reachable = True
        await shared.elapse(1.5)
        assert await shared.status(router) == "completed"


async def test_a_store_that_stays_away_loses_the_response() -> None:
    shared, generations = Shared(), Generations()
    router = shared.make_router()
    generations.released.set()
    shared.store.is_reachable = False
    async with running(router):
        await router.background.start(ALICE, queued(), generations.generate)
        with capture_logs() as logs:
            await shared.elapse(65)
        assert [line["event"] for line in logs] == ["background_response_lost"]
        assert router.background.num_running == 0
        shared.store.is_reachable = True
        await shared.elapse(LEASE_SECONDS)
        assert await shared.status(router) == "failed"


async def test_an_answer_that_is_too_large_fails() -> None:
    shared = Shared(tenant_bytes=2000)
    router = shared.make_router()

    async def generate(response_id: str) -> StoredResponse:
        return completed(text="x" * 4000)

    async with running(router):
        await router.background.start(ALICE, queued(), generate)
        await settle()
        response = (await router.get(ALICE, "resp_1", enough_memory())).decode_response()
        assert (response["status"], response["output"]) == ("failed", [])
        assert "store" in response["error"]["message"]


async def test_too_many_responses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_responses, "MAX_RUNNING_PER_TENANT", 2)
    monkeypatch.setattr(background_responses, "MAX_RUNNING", 3)
    shared, generations = Shared(), Generations()
    router = shared.make_router()
    closed: list[str] = []

    def start(tenant: TenantId, name: str) -> Awaitable[Any]:
        held = ExitStack()
        held.callback(closed.append, name)
        return router.background.start(tenant, queued(name), generations.generate, held)

    async with running(router):
        await start(ALICE, "1")
        await start(ALICE, "2")
        with pytest.raises(Overloaded, match="of this tenant"):
            await start(ALICE, "3")
        await start(BOB, "4")
        with pytest.raises(Overloaded, match="its limit of 3"):
            await start(BOB, "5")
        assert closed == ["3", "5"]
        assert await shared.store.get(ALICE, "resp_3") is None
        generations.released.set()
        await settle()
        await start(ALICE, "6")
        await settle()
        assert sorted(closed) == ["1", "2", "3", "4", "5", "6"]


async def test_inputs_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_responses, "MAX_RUNNING_BYTES", 1000)
    shared, generations = Shared(), Generations()
    router = shared.make_router()
    async with running(router):
        await router.background.start(ALICE, queued("1", x="x" * 600), generations.generate)
        with pytest.raises(Overloaded, match="bytes of background responses"):
            await router.background.start(ALICE, queued("2", x="x" * 600), generations.generate)


async def test_what_can_not_be_stored_is_not_started() -> None:
    shared, generations = Shared(tenant_bytes=1000), Generations()
    router = shared.make_router()
    closed: list[str] = []
    held = ExitStack()
    held.callback(closed.append, "closed")
    async with running(router):
        with pytest.raises(Invalid):
            await router.background.start(ALICE, queued(x="x" * 1000), generations.generate, held)
        assert (closed, router.background.num_running) == (["closed"], 0)


async def test_what_is_too_large_to_be_stored_leaves_no_lease() -> None:
    shared = Shared(tenant_bytes=600)
    router = shared.make_router()
    async with running(router):
        with pytest.raises(Invalid):
            await router.background.start(ALICE, queued(text="x" * 600), unexpected)
    assert not await shared.leases.cancel(LeaseKey(ALICE, "resp_1"))


async def unexpected(_response_id: str) -> StoredResponse:
    raise AssertionError("the response must not be generated")
