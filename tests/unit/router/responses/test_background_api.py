"""Tests ``background: true`` in ``POST /v1/responses``, from the request to the stored response,
over in-memory workers."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from baton.core.ids import TenantId
from baton.text.tokenizer import Tokenizer
from router.http import raw_body
from router.responses import background_responses, endpoints
from router.responses.stored_response import EncodedItems, encode_items
from router.serving import offload_executor
from router.tenants.tenant import Tenant, TenantLimits
from router.tenants.tenant_directory import TenantDirectory
from tests import router_harness
from tests.open_responses_schema import response_errors
from tests.router_harness import RouterHarness, eventually, open_harness, wrong_error

tokenizer = router_harness.tokenizer
RESPONSES = "/v1/responses"
DEFAULT = TenantId("default")


def asking(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": "Hi", "background": True, **fields}


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer, **settings: Any
) -> AsyncIterator[tuple[RouterHarness, httpx.AsyncClient]]:
    async with open_harness(tokenizer, stores_responses=True, **settings) as (router, client):
        assert router.response_service is not None
        background = router.response_service.background
        task = asyncio.create_task(background.run())
        await asyncio.sleep(0)
        yield router, client
        task.cancel()
        await asyncio.wait([task])
        await background.stop()


async def start(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(RESPONSES, json=asking(**fields))
    assert answer.status_code == 200, answer.text
    response = checked(answer)
    assert (response["status"], response["output"]) == ("queued", [])
    return response


async def get(client: httpx.AsyncClient, response: dict[str, Any]) -> dict[str, Any]:
    found = checked(await client.get(f"{RESPONSES}/{response['id']}"))
    assert (found["completed_at"] is not None) == (found["status"] == "completed")
    return found


def checked(answer: httpx.Response) -> dict[str, Any]:
    """Return a response that is as OpenAI's client and Open Responses expect it."""
    response: dict[str, Any] = answer.json()
    Response.model_validate(response, strict=True)
    assert response_errors(response) == []
    return response


