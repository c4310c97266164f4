"""Bodies that would cost others: their bytes, their values, their tokens, and whose turn it is."""

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from baton.config import DEMO_MODEL
from baton.core.ids import TenantId
from baton.errors import Overloaded
from baton.text.tokenizer import EASY_CHARACTERS_PER_TOKEN, PIECE_CHARACTERS, Tokenizer
from router.errors import ApiError
from router.http.body_parser import MAX_ERRORS, parse_body
from router.http.json_limits import (
    MAX_STRINGS,
    MAX_VALUES,
    UNCHECKED_BYTES,
    check_json_size,
    max_json_values,
)
from router.http.raw_body import UNMETERED_BYTES, BodyBudget
from router.openai import offload_executor
from router.openai.offload_executor import MIN_OFFLOAD_BYTES, OffloadExecutor
from router.openai.schema import ChatBody, CompletionBody, DetokenizeBody
from router.openai.unique_marker import make_unique_marker
from tests.unit import test_router_http
from tests.unit.test_router_http import (
    CHAT,
    COMPLETE,
    CONTEXT,
    House,
    chat,
    eventually,
    listening,
    open_house,
    post_raw,
    wrong_error,
)

tokenizer = test_router_http.tokenizer

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")

# -- values ---------------------------------------------------------------------------------


def of_prompt(values: bytes) -> bytes:
    return b'{"prompt":[' + values + b"1]}"


