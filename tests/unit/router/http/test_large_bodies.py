"""Tests large request bodies: limits on their bytes, JSON values and tokens, and fair use of
threads."""

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from baton.concurrency.threads import FairThreadPool
from baton.config import DEMO_MODEL
from baton.core.ids import TenantId
from baton.errors import Overloaded
from baton.text.tokenizer import PIECE_CHARACTERS, TYPICAL_CHARACTERS_PER_TOKEN, Tokenizer
from router.errors import ApiError
from router.http import raw_body
from router.http.body_parser import parse_body
from router.http.json_limits import check_json_size, max_json_values
from router.http.raw_body import BodyBudget
from router.limits import MAX_ERRORS, MAX_STRINGS, MAX_VALUES, UNCHECKED_BYTES, UNMETERED_BYTES
from router.openai.schema import ChatBody, CompletionBody, DetokenizeBody
from router.serving import offload_executor
from router.serving.chat_renderer import make_unique_marker
from router.serving.offload_executor import MIN_OFFLOAD_BYTES, OffloadExecutor
from tests import router_harness
from tests.router_harness import (
    CHAT,
    COMPLETE,
    CONTEXT,
    RESPOND,
    RouterHarness,
    chat,
    eventually,
    open_harness,
    post_raw,
    serve_over_tcp,
    wrong_error,
)

tokenizer = router_harness.tokenizer

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")