async def wait_for_end(client: httpx.AsyncClient, response: dict[str, Any]) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (found := await get(client, response))["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.005)
    return found


async def test_a_background_response_is_generated_and_continued(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as (_, client):
        queued = await start(client, metadata={"a": "b"})
        found = await wait_for_end(client, queued)
        assert (found["status"], found["background"]) == ("completed", True)
        assert found["output"][0]["content"][0]["text"] == "Hello, wörld!"
        assert found["usage"]["output_tokens"] > 0
        assert found["metadata"] == {"a": "b"}
        items = (await client.get(f"{RESPONSES}/{queued['id']}/input_items")).json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["Hi"]
        body = asking(background=False, previous_response_id=queued["id"], max_output_tokens=1)
        answer = await client.post(RESPONSES, json=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("limit", "is_offloaded"), [(100, True), (1000, False)])
async def test_the_input_of_a_background_response_is_encoded_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, limit: int, is_offloaded: bool
) -> None:
    """It is stored three times: queued, in progress, and completed."""
    threads: list[threading.Thread] = []

    def noting(items: Sequence[Mapping[str, Any]]) -> EncodedItems:
        threads.append(threading.current_thread())
        return encode_items(items)

    monkeypatch.setattr(endpoints, "encode_items", noting)
    monkeypatch.setattr(offload_executor, "MIN_OFFLOAD_BYTES", limit)
    async with serving(tokenizer) as (_, client):
        queued = await start(client, metadata={"a": "x" * 100})
        assert (await wait_for_end(client, queued))["status"] == "completed"
    assert [thread is not threading.main_thread() for thread in threads] == [is_offloaded]


async def test_openais_client_polls(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as (_, http):
        client = AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=http)
        response = await client.responses.create(model="demo", input="Hi", background=True)
        async with asyncio.timeout(60):
            while response.status in ("queued", "in_progress"):
                response = await client.responses.retrieve(response.id)
        assert response.output_text == "Hello, wörld!"
        assert (await client.responses.cancel(response.id)).status == "completed"
        assert len((await client.responses.input_items.list(response.id)).data) == 1
        await client.responses.delete(response.id)


async def test_an_incomplete_answer_is_incomplete(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as (_, client):
        found = await wait_for_end(client, await start(client, max_output_tokens=3))
        assert found["status"] == "incomplete"
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"store": False}, "background"), ({"stream": True}, "stream"), ({"input": 3}, "input")],
)
async def test_what_can_not_run_in_the_background_is_refused(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    async with serving(tokenizer) as (_, client):
        answer = await client.post(RESPONSES, json=asking(**fields))
        assert wrong_error(answer)["param"] == param


async def test_without_a_store_there_is_no_background(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        error = wrong_error(await client.post(RESPONSES, json=asking()))
        assert (error["param"], error["code"]) == ("background", "unsupported_parameter")
        answer = await client.post(RESPONSES, json=asking(background=False, store=True))
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        body = asking(background=False, previous_response_id=answer.json()["id"])
        error = wrong_error(await client.post(RESPONSES, json=body), 400)
        assert error["param"] == "previous_response_id"
        assert "no responses are stored here" in error["message"]


async def test_a_running_response_holds_its_admission(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, automatic=False) as (router, client):
        limiter = router.service.tenants.request_limiter
        queued = await start(client)
        await eventually(lambda: bool(router.prefill.jobs))
        assert limiter.num_in_use == 1
        assert (await get(client, queued))["status"] == "in_progress"
        body = asking(background=False, previous_response_id=queued["id"])
        assert wrong_error(await client.post(RESPONSES, json=body))["param"] == (
            "previous_response_id"
        )
        waiting = asyncio.create_task(wait_for_end(client, queued))
        await router_harness.step_until_done(router, waiting)
        assert waiting.result()["status"] == "completed"
        assert limiter.num_in_use == 0


LARGE_METADATA = {f"key {number}": "x" * 500 for number in range(6)}


@pytest.mark.parametrize("end", ["completed", "cancelled"])
async def test_a_running_response_holds_the_bytes_of_its_body(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """While a response runs, the bytes of its body count against the budget, except for those of
    the prompt: the response may repeat the body's other fields."""
    monkeypatch.setattr(raw_body, "UNMETERED_BYTES", 100)
    monkeypatch.setattr(background_responses, "MAX_RUNNING_PER_TENANT", 1)
    async with serving(tokenizer, automatic=False) as (router, client):
        budget = router.service.resources.body_budget
        queued = await start(client, metadata=LARGE_METADATA)
        await eventually(lambda: bool(router.prefill.jobs))
        held = budget.num_in_use
        assert 2000 < held < 3000
        wrong_error(await client.post(RESPONSES, json=asking(metadata=LARGE_METADATA)), 429)
        assert budget.num_in_use == held
        if end == "cancelled":
            await client.post(f"{RESPONSES}/{queued['id']}/cancel")
        waiting = asyncio.create_task(wait_for_end(client, queued))
        await router_harness.step_until_done(router, waiting)
        assert waiting.result()["status"] == end
        await eventually(lambda: budget.num_in_use == 0)


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_a_cancelled_response_frees_its_workers(tokenizer: Tokenizer, how: str) -> None:
    async with serving(tokenizer, automatic=False) as (router, client):
        queued = await start(client)
        await eventually(lambda: bool(router.prefill.jobs))
        path = f"{RESPONSES}/{queued['id']}"
        if how == "cancel":
            answer = await client.post(f"{path}/cancel")
            assert answer.json()["status"] == "cancelled"
            Response.model_validate(answer.json(), strict=True)
        else:
            assert (await client.delete(path)).status_code == 200
        await eventually(lambda: not router.prefill.jobs and not router.decode.jobs)
        await eventually(lambda: router.service.tenants.request_limiter.num_in_use == 0)
        status = (await client.get(path)).status_code
        assert status == (200 if how == "cancel" else 404)


async def test_a_shutdown_ends_the_generation(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, automatic=False, stores_responses=True) as (router, client):
        assert router.response_service is not None
        background = router.response_service.background
        task = asyncio.create_task(background.run())
        await asyncio.sleep(0)
        queued = await start(client)
        await eventually(lambda: bool(router.prefill.jobs))
        task.cancel()
        await asyncio.wait([task])
        await background.stop()
        found = await get(client, queued)
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
        assert router.service.tenants.request_limiter.num_in_use == 0


async def test_a_response_that_takes_too_long_fails(tokenizer: Tokenizer) -> None:
    settings = {"automatic": False, "request_timeout_seconds": 0.1}
    async with serving(tokenizer, **settings) as (router, client):
        found = await wait_for_end(client, await start(client))
        assert found["status"] == "failed"
        assert "in time" in found["error"]["message"]
        await eventually(lambda: not router.prefill.jobs and not router.decode.jobs)


async def test_background_responses_count_against_the_tenants_limits(tokenizer: Tokenizer) -> None:
    limited = Tenant(DEFAULT, limits=TenantLimits(requests_per_minute=3, concurrent_requests=1))
    async with serving(tokenizer, automatic=False) as (router, client):
        router.service.tenants.authenticator.set_directory(TenantDirectory({DEFAULT: limited}))
        queued = await start(client)
        refused = await client.post(RESPONSES, json=asking())
        assert wrong_error(refused, 429)["code"] == "rate_limit_exceeded"
        waiting = asyncio.create_task(wait_for_end(client, queued))
        await router_harness.step_until_done(router, waiting)
        for _ in range(2):  # each counts once against the requests per minute
            waiting = asyncio.create_task(wait_for_end(client, await start(client)))
            await router_harness.step_until_done(router, waiting)
        refused = await client.post(RESPONSES, json=asking())
        assert "requests per minute" in wrong_error(refused, 429)["message"]
