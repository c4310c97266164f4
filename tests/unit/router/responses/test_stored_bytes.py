"""Tests the limit on stored responses in memory, and that a slow client holds its part of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from baton.core.ids import TenantId
from baton.errors import Overloaded
from baton.text.tokenizer import Tokenizer
from router.limits import UNMETERED_BYTES
from router.responses.stored_response import EncodedResponse, StoredResponse, encode_items
from router.serving import memory_budgets as stored_bytes
from router.serving.memory_budgets import StoredBytesBudget
from tests.responses_harness import RESPOND, DictStore
from tests.router_harness import RouterHarness, open_harness, wrong_error
from tests.unit import small_chats

hermes = small_chats.hermes

ANONYMOUS = TenantId("default")
TEXT = "x" * 2**20
SIZE = 2 * 2**20
"""More than the size of the response ``resp_large``, which has the text, and an input with it."""


class LargeStore(DictStore):
    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0
        for name, text in (("large", TEXT), ("small", "x")):
            response = {
                "id": f"resp_{name}", "object": "response", "status": "completed",
                "output": [{"type": "message", "content": text}],
            }  # fmt: skip
            item = {
                "type": "message", "id": f"msg_{name}", "role": "user", "status": "completed",
                "content": [{"type": "input_text", "text": text}],
            }  # fmt: skip
            self.stored[ANONYMOUS, f"resp_{name}"] = StoredResponse(response, encode_items([item]))

    async def get(self, tenant: TenantId, response_id: str) -> EncodedResponse | None:
        self.num_reads += 1
        return await super().get(tenant, response_id)


def test_small_responses_do_not_count() -> None:
    budget = StoredBytesBudget(1000)
    with budget.new_share(ANONYMOUS, 1.0, shared=False) as share:
        share.require(UNMETERED_BYTES)
        assert budget.num_in_use == 0
        share.require(UNMETERED_BYTES + 600)
        share.require(UNMETERED_BYTES + 400)  # less than is held
        assert budget.num_in_use == 600
        with pytest.raises(Overloaded, match="bytes of stored responses"):
            share.require(UNMETERED_BYTES + 1001)
        assert budget.num_in_use == 600
    assert budget.num_in_use == 0


@asynccontextmanager
async def one_at_a_time(
    tokenizer: Tokenizer,
) -> AsyncIterator[tuple[RouterHarness, httpx.AsyncClient, LargeStore]]:
    """A router with memory for one large response."""
    store = LargeStore()
    async with open_harness(tokenizer, "Yes", response_store=store) as (router, client):
        router.service.resources.stored_bytes = StoredBytesBudget(int(1.5 * SIZE))
        yield router, client, store


@pytest.mark.parametrize("path", ["resp_large", "resp_large/input_items"])
async def test_a_client_that_does_not_read_holds_memory(hermes: Tokenizer, path: str) -> None:
    async with one_at_a_time(hermes) as (router, client, store):
        budget = router.service.resources.stored_bytes
        async with client.stream("GET", f"{RESPOND}/{path}") as unread:
            assert unread.status_code == 200
            assert SIZE - UNMETERED_BYTES < budget.num_in_use < 1.1 * SIZE
            reads = store.num_reads
            for method, other in (
                ("GET", path),
                ("GET", "resp_large/input_items"),
                ("DELETE", "resp_large"),
                ("POST", "resp_large/cancel"),
            ):
                refused = await client.request(method, f"{RESPOND}/{other}")
                message = wrong_error(refused, 429)["message"]
                assert "bytes of stored responses" in message
                assert int(refused.headers["retry-after"]) > 0
            continued = {"input": "B", "previous_response_id": "resp_large"}
            refused = await client.post(RESPOND, json=continued)
            assert "bytes of stored responses" in wrong_error(refused, 429)["message"]
            assert store.num_reads == reads, "a response without room must not be read"
            small = await client.get(f"{RESPOND}/resp_small")
            assert small.json()["output"][0]["content"] == "x"
            body = b"".join([part async for part in unread.aiter_bytes()])
        assert body.count(TEXT.encode()) == 1
        await until_free(budget)
        assert (await client.get(f"{RESPOND}/{path}")).content == body
        await until_free(budget)


async def test_a_client_that_disconnects_releases_memory(hermes: Tokenizer) -> None:
    async with one_at_a_time(hermes) as (router, client, _):
        budget = router.service.resources.stored_bytes
        async with client.stream("GET", f"{RESPOND}/resp_large"):
            assert budget.num_in_use > 0
        await until_free(budget)


async def test_a_response_that_has_grown_since_is_counted_as_it_is(
    hermes: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response in the background was small when its size was asked for."""
    async with one_at_a_time(hermes) as (router, client, store):

        async def small(tenant: TenantId, response_id: str) -> int:
            return 1

        monkeypatch.setattr(store, "size_bytes", small)
        monkeypatch.setattr(stored_bytes, "UNMETERED_BYTES", 0)
        router.service.resources.stored_bytes = StoredBytesBudget(1000)
        refused = await client.get(f"{RESPOND}/resp_large")
        assert "bytes of stored responses" in wrong_error(refused, 429)["message"]
        assert router.service.resources.stored_bytes.num_in_use == 0


async def until_free(budget: StoredBytesBudget) -> None:
    """Wait until the server has noticed that the client has read everything or disconnected."""
    async with asyncio.timeout(30):
        while budget.num_in_use:
            await asyncio.sleep(0)