# -- JSON values ----------------------------------------------------------------------------


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
def test_too_many_json_values_are_rejected_before_parsing(data: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_body(CompletionBody, data)
    assert (refusal.value.status, refusal.value.code) == (400, "too_many_values")
    assert "may have at most" in str(refusal.value)


@pytest.mark.parametrize("text", ["[,{" * MAX_VALUES, '"' * MAX_STRINGS, '\\",' * MAX_VALUES, "\\"])
def test_punctuation_within_strings_is_not_counted_as_values(text: str) -> None:
    body = json.dumps({"prompt": text}).encode()
    assert parse_body(CompletionBody, body).prompt == [text]


def test_value_limit_allows_a_prompt_that_fills_the_context() -> None:
    tokens, context = MAX_VALUES, MAX_VALUES // 2
    data = json.dumps({"prompt": [7] * tokens}).encode()
    with pytest.raises(ApiError):
        parse_body(CompletionBody, data)
    assert len(parse_body(CompletionBody, data, max_json_values(context)).prompt[0]) == tokens


def test_small_bodies_are_not_checked() -> None:
    check_json_size(b"[" * UNCHECKED_BYTES, 10)
    with pytest.raises(ApiError):
        check_json_size(b"[" * (UNCHECKED_BYTES + 1), 10)


def test_only_one_of_many_errors_is_reported() -> None:
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
    assert f"{MAX_ERRORS + 1} unknown or invalid fields" in str(refusal.value)


async def test_tool_call_arguments_are_checked_too(tokenizer: Tokenizer) -> None:
    arguments = '{"x": [' + "{}," * MAX_VALUES + "0]}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    async with open_harness(tokenizer) as (_, client):
        answer = await client.post("/tokenize", json={"messages": [message]})
    assert wrong_error(answer)["code"] == "too_many_values"


# -- tokens ---------------------------------------------------------------------------------


class Counted:
    """Counts the characters that ``tokenizer`` encodes."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.characters = 0
        encode = tokenizer.encode

        def count(text: str, add_special_tokens: bool = True) -> list[int]:
            self.characters += len(text)
            return encode(text, add_special_tokens)

        monkeypatch.setattr(tokenizer, "encode", count)


async def test_overlong_text_is_encoded_only_as_far_as_it_may_fit(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(tokenizer, monkeypatch)
    async with open_harness(tokenizer) as (_, client):
        for path, body in ((CHAT, chat(" " * 2_000_000)), (COMPLETE, {"prompt": " " * 2_000_000})):
            error = wrong_error(await client.post(path, json=body))
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith(
                f"This model's maximum context length is {CONTEXT} tokens. However, "
            )
            assert f"more than {CONTEXT} tokens" in error["message"]
            assert counted.characters <= PIECE_CHARACTERS
            counted.characters = 0
        many = {"prompt": " " * 2_000_000}
        assert wrong_error(await client.post("/tokenize", json=many))["code"] == "too_many_tokens"
    most = max_json_values(CONTEXT)
    assert counted.characters <= 2 * most + PIECE_CHARACTERS


def test_text_of_long_tokens_is_not_rejected_by_its_length() -> None:
    demo, limit = Tokenizer.load(DEMO_MODEL), 20_000
    text = " " * 2 * TYPICAL_CHARACTERS_PER_TOKEN * limit
    assert len(demo.encode(text)) < limit
    assert not demo.exceeds_tokens(text, limit)
    assert demo.exceeds_tokens("a " * len(text), limit)


async def test_total_tokens_of_a_requests_prompts_are_bounded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.json_limits.MAX_VALUES", 1000)
    prompts = ["x" * 60] * 20  # 1,200 tokens, above both 1,000 and twice the context of 64
    async with open_harness(tokenizer) as (_, client):
        few = await client.post(COMPLETE, json={"prompt": prompts[:18], "max_tokens": 1})
        assert few.status_code == 200
        error = wrong_error(await client.post(COMPLETE, json={"prompt": prompts, "max_tokens": 1}))
        assert (error["param"], error["code"]) == ("prompt", "too_many_tokens")


@pytest.mark.parametrize("text", ["", "\ue000end\ue000" * 30_000, "\ud800"])
def test_unique_marker_is_in_no_text(text: str) -> None:
    mark = make_unique_marker([text])
    assert mark not in text and make_unique_marker([text + mark]) not in text + mark


async def test_message_full_of_markers_is_continued(tokenizer: Tokenizer) -> None:
    content = "\ue000end\ue000" * 10_000
    messages = [{"role": "assistant", "content": content}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    async with open_harness(tokenizer) as (_, client):
        reported = (await client.post("/tokenize", json=body)).json()
    assert reported["count"] == len(f"assistant\n{content}".encode()) + 1


# -- bytes ----------------------------------------------------------------------------------


def test_body_bytes_are_budgeted_across_requests() -> None:
    budget = BodyBudget(100)
    first = budget.new_body(A, 1.0, shared=True)
    first.add(b"x" * (UNMETERED_BYTES + 70))
    with pytest.raises(Overloaded, match="bytes of request bodies"):
        first.add(b"x" * 10)
    with budget.new_body(A, 1.0, shared=True) as small:
        small.add(b"x" * UNMETERED_BYTES)
    with budget.new_body(B, 1.0, shared=True) as second:
        second.add(b"x" * (UNMETERED_BYTES + 30))
        assert budget.num_in_use == 100
    assert budget.num_in_use == 70
    first.release()
    first.release()
    assert budget.num_in_use == 0


def test_a_request_is_charged_for_more_than_its_body() -> None:
    budget = BodyBudget(100)
    with budget.new_body(A, 1.0, shared=False) as raw:
        raw.add(b"x" * (UNMETERED_BYTES - 10))
        raw.charge(40)
        assert (raw.size_bytes, budget.num_in_use) == (UNMETERED_BYTES + 30, 30)
        with pytest.raises(Overloaded):
            raw.charge(71)
        assert len(raw.take()) == UNMETERED_BYTES - 10
    assert budget.num_in_use == 0


def test_the_bytes_of_a_detached_body_outlast_its_block() -> None:
    budget = BodyBudget(100)
    with budget.new_body(A, 1.0, shared=False) as raw:
        raw.add(b"x" * (UNMETERED_BYTES + 70))
        raw.release(kept_bytes=UNMETERED_BYTES + 50)
        end = raw.detach()
    assert budget.num_in_use == 50
    end()
    assert budget.num_in_use == 0


def test_body_can_arrive_in_parts() -> None:
    raw = BodyBudget(100).new_body(A, 1.0, shared=False)
    for part in (b"", b"a", b"bc", b"d"):
        raw.add(part)
    assert (raw.size_bytes, raw.take(), raw.take()) == (4, b"abcd", b"")


async def test_body_beyond_the_shared_budget_is_rejected_while_it_arrives(
    tokenizer: Tokenizer,
) -> None:
    """The first body never ends, and the part of it that has arrived occupies the budget. So the
    second body is rejected before all of it has arrived."""
    router = RouterHarness(tokenizer, "x", automatic=True, max_inflight_body_bytes=100_000)
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    async with serve_over_tcp(router) as url:
        slow = asyncio.create_task(
            post_raw(url, "transfer-encoding: chunked", [piece, piece], end=b"")
        )
        await eventually(
            lambda: router.service.resources.body_budget.num_in_use == 2 * 0x10000 - UNMETERED_BYTES
        )
        refused = await post_raw(url, "transfer-encoding: chunked", [piece, piece])
        assert refused.startswith(b"HTTP/1.1 429")
        assert b"bytes of request bodies now, and" in refused and b"retry-after" in refused
        small = await post_raw(url, "content-length: 2", [b"{}"])
        assert small.startswith(b"HTTP/1.1 400")
        slow.cancel()
        await asyncio.wait([slow])
        await eventually(lambda: router.service.resources.body_budget.num_in_use == 0)


@pytest.mark.parametrize(
    ("path", "body", "is_kept"),
    [
        (CHAT, chat("x" * 3000), False),
        (CHAT, chat(user="x" * 3000), True),
        (RESPOND, {"input": "x", "metadata": {f"k{n}": "x" * 500 for n in range(5)}}, True),
    ],
    ids=["prompt", "chat", "response"],
)
async def test_what_is_not_in_the_prompt_counts_until_the_answer_ends(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    is_kept: bool,
) -> None:
    """Once the answer has begun, the prompt's bytes no longer count against the budget for bodies;
    all other bytes of the body do."""
    monkeypatch.setattr(router_harness, "CONTEXT", 4096)
    monkeypatch.setattr(raw_body, "UNMETERED_BYTES", 100)
    router = RouterHarness(tokenizer, "x", automatic=False)
    budget = router.service.resources.body_budget
    async with serve_over_tcp(router) as url, httpx.AsyncClient() as client:
        response = asyncio.create_task(client.post(url + path, json=body))
        await eventually(lambda: bool(router.decode.jobs))
        assert (2000 < budget.num_in_use < 3000) if is_kept else budget.num_in_use == 0
        response.cancel()
        await asyncio.wait([response])
        await eventually(lambda: router.service.tenants.request_limiter.num_in_use == 0)
        assert budget.num_in_use == 0


# -- fair use of threads --------------------------------------------------------------------


@pytest.fixture
def gates() -> Iterator[Callable[[], threading.Event]]:
    """Return a function that creates an event, for a call in a thread to wait on. At the end of the
    test, all these events are set, so that no thread stays blocked."""
    made: list[threading.Event] = []

    def make() -> threading.Event:
        made.append(threading.Event())
        return made[-1]

    yield make
    for each in made:
        each.set()


async def test_tenant_gets_all_threads_but_one(gates: Callable[[], threading.Event]) -> None:
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


async def test_thread_stays_busy_until_its_work_ends(gates: Callable[[], threading.Event]) -> None:
    """The thread stays busy even after the client has disconnected."""
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


async def test_call_that_is_cancelled_as_its_turn_comes_gets_no_thread(
    gates: Callable[[], threading.Event],
) -> None:
    """Three calls wait for the only thread. The first and the second are cancelled just as the
    first is given the thread. The first gives it back before the second call's task has noticed its
    cancellation. The thread must then go to the third call."""
    pool, gate = FairThreadPool(1, "test"), gates()

    def cancel_both() -> None:
        for each in cancelled:
            each.cancel()

    holding = asyncio.create_task(pool.run(A, gate.wait, on_end=cancel_both))
    await asyncio.sleep(0)
    cancelled = [asyncio.create_task(pool.run(A, lambda: "not mine")) for _ in range(2)]
    next_one = asyncio.create_task(pool.run(A, lambda: "mine"))
    await asyncio.sleep(0)
    assert pool.num_waiting == 3
    gate.set()
    await asyncio.wait([holding, *cancelled])
    assert all(each.cancelled() for each in cancelled)
    async with asyncio.timeout(60):
        assert await next_one == "mine"
        assert await pool.run(B, lambda: "free") == "free"
    assert pool.num_waiting == 0


async def test_error_of_abandoned_work_is_not_logged(
    gates: Callable[[], threading.Event],
) -> None:
    """If the event loop logged the error, the log record would keep the body alive."""
    work, gate, reported = OffloadExecutor(1), gates(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

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
    assert reported == []


async def test_free_memory_is_trimmed_once_the_work_has_ended(
    gates: Callable[[], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trimming when the client disconnects is not enough, since the thread may still use the
    memory."""
    work, gate, ended_before = OffloadExecutor(1), gates(), list[bool]()
    monkeypatch.setattr(offload_executor, "TRIM_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(offload_executor, "trim_heap", lambda: ended_before.append(gate.is_set()))
    left = asyncio.create_task(work.run(A, offload_executor.MIN_TRIM_BYTES, gate.wait))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    await eventually(lambda: ended_before == [False])
    gate.set()
    await eventually(lambda: ended_before == [False, True])


async def test_failed_work_keeps_no_body_alive() -> None:
    """An exception that is referenced by its own traceback would keep the body alive until the
    garbage collector runs, which it seldom does."""

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
            raise ValueError(f"invalid body: {body}")

        with pytest.raises(ValueError, match="invalid body"):
            await work.run(A, MIN_OFFLOAD_BYTES + 1, parse)

    gc.disable()
    try:
        for _ in range(5):
            await fail()
        work._threads._threads.shutdown()  # its threads drop their last work items
        await asyncio.sleep(0)
        assert Body.alive == 0
    finally:
        gc.enable()
