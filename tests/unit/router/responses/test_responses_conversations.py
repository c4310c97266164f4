"""Tests stored responses: conversations by ``previous_response_id``, and references to items."""

import threading
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter
from structlog.testing import capture_logs

from baton.core.ids import TenantId
from baton.text.tokenizer import Tokenizer
from router.http import raw_body
from router.responses import conversation, endpoints
from router.responses.chat_request import build_chat
from router.responses.conversation import ConversationReader
from router.responses.stored_response import (
    EncodedItems,
    EncodedResponse,
    StoredResponse,
    encode_items,
    encode_stored,
    read_encoded,
)
from router.serving import offload_executor
from router.serving.offload_executor import OffloadExecutor
from tests.responses_harness import (
    RESPOND,
    DictStore,
    FailingStore,
    enough_memory,
    response_events,
    response_of,
)
from tests.router_harness import open_harness, wrong_error
from tests.unit.router.responses.test_responses_requests import CALL, OUTPUT, reader, room

__all__ = ["reader", "room"]

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
ANONYMOUS = TenantId("default")


async def test_conversation_continues(reader: Tokenizer) -> None:
    store = DictStore()
    async with open_harness(reader, "Yes", response_store=store) as (router, client):
        one = response_of(await client.post(RESPOND, json={"input": "A", "instructions": "Be"}))
        body = {"input": "B", "previous_response_id": one["id"], "stream": True}
        two = response_events(await client.post(RESPOND, json=body))[-1]["response"]
        body = {"input": "C", "previous_response_id": two["id"], "instructions": "Do"}
        three = response_of(await client.post(RESPOND, json=body))
        counted = await client.post(f"{RESPOND}/input_tokens", json=body)
    prompts = [bytes(job.spec.token_ids).decode() for job in router.prefill.submitted]
    assert prompts == [
        "<system>Be|<user>A|>",
        "<user>A|<assistant>Yes|<user>B|>",
        "<system>Do|<user>A|<assistant>Yes|<user>B|<assistant>Yes|<user>C|>",
    ]
    assert counted.json()["input_tokens"] == len(prompts[-1])
    assert one["store"] is two["store"] is True
    assert [each["previous_response_id"] for each in (one, two, three)] == [
        None,
        "resp_0",
        "resp_1",
    ]
    assert [stored.response for stored in store.stored.values()] == [one, two, three]


async def test_integers_beyond_64_bits_are_stored(reader: Tokenizer) -> None:
    parameters = {"type": "object", "properties": {"x": {"maximum": 2**64}}}
    tool = {"type": "function", "name": "f", "parameters": parameters}
    async with open_harness(reader, "Yes", stores_responses=True) as (_, client):
        answer = await client.post(RESPOND, json={"input": "Hi", "tools": [tool]})
        response = response_of(answer)
        stored = (await client.get(f"{RESPOND}/{response['id']}")).json()
    assert response["tools"][0]["parameters"] == parameters
    assert stored == response


async def test_calls_are_answered_in_the_next_turn(reader: Tokenizer) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    tool = {"type": "function", "name": "f"}
    async with open_harness(reader, text, response_store=DictStore()) as (router, client):
        one = response_of(await client.post(RESPOND, json={"input": "A", "tools": [tool]}))
        call_id = one["output"][0]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "2"}
        await client.post(RESPOND, json={"input": [result], "previous_response_id": one["id"]})
    prompt = bytes(router.prefill.submitted[1].spec.token_ids).decode()
    assert prompt == f"<user>A|<assistant>!f:1|<tool>2#{call_id}|>"


async def test_stored_input_items_are_complete(reader: Tokenizer) -> None:
    store = DictStore()
    items = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B"},
        {"type": "message", "id": "msg_7", "role": "developer",
         "content": [{"type": "input_text", "text": "C"}]},
        CALL,
        OUTPUT,
    ]  # fmt: skip
    async with open_harness(reader, response_store=store) as (_, client):
        response_of(await client.post(RESPOND, json={"input": items}))
        response_of(await client.post(RESPOND, json={"input": "D"}))
    first, second = (stored.input_items.decode() for stored in store.stored.values())
    for item in (*first, *second):
        ITEM.validate_python(item, strict=True)
    assert [item["id"] for item in first] == [
        "msg_0_in0", "msg_0_in1", "msg_7", "fc_0_in3", "fco_0_in4",
    ]  # fmt: skip
    assert second == [
        {
            "id": "msg_1_in0", "type": "message", "role": "user", "status": "completed",
            "content": [{"type": "input_text", "text": "D"}],
        },
    ]  # fmt: skip