@pytest.mark.parametrize(
    "data",
    [
        of_prompt(b"1," * MAX_VALUES),
        of_prompt(b"[1]," * (MAX_VALUES // 2)),
        of_prompt(b"{}," * MAX_VALUES),
        b'{"messages":[],' + b",".join(b'"%x":0' % key for key in range(MAX_STRINGS)) + b"}",
        of_prompt(b'"\\\\","",' * (MAX_STRINGS // 2)),
        of_prompt(b'"\\"","",' * (MAX_STRINGS // 2)),
    ],
)
def test_too_many_values_are_counted_before_any_is_made(data: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_body(CompletionBody, data)
    assert (refusal.value.status, refusal.value.code) == (400, "too_many_values")
    assert "may have at most" in str(refusal.value)


@pytest.mark.parametrize("text", ["[,{" * MAX_VALUES, '"' * MAX_STRINGS, '\\",' * MAX_VALUES, "\\"])
def test_what_stands_in_a_string_is_no_value(text: str) -> None:
    body = json.dumps({"prompt": text}).encode()
    assert parse_body(CompletionBody, body).prompt == [text]


def test_a_prompt_of_as_many_tokens_as_the_context_has() -> None:
    tokens, context = MAX_VALUES, MAX_VALUES // 2
    data = json.dumps({"prompt": [7] * tokens}).encode()
    with pytest.raises(ApiError):
        parse_body(CompletionBody, data)
    assert len(parse_body(CompletionBody, data, max_json_values(context)).prompt[0]) == tokens


def test_a_small_body_is_not_looked_through() -> None:
    check_json_size(b"[" * UNCHECKED_BYTES, 10)
    with pytest.raises(ApiError):
        check_json_size(b"[" * (UNCHECKED_BYTES + 1), 10)


def test_one_of_many_errors_is_told() -> None:
    wrong = DetokenizeBody, json.dumps({"tokens": ["x"] * 5000}).encode()
    with pytest.raises(ApiError) as refusal:
        parse_body(*wrong)
    assert refusal.value.param == "tokens[0]"
    message = {"role": "user", "content": 1}
    with pytest.raises(ApiError) as refusal:
        parse_body(ChatBody, json.dumps({"messages": [message] * 5000}).encode())
    assert refusal.value.param == "messages[0].content"
    unknown = {f"k{number}": 0 for number in range(MAX_ERRORS + 1)}
    with pytest.raises(ApiError) as refusal:
        parse_body(ChatBody, json.dumps(chat() | unknown).encode())
    assert f"{MAX_ERRORS + 1} fields that are unknown or wrong" in str(refusal.value)


async def test_arguments_of_calls_are_json_too(tokenizer: Tokenizer) -> None:
    arguments = '{"x": [' + "{}," * MAX_VALUES + "0]}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    async with open_house(tokenizer) as (_, client):
        answer = await client.post("/tokenize", json={"messages": [message]})
    assert wrong_error(answer)["code"] == "too_many_values"


# -- tokens ---------------------------------------------------------------------------------


class Counted:
    """How many characters were encoded."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.characters = 0
        encode = tokenizer.encode

        def count(text: str, add_special_tokens: bool = True) -> list[int]:
            self.characters += len(text)
            return encode(text, add_special_tokens)

        monkeypatch.setattr(tokenizer, "encode", count)


async def test_a_text_is_encoded_as_far_as_it_may_fit(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(tokenizer, monkeypatch)
    async with open_house(tokenizer) as (_, client):
        for path, body in ((CHAT, chat(" " * 2_000_000)), (COMPLETE, {"prompt": " " * 2_000_000})):
            error = wrong_error(await client.post(path, json=body))
            assert error["code"] == "context_length_exceeded"
            assert f"more than {CONTEXT} tokens" in error["message"]
            assert counted.characters <= PIECE_CHARACTERS
            counted.characters = 0
        many = {"prompt": " " * 2_000_000}
        assert wrong_error(await client.post("/tokenize", json=many))["code"] == "too_many_tokens"
    most = max_json_values(CONTEXT)
    assert counted.characters <= 2 * most + PIECE_CHARACTERS


def test_a_text_of_long_tokens_is_not_refused_by_its_length() -> None:
    demo, limit = Tokenizer.load(DEMO_MODEL), 20_000
    text = " " * 2 * EASY_CHARACTERS_PER_TOKEN * limit
    assert len(demo.encode(text)) < limit
    assert not demo.exceeds(text, limit)
    assert demo.exceeds("a " * len(text), limit)


async def test_all_prompts_of_a_request_have_a_bound(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.json_limits.MAX_VALUES", 1000)
    prompts = ["x" * 60] * 20  # 1,200 tokens: beside the 1,000, twice the context of 64
    async with open_house(tokenizer) as (_, client):
        few = await client.post(COMPLETE, json={"prompt": prompts[:18], "max_tokens": 1})
        assert few.status_code == 200
        error = wrong_error(await client.post(COMPLETE, json={"prompt": prompts, "max_tokens": 1}))
        assert (error["param"], error["code"]) == ("prompt", "too_many_tokens")


@pytest.mark.parametrize("text", ["", "\ue000end\ue000" * 30_000, "\ud800"])
def test_a_mark_stands_in_no_text(text: str) -> None:
    mark = make_unique_marker([text])
    assert mark not in text and make_unique_marker([text + mark]) not in text + mark


async def test_a_message_full_of_marks_is_continued(tokenizer: Tokenizer) -> None:
    content = "\ue000end\ue000" * 10_000
    messages = [{"role": "assistant", "content": content}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    async with open_house(tokenizer) as (_, client):
        told = (await client.post("/tokenize", json=body)).json()
    assert told["count"] == len(f"assistant\n{content}".encode()) + 1


# -- bytes ----------------------------------------------------------------------------------


def test_bytes_of_bodies_are_shared() -> None:
    budget = BodyBudget(100)
    first = budget.body(A, 1.0, shared=True)
    first.add(b"x" * (UNMETERED_BYTES + 70))
    with pytest.raises(Overloaded, match="bytes of bodies"):
        first.add(b"x" * 10)
    with budget.body(A, 1.0, shared=True) as small:
        small.add(b"x" * UNMETERED_BYTES)
    with budget.body(B, 1.0, shared=True) as second:
        second.add(b"x" * (UNMETERED_BYTES + 30))
        assert budget.inside == 100
    assert budget.inside == 70
    first.release()
    first.release()
    assert budget.inside == 0


def test_a_body_in_parts() -> None:
    raw = BodyBudget(100).body(A, 1.0, shared=False)
    for part in (b"", b"a", b"bc", b"d"):
        raw.add(part)
    assert (raw.size_bytes, raw.take(), raw.take()) == (4, b"abcd", b"")


async def test_a_body_beyond_what_others_left_is_refused_as_it_comes(tokenizer: Tokenizer) -> None:
    """The first one comes slowly, and holds what has come of it."""
    house = House(tokenizer, "x", automatic=True, max_inflight_body_bytes=100_000)
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    async with listening(house) as url:
        slow = asyncio.create_task(
            post_raw(url, "transfer-encoding: chunked", [piece, piece], end=b"")
        )
        await eventually(lambda: house.service.bodies.inside == 2 * 0x10000 - UNMETERED_BYTES)
        refused = await post_raw(url, "transfer-encoding: chunked", [piece, piece])
        assert refused.startswith(b"HTTP/1.1 429")
        assert b"bytes of bodies are under way" in refused and b"retry-after" in refused
        small = await post_raw(url, "content-length: 2", [b"{}"])
        assert small.startswith(b"HTTP/1.1 400")
        slow.cancel()
        await asyncio.wait([slow])
        await eventually(lambda: house.service.bodies.inside == 0)


async def test_an_answer_holds_no_body(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, "x", automatic=False)
    async with listening(house) as url, httpx.AsyncClient() as client:
        body = chat(user="x" * 2 * UNMETERED_BYTES)
        asked = asyncio.create_task(client.post(url + CHAT, json=body))
        await eventually(lambda: bool(house.decode.jobs))
        assert house.service.bodies.inside == 0
        asked.cancel()
        await asyncio.wait([asked])
        await eventually(lambda: house.service.gate.inside == 0)


# -- turns ----------------------------------------------------------------------------------


@pytest.fixture
def gates() -> Iterator[Callable[[], threading.Event]]:
    """Events that work waits for; all are set in the end."""
    made: list[threading.Event] = []

    def make() -> threading.Event:
        made.append(threading.Event())
        return made[-1]

    yield make
    for each in made:
        each.set()


async def test_a_tenant_has_all_threads_but_one(gates: Callable[[], threading.Event]) -> None:
    work, order, size = OffloadExecutor(2), [], MIN_OFFLOAD_BYTES + 1
    first, second = gates(), gates()

    def note(name: str) -> Any:
        return asyncio.create_task(work.run(A, size, lambda: order.append(name)))

    holding = asyncio.create_task(work.run(A, size, first.wait))
    await asyncio.sleep(0)
    waits = [note("a1"), note("a2")]
    await asyncio.sleep(0)
    assert work.num_waiting == 2
    await work.run(B, size, lambda: order.append("b"))
    assert await work.run(A, MIN_OFFLOAD_BYTES, lambda: "small") == "small"
    other = asyncio.create_task(work.run(C, size, second.wait))
    last = asyncio.create_task(work.run(B, size, lambda: order.append("b2")))
    await asyncio.sleep(0)
    waits[0].cancel()
    second.set()
    await other
    await last
    first.set()
    await asyncio.gather(holding, waits[1])
    assert order == ["b", "b2", "a2"]
    assert work.num_waiting == 0


async def test_a_thread_is_busy_until_its_work_ends(gates: Callable[[], threading.Event]) -> None:
    """Also after its client has left."""
    work, size, gate = OffloadExecutor(2), MIN_OFFLOAD_BYTES + 1, gates()
    left = asyncio.create_task(work.run(A, size, gate.wait))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    next_one = asyncio.create_task(work.run(A, size, lambda: "mine"))
    await asyncio.sleep(0)
    assert work.num_waiting == 1
    gate.set()
    assert await next_one == "mine"


async def test_an_error_that_nobody_waits_for_is_no_news(
    gates: Callable[[], threading.Event],
) -> None:
    """The loop would log it, and the log's record would hold its body."""
    work, gate, told = OffloadExecutor(1), gates(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    def fail() -> None:
        gate.wait()
        raise ValueError("too many tokens")

    left = asyncio.create_task(work.run(A, MIN_OFFLOAD_BYTES + 1, fail))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    gate.set()
    await work.run(A, MIN_OFFLOAD_BYTES + 1, lambda: None)
    del left
    gc.collect()
    assert told == []


async def test_free_memory_goes_back_once_the_work_has_ended(
    gates: Callable[[], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when its client leaves: by then the thread still holds what it needs."""
    work, gate, ended_before = OffloadExecutor(1), gates(), list[bool]()
    monkeypatch.setattr(offload_executor, "TRIM_SECONDS", 0.0)
    monkeypatch.setattr(offload_executor, "trim_heap", lambda: ended_before.append(gate.is_set()))
    left = asyncio.create_task(work.run(A, offload_executor.TRIM_BYTES, gate.wait))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    await eventually(lambda: ended_before == [False])
    gate.set()
    await eventually(lambda: ended_before == [False, True])


async def test_a_failure_keeps_nothing() -> None:
    """An exception that was held by its own traceback would keep the body until the collector
    comes by, which is seldom."""

    class Body:
        alive = 0

        def __init__(self) -> None:
            Body.alive += 1

        def __del__(self) -> None:
            Body.alive -= 1

    work = OffloadExecutor()

    async def fail() -> None:
        body = Body()

        def parse() -> None:
            raise ValueError(f"wrong: {body}")

        with pytest.raises(ValueError, match="wrong"):
            await work.run(A, MIN_OFFLOAD_BYTES + 1, parse)

    gc.disable()
    try:
        for _ in range(5):
            await fail()
        work._threads._threads.shutdown()  # its threads forget what they did last
        await asyncio.sleep(0)
        assert Body.alive == 0
    finally:
        gc.enable()
