"""Tests the routes of stored responses: GET, DELETE, cancel and input items."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jsonschema
import orjson
import pytest
from structlog.testing import capture_logs

from baton.core.ids import TenantId
from baton.errors import Unavailable
from baton.text.tokenizer import Tokenizer
from router.api_document.document import build_document
from router.responses.response_lease import LeaseKey
from router.responses.response_service import ResponseService
from router.responses.response_store import ResponseLimits
from router.responses.stored_response import (
    EncodedItems,
    EncodedResponse,
    StoredResponse,
    encode_items,
)
from router.serving import offload_executor
from tests import router_harness
from tests.router_harness import RouterHarness, open_harness, wrong_error

tokenizer = router_harness.tokenizer
DOCUMENT = build_document("1")
KEYS = {"alice-key": "alice", "bob-key": "bob"}
ALICE = TenantId("alice")
PATH = "/v1/responses/resp_1"


def stored(**fields: Any) -> StoredResponse:
    response = {
        "id": "resp_1", "object": "response", "created_at": 1, "completed_at": 1,
        "model": "demo", "store": True,
        "status": "completed", "output": [], "usage": None, "error": None,
        "incomplete_details": None, "previous_response_id": None, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, **fields,
    }  # fmt: skip
    items = encode_items([{"id": f"msg_{number}", "type": "message"} for number in range(30)])
    return StoredResponse(response, items)


@asynccontextmanager
async def serving(tokenizer: Tokenizer) -> AsyncIterator[tuple[RouterHarness, httpx.AsyncClient]]:
    async with open_harness(tokenizer, api_keys=KEYS, stores_responses=True) as (router, client):
        assert router.response_service is not None
        await router.response_service.store.put(ALICE, stored())
        client.headers["authorization"] = "Bearer alice-key"
        yield router, client


def matches_document(response: httpx.Response, path: str, method: str = "get") -> Any:
    assert response.status_code == 200, response.text
    operation = DOCUMENT["paths"][path][method]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(response.json(), {**schema, "components": DOCUMENT["components"]})
    return response.json()


async def test_a_stored_response_is_returned_and_deleted(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as (_, client):
        one = "/v1/responses/{response_id}"
        assert matches_document(await client.get(PATH), one) == stored().response
        assert (await client.get(PATH, params={"stream": "false"})).status_code == 200
        deleted = matches_document(await client.delete(PATH), one, "delete")
        assert deleted == {"id": "resp_1", "object": "response", "deleted": True}
        for again in (client.get(PATH), client.delete(PATH), client.get(f"{PATH}/input_items")):
            error = wrong_error(await again, 404)
            assert error["message"] == "Response with id 'resp_1' not found."
            assert (error["type"], error["param"]) == ("invalid_request_error", "response_id")


async def test_another_tenant_finds_nothing(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as (_, client):
        bob = {"authorization": "Bearer bob-key"}
        nobody = {"authorization": "Bearer x"}
        for method, path in (
            ("GET", PATH), ("DELETE", PATH), ("POST", f"{PATH}/cancel"),
            ("GET", f"{PATH}/input_items"),
        ):  # fmt: skip
            wrong_error(await client.request(method, path, headers=bob), 404)
            wrong_error(await client.request(method, path, headers=nobody), 401)
        assert (await client.get(PATH)).status_code == 200


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true", "stream"),
        ("include[]=reasoning.encrypted_content", "include[]"),
        ("starting_after=3", "starting_after"),
    ],
)
async def test_queries_without_effect_are_refused(
    tokenizer: Tokenizer, query: str, param: str
) -> None:
    async with serving(tokenizer) as (_, client):
        assert wrong_error(await client.get(f"{PATH}?{query}"))["param"] == param


async def test_input_items_come_in_pages(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as (_, client):
        path = "/v1/responses/{response_id}/input_items"

        async def ids(**query: Any) -> tuple[list[int], bool]:
            page = matches_document(await client.get(f"{PATH}/input_items", params=query), path)
            numbers = [int(item["id"].removeprefix("msg_")) for item in page["data"]]
            assert page["first_id"] == (f"msg_{numbers[0]}" if numbers else None)
            assert page["last_id"] == (f"msg_{numbers[-1]}" if numbers else None)
            return numbers, page["has_more"]

        assert await ids() == ([*range(29, 9, -1)], True)
        assert await ids(after="msg_10") == ([*range(9, -1, -1)], False)
        assert await ids(order="asc", limit=2, after="msg_3") == ([4, 5], True)
        assert await ids(limit=100) == ([*range(29, -1, -1)], False)
        assert await ids(after="msg_0") == ([], False)
        for query in ({"limit": 0}, {"limit": 101}, {"order": "x"}, {"after": "x"}, {"include": 1}):
            error = wrong_error(await client.get(f"{PATH}/input_items", params=query))
            assert error["param"] == next(iter(query))


def refuse_to_decode(*args: Any) -> Any:
    raise AssertionError("a stored response is decoded")


async def test_stored_responses_are_sent_without_being_decoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding a large response would hold the interpreter lock for long, in any thread."""
    monkeypatch.setattr(EncodedResponse, "decode_response", refuse_to_decode)
    monkeypatch.setattr(EncodedItems, "decode", refuse_to_decode)
    async with serving(tokenizer) as (router, client):
        assert router.response_service is not None
        ended = stored(background=True, metadata={"a": "\u00fc\n"})
        await router.response_service.store.put(ALICE, ended)
        sent = orjson.dumps(ended.response)
        assert (await client.get(PATH)).content == sent
        assert (await client.post(f"{PATH}/cancel")).content == sent
        page = await client.get(f"{PATH}/input_items", params={"limit": 1, "after": "msg_8"})
        assert page.content == (
            b'{"object":"list","data":[{"id":"msg_7","type":"message"}],"first_id":"msg_7",'
            b'"last_id":"msg_7","has_more":true}'
        )
        assert (await client.delete(PATH)).status_code == 200