async def test_references_to_items(reader: Tokenizer) -> None:
    store = DictStore()
    async with open_harness(reader, "Yes", response_store=store) as (router, client):
        one = response_of(await client.post(RESPOND, json={"input": "A"}))
        items = [
            {"type": "item_reference", "id": "msg_0_in0"},
            {"id": one["output"][0]["id"]},
            {"role": "user", "content": "B"},
        ]
        response_of(await client.post(RESPOND, json={"input": items}))
        items[0]["id"] = "msg_0_9"
        missing = wrong_error(await client.post(RESPOND, json={"input": items}), 404)
    prompt = bytes(router.prefill.submitted[1].spec.token_ids)
    assert prompt == b"<user>A|<assistant>Yes|<user>B|>"
    assert missing["param"] == "input[0].id" and missing["code"] == "item_not_found"
    ids = [item["id"] for item in store.stored[ANONYMOUS, "resp_1"].input_items.decode()]
    assert ids == ["msg_0_in0", "msg_0_0", "msg_1_in2"]


async def test_response_that_is_not_to_be_stored(reader: Tokenizer) -> None:
    store = DictStore()
    async with open_harness(reader, response_store=store) as (_, client):
        one = response_of(await client.post(RESPOND, json={"input": "A", "store": False}))
        assert one["store"] is False and not store.stored
        body = {"input": "B", "previous_response_id": one["id"]}
        error = wrong_error(await client.post(RESPOND, json=body), 400)
    assert error["param"] == "previous_response_id"
    assert error["code"] == "previous_response_not_found"


async def test_responses_of_other_tenants_are_not_found(reader: Tokenizer) -> None:
    keys = {"sk-a": "alice", "sk-b": "bob"}
    async with open_harness(reader, api_keys=keys, response_store=DictStore()) as (_, client):
        alice, bob = ({"authorization": f"Bearer {key}"} for key in keys)
        one = response_of(await client.post(RESPOND, json={"input": "A"}, headers=alice))
        body = {"input": "B", "previous_response_id": one["id"]}
        refused = await client.post(RESPOND, json=body, headers=bob)
        assert wrong_error(refused, 400)["code"] == "previous_response_not_found"
        response_of(await client.post(RESPOND, json=body, headers=alice))


