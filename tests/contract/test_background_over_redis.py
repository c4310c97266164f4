"""Tests two routers that share background responses through Redis: reading, cancelling, and the
death of the router that generates."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis

from baton.clock import SystemClock
from baton.core.ids import TenantId
from router.responses import background_responses, response_service
from router.responses.background_responses import BackgroundResponses
from router.responses.redis_response_leases import RedisResponseLeases
from router.responses.redis_response_store import RedisResponseStore
from router.responses.response_service import ResponseService
from router.responses.response_store import ResponseLimits
from router.responses.stored_response import EncodedResponse, StoredResponse, encode_items
from router.tenants.tenant_directory import TenantDirectory
from tests.responses_harness import enough_memory

ALICE = TenantId("alice")
QUEUED = StoredResponse({"id": "resp_1", "status": "queued", "background": True}, encode_items([]))
COMPLETED = StoredResponse(
    {"id": "resp_1", "status": "completed", "background": True}, encode_items([])
)
LEASE_SECONDS = 0.5


@dataclass
class Router:
    service: ResponseService
    task: asyncio.Task[None]
    released: asyncio.Event
    was_cancelled: bool = False

    async def generate(self, response_id: str) -> StoredResponse:
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return COMPLETED

    async def start(self) -> None:
        await self.service.background.start(ALICE, QUEUED, self.generate)

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    async def wait_for(self, status: str) -> EncodedResponse:
        async with asyncio.timeout(60):
            while (
                found := await self.service.get(ALICE, "resp_1", enough_memory())
            ).status != status:
                await asyncio.sleep(0.01)
        return found


@pytest.fixture
async def routers(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Router, Router]]:
    monkeypatch.setattr(background_responses, "RENEWAL_SECONDS", 0.05)
    monkeypatch.setattr(response_service, "CANCEL_POLL_SECONDS", 0.01)
    async with AsyncExitStack() as exits, Redis.from_url(valkey_url) as client:
        await client.flushdb()

        async def make_router() -> Router:
            clock, directory = SystemClock(), TenantDirectory()
            store = RedisResponseStore(valkey_url, "test", ResponseLimits())
            leases = RedisResponseLeases(valkey_url, "test", LEASE_SECONDS)
            exits.push_async_callback(store.close)
            exits.push_async_callback(leases.close)
            background = BackgroundResponses(store, leases, lambda: directory, clock)
            task = asyncio.create_task(background.run())
            await asyncio.sleep(0)
            service = ResponseService(store, leases, background, clock)
            router = Router(service, task, asyncio.Event())
            exits.push_async_callback(router.kill)
            return router

        yield await make_router(), await make_router()


async def test_another_router_reads_the_response(routers: tuple[Router, Router]) -> None:
    owner, other = routers
    await owner.start()
    await other.wait_for("in_progress")
    await asyncio.sleep(2 * LEASE_SECONDS)
    assert (await other.service.get(ALICE, "resp_1", enough_memory())).status == "in_progress"
    owner.released.set()
    assert (await other.wait_for("completed")).decode() == COMPLETED


async def test_another_router_cancels_the_response(routers: tuple[Router, Router]) -> None:
    owner, other = routers
    await owner.start()
    await other.wait_for("in_progress")
    cancelled = await other.service.cancel(ALICE, "resp_1", enough_memory())
    assert cancelled.status == "cancelled"
    assert owner.was_cancelled


async def test_another_router_deletes_the_response(routers: tuple[Router, Router]) -> None:
    owner, other = routers
    await owner.start()
    await other.wait_for("in_progress")
    await other.service.delete(ALICE, "resp_1", enough_memory())
    async with asyncio.timeout(60):
        while owner.service.background.num_running:
            await asyncio.sleep(0.01)
    assert owner.was_cancelled
    assert await other.service.store.get(ALICE, "resp_1") is None


async def test_another_router_notices_the_death_of_its_router(
    routers: tuple[Router, Router],
) -> None:
    owner, other = routers
    await owner.start()
    await other.wait_for("in_progress")
    await owner.kill()
    failed = await other.wait_for("failed")
    assert failed.decode_response()["error"]["code"] == "server_error"


async def test_a_shutdown_is_noticed_at_once(routers: tuple[Router, Router]) -> None:
    owner, other = routers
    await owner.start()
    await other.wait_for("in_progress")
    await owner.kill()
    await owner.service.background.stop()
    assert (await other.service.get(ALICE, "resp_1", enough_memory())).status == "failed"