@pytest.mark.parametrize(("limit", "is_offloaded"), [(1000, True), (10_000, False)])
async def test_pages_of_large_responses_are_made_in_threads(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, limit: int, is_offloaded: bool
) -> None:
    threads: list[threading.Thread] = []
    split = EncodedItems.split

    def noting(items: EncodedItems) -> Any:
        threads.append(threading.current_thread())
        return split(items)

    monkeypatch.setattr(EncodedItems, "split", noting)
    monkeypatch.setattr(offload_executor, "MIN_OFFLOAD_BYTES", limit)
    async with serving(tokenizer) as (_, client):
        assert (await client.get(f"{PATH}/input_items")).status_code == 200
        error = wrong_error(await client.get(f"{PATH}/input_items", params={"limit": 0}))
        assert error["param"] == "limit"
    assert [thread is not threading.main_thread() for thread in threads] == [is_offloaded] * 2


DAMAGED_INDEXES = [
    b"{}", b"[]", b"{", b'{"ids":["a"],"sizes":[1]}', b'{"ids":["a"],"sizes":[2,1]}',
    b'{"ids":[1],"sizes":[2]}', b'{"ids":["a","b"],"sizes":[3,-1]}', b'{"ids":["a"],"sizes":[2.0]}',
]  # fmt: skip


@pytest.mark.parametrize("index", DAMAGED_INDEXES)
async def test_damaged_input_items_are_not_found(tokenizer: Tokenizer, index: bytes) -> None:
    async with serving(tokenizer) as (router, client):
        assert router.response_service is not None
        damaged = StoredResponse(stored().response, EncodedItems(index, b"{}"))
        await router.response_service.store.put(ALICE, damaged)
        with capture_logs() as logs:
            error = wrong_error(await client.get(f"{PATH}/input_items"), 404)
        assert error["message"] == "Response with id 'resp_1' not found."
        assert [line["event"] for line in logs] == ["damaged_response"]