async def test_answer_is_sent_even_if_it_cannot_be_stored(
    reader: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_harness(reader, "Yes", response_store=FailingStore()) as (_, client):
        response = response_of(await client.post(RESPOND, json={"input": "A"}))
    assert response["output"][0]["content"][0]["text"] == "Yes"
    assert "response_not_stored" in capsys.readouterr().out


async def test_conversation_without_its_beginning_is_not_found(reader: Tokenizer) -> None:
    store = DictStore()
    async with open_harness(reader, response_store=store) as (_, client):
        body: dict[str, Any] = {"input": "A"}
        for _ in range(2):
            body["previous_response_id"] = response_of(await client.post(RESPOND, json=body))["id"]
        await store.delete(ANONYMOUS, "resp_0")
        error = wrong_error(await client.post(RESPOND, json=body), 400)
    assert "'resp_0', which 'resp_1' continues" in error["message"]


async def test_conversations_have_bounds(
    reader: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "MAX_RESPONSES", 2)
    store = DictStore()
    async with open_harness(reader, response_store=store, max_body_bytes=3000) as (_, client):
        body: dict[str, Any] = {"input": "A"}
        for _ in range(3):
            body["previous_response_id"] = response_of(await client.post(RESPOND, json=body))["id"]
        error = wrong_error(await client.post(RESPOND, json=body))
        assert error["code"] == "context_length_exceeded"
        long = {"type": "message", "role": "user", "content": "x" * 3000, "id": "msg_long"}
        big = StoredResponse(
            {"id": "resp_big", "status": "completed", "output": []}, encode_items([long])
        )
        await store.put(ANONYMOUS, big)
        body["previous_response_id"] = "resp_big"
        error = wrong_error(await client.post(RESPOND, json=body))
        assert error["param"] == "previous_response_id"
        references = [{"type": "item_reference", "id": "msg_0_in0"}] * 40
        error = wrong_error(await client.post(RESPOND, json={"input": references}))
        assert error["code"] == "context_length_exceeded" and "input[" in error["param"]


async def test_unfinished_response_can_not_be_continued(reader: Tokenizer) -> None:
    store = DictStore()
    waiting = {"id": "resp_x", "status": "in_progress", "output": []}
    await store.put(ANONYMOUS, StoredResponse(waiting, encode_items([])))
    async with open_harness(reader, response_store=store) as (_, client):
        body = {"input": "A", "previous_response_id": "resp_x"}
        assert "not complete" in wrong_error(await client.post(RESPOND, json=body))["message"]


@pytest.mark.parametrize("status", [["a"], {"a": 1}, 5, ""])
async def test_unusable_ids_and_statuses_are_replaced(reader: Tokenizer, status: Any) -> None:
    item = {"role": "user", "content": "A", "id": "", "status": status}
    async with open_harness(reader, "Yes", response_store=DictStore()) as (_, client):
        one = response_of(await client.post(RESPOND, json={"input": [item]}))
        body = {"input": [{"id": "msg_0_in0"}], "previous_response_id": one["id"]}
        response_of(await client.post(RESPOND, json=body))
        listed = await client.get(f"{RESPOND}/{one['id']}/input_items")
    [kept] = listed.json()["data"]
    assert (kept["id"], kept["status"]) == ("msg_0_in0", "completed")


# -- memory and threads ---------------------------------------------------------------------------


class TracingStore(DictStore):
    """A store that records in ``reads`` the id of each response that is read. It contains two
    responses, each with 20 items and about 2,400 bytes in all; ``resp_new`` continues
    ``resp_old``."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        for name, previous in (("old", None), ("new", "resp_old")):
            response: dict[str, Any] = {
                "id": f"resp_{name}", "status": "completed", "output": [],
                "previous_response_id": previous,
            }  # fmt: skip
            items = tuple(
                {"type": "message", "id": f"msg_{name}_{number}", "role": "user",
                 "status": "completed", "content": [{"type": "input_text", "text": "A"}]}
                for number in range(20)
            )  # fmt: skip
            self.stored[ANONYMOUS, f"resp_{name}"] = StoredResponse(response, encode_items(items))

    async def get(self, tenant: TenantId, response_id: str) -> EncodedResponse | None:
        self.reads.append(response_id)
        return await super().get(tenant, response_id)


CONTINUED = {"input": "B", "previous_response_id": "resp_new"}
REFERRING = {
    "input": [
        {"id": item_id}
        for item_id in ("msg_new_0", *["msg_new_1"] * 19, "msg_old_0", *["msg_old_1"] * 19)
    ]
}
SMALL_REQUESTS = pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPOND, CONTINUED),
        (RESPOND, REFERRING),
        (f"{RESPOND}/input_tokens", CONTINUED),
        (f"{RESPOND}/input_tokens", REFERRING),
    ],
    ids=["continued", "referring", "continued-count", "referring-count"],
)


@SMALL_REQUESTS
async def test_long_conversations_are_worked_on_in_threads(
    reader: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """The request's body is small, but it continues a long stored conversation, or refers to many
    stored items."""
    threads: dict[str, threading.Thread] = {}

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            threads[name] = threading.current_thread()
            return call(*args, **kwargs)

        return note

    monkeypatch.setattr(offload_executor, "MIN_OFFLOAD_BYTES", 2000)
    monkeypatch.setattr(endpoints, "build_chat", noting("build_chat", build_chat))
    monkeypatch.setattr(EncodedItems, "decode", noting("decode", EncodedItems.decode))
    monkeypatch.setattr(endpoints, "encode_items", noting("encode_items", encode_items))
    monkeypatch.setattr(reader, "encode", noting("encode", reader.encode))
    async with open_harness(reader, "Yes", response_store=TracingStore()) as (_, client):
        assert (await client.post(path, json=body)).status_code == 200
    stores_answer = path == RESPOND
    expected = {"decode", "build_chat", "encode"} | ({"encode_items"} if stores_answer else set())
    assert threads.keys() == expected
    assert threading.main_thread() not in threads.values()


@pytest.mark.parametrize("part", ["response", "index", "items"])
async def test_a_damaged_turn_is_not_found(
    reader: Tokenizer, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    store = TracingStore()
    stored = store.stored[ANONYMOUS, "resp_new"]
    data = encode_stored(stored)
    original = {
        "response": orjson.dumps(stored.response),
        "index": stored.input_items.index,
        "items": stored.input_items.data,
    }[part]
    damaged = data.replace(original, b" " * len(original))

    async def get(tenant: TenantId, response_id: str) -> EncodedResponse | None:
        return read_encoded(damaged, response_id)

    monkeypatch.setattr(store, "get", get)
    async with open_harness(reader, "Yes", response_store=store) as (_, client):
        with capture_logs() as logs:
            error = wrong_error(await client.post(RESPOND, json=CONTINUED))
    assert (error["param"], error["code"]) == (
        "previous_response_id", "previous_response_not_found",
    )  # fmt: skip
    assert [line["event"] for line in logs if line["event"] == "damaged_response"] == [
        "damaged_response"
    ]


@SMALL_REQUESTS
async def test_stored_items_count_against_the_memory_for_bodies(
    reader: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(raw_body, "UNMETERED_BYTES", 100)
    store = TracingStore()
    async with open_harness(reader, "Yes", response_store=store, max_inflight_body_bytes=2000) as (
        router,
        client,
    ):
        budget = router.service.resources.body_budget
        refused = wrong_error(await client.post(path, json=body), 429)
        assert "bytes of request bodies" in refused["message"]
        assert store.reads == ["resp_new"]  # the next response is not even read
        budget.set_limit(10_000)
        assert (await client.post(path, json=body)).status_code == 200
        assert store.reads[1:] == ["resp_new", "resp_old"]
        assert budget.num_in_use == 0


async def test_items_are_charged_once_per_reference() -> None:
    """A stored item is charged once for each reference to it. The other items of its response are
    neither kept nor charged."""
    store, charges = TracingStore(), list[int]()
    item = store.stored[ANONYMOUS, "resp_old"].input_items.decode()[3]
    size = len(orjson.dumps(item))
    items = ConversationReader(
        store, ANONYMOUS, 10**6, charges.append, enough_memory, OffloadExecutor()
    )
    text = {"role": "user", "content": "B"}
    found = await items.resolve_references([{"id": "msg_old_3"}, text, {"id": "msg_old_3"}])
    assert (found, charges, store.reads) == ([item, text, item], [2 * size], ["resp_old"])


async def test_items_of_the_history_are_charged_again_for_references() -> None:
    """Reading the conversation has already charged all items of its turns. A reference to one of
    them is charged in addition. If several turns have an item with that id, the newest is meant."""
    store, charges = TracingStore(), list[int]()
    old, new = store.stored[ANONYMOUS, "resp_old"], store.stored[ANONYMOUS, "resp_new"]
    old_items = old.input_items.decode()
    changed = {**old_items[3], "content": "newer"}
    repeated = [*old_items[:3], changed]
    await store.put(ANONYMOUS, StoredResponse(new.response, encode_items(repeated)))
    items = ConversationReader(
        store, ANONYMOUS, 10**6, charges.append, enough_memory, OffloadExecutor()
    )
    assert await items.read("resp_new") == [*old_items, *repeated]
    assert await items.resolve_references([{"id": "msg_old_3"}]) == [changed]
    assert charges == [len(orjson.dumps(taken)) for taken in (repeated, old_items, changed)]
    assert store.reads == ["resp_new", "resp_old"]