async def test_a_response_is_cancelled(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as (router, client):
        service = router.response_service
        assert isinstance(service, ResponseService)
        assert wrong_error(await client.post(f"{PATH}/cancel"))["param"] == "response_id"
        await service.store.put(ALICE, stored(background=True, status="cancelled"))
        path = "/v1/responses/{response_id}/cancel"
        answer = matches_document(await client.post(f"{PATH}/cancel"), path, "post")
        assert answer["status"] == "cancelled"
        await service.store.put(ALICE, stored(background=True, status="in_progress"))
        answer = matches_document(await client.post(f"{PATH}/cancel"), path, "post")
        assert (answer["status"], answer["error"]["code"]) == ("failed", "server_error")
        assert not await service._leases.cancel(LeaseKey(ALICE, "resp_1"))


async def test_a_store_that_is_gone_is_unavailable(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tokenizer) as (router, client):

        async def get(tenant: TenantId, response_id: str) -> EncodedResponse | None:
            raise Unavailable("the call to Redis failed")

        assert router.response_service is not None
        monkeypatch.setattr(router.response_service.store, "get", get)
        for method, path in (("GET", PATH), ("DELETE", PATH), ("POST", f"{PATH}/cancel")):
            error = wrong_error(await client.request(method, path), 503)
            assert error["type"] == "service_unavailable_error"


async def test_without_a_store_nothing_is_found(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        for method, path in (("GET", PATH), ("DELETE", PATH), ("POST", f"{PATH}/cancel")):
            error = wrong_error(await client.request(method, path), 404)
            assert "response_ttl_seconds" in error["message"]


def test_limits_have_their_defaults() -> None:
    assert ResponseLimits() == ResponseLimits(86_400.0, 64 * 2**20, 100_000, 128 * 2**20)


LARGE = "x" * 100_000
MESSAGE = {"type": "message", "role": "user", "status": "completed"}
ANSWER = {**MESSAGE, "role": "assistant"}
STORED_ITEMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"role": "user", "content": "a", "status": LARGE, "note": LARGE},
        {**MESSAGE, "content": [{"type": "input_text", "text": "a"}]},
    ),
    (
        {**MESSAGE, "content": [{"type": "text", "text": "a", "note": LARGE}], "status": {}},
        {**MESSAGE, "content": [{"type": "text", "text": "a"}]},
    ),
    (
        {**ANSWER, "content": [{"type": "output_text", "text": "a", "logprobs": [LARGE]}]},
        {**ANSWER, "content": [{"type": "output_text", "text": "a", "annotations": []}]},
    ),
    (
        {**ANSWER, "content": [{"type": "refusal", "refusal": "a", "text": LARGE}]},
        {**ANSWER, "content": [{"type": "refusal", "refusal": "a"}]},
    ),
    (
        {"type": "reasoning", "content": [{"text": "a", "type": LARGE}], "note": LARGE},
        {
            "type": "reasoning",
            "content": [{"type": "reasoning_text", "text": "a"}],
            "status": "completed",
        },
    ),
    (
        {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "a", "output": LARGE},
        {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "a"},
    ),
    (
        {"type": "function_call_output", "call_id": "1", "output": "a", "status": "incomplete"},
        {"type": "function_call_output", "call_id": "1", "output": "a", "status": "incomplete"},
    ),
    (
        {"type": "web_search_call", "action": {"query": LARGE}},
        {"type": "web_search_call", "status": "completed"},
    ),
]


@pytest.mark.parametrize(("item", "expected"), STORED_ITEMS)
async def test_what_is_no_part_of_a_prompt_is_not_stored(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    item: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    monkeypatch.setattr(router_harness, "CONTEXT", 512)  # a call becomes text of the prompt
    question = {"id": "last", "role": "user", "content": "b"}
    async with serving(tokenizer) as (_, client):
        answer = await client.post(
            "/v1/responses", json={"input": [{"id": "first", **item}, question]}
        )
        path = f"/v1/responses/{answer.json()['id']}/input_items"
        items = (await client.get(path, params={"order": "asc"})).json()["data"]
    assert [each["id"] for each in items] == ["first", "last"]
    assert items[0] == {**expected, "id": "first"}


@pytest.mark.parametrize(
    ("field", "item"),
    [
        ("id", {"role": "user", "content": "a", "id": "x" * 129}),
        ("call_id", {"type": "function_call_output", "call_id": "x" * 129, "output": "a"}),
    ],
)
async def test_ids_of_items_are_limited(tokenizer: Tokenizer, field: str, item: Any) -> None:
    async with serving(tokenizer) as (_, client):
        answer = await client.post("/v1/responses", json={"input": [item]})
    error = wrong_error(answer, 400)
    assert error["message"] == f"input[0].{field}: the value must have at most 128 characters"
    assert (error["param"], error["code"]) == (f"input[0].{field}", "string_above_max_length")


@pytest.mark.parametrize("field", ["user", "safety_identifier", "prompt_cache_key"])
async def test_fields_that_are_repeated_in_a_response_are_limited(
    tokenizer: Tokenizer, field: str
) -> None:
    async with serving(tokenizer) as (_, client):
        answer = await client.post("/v1/responses", json={"input": "a", field: "x" * 513})
    assert wrong_error(answer, 400)["param"] == field
