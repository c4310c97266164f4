"""Tests answers of the Messages API over in-memory workers: whole messages, and the exact events of
streams."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from baton.text.tokenizer import Tokenizer
from router.anthropic.message_encoder import encode_arguments
from testkit.fakes.workers import FakeWorker
from tests import router_harness
from tests.anthropic_harness import CALL, MESSAGES, TOOL, events, message_of, request
from tests.router_harness import EOS, eventually, model_saying, open_harness
from tests.unit import small_chats

hermes = small_chats.hermes
thinker = small_chats.thinker
room_for_calls = small_chats.room_for_calls

PING = {"type": "ping"}
END = {"type": "message_stop"}


def usage(prompt: int, output: int, thinking: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": thinking},
        "service_tier": "standard",
    }


def message(content: list[Any], reason: str | None, **fields: Any) -> dict[str, Any]:
    return {
        "id": "msg_0", "type": "message", "role": "assistant", "model": "demo",
        "content": content, "stop_reason": reason, "stop_sequence": None, **fields,
    }  # fmt: skip


def start(prompt: int) -> dict[str, Any]:
    return {"type": "message_start", "message": message([], None, usage=usage(prompt, 0))}


def block(index: int, content_block: dict[str, Any], *deltas: Any) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": content_block},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def text_block(index: int, value: str) -> list[dict[str, Any]]:
    deltas = [{"type": "text_delta", "text": character} for character in value]
    return block(index, {"type": "text", "text": ""}, *deltas)


def call_block(index: int, call_id: str, name: str, arguments: str) -> list[dict[str, Any]]:
    deltas = [{"type": "input_json_delta", "partial_json": each} for each in arguments]
    return block(index, {"type": "tool_use", "id": call_id, "name": name, "input": {}}, *deltas)


def stop(reason: str, counts: dict[str, Any], sequence: str | None = None) -> dict[str, Any]:
    delta = {"stop_reason": reason, "stop_sequence": sequence}
    return {"type": "message_delta", "delta": delta, "usage": counts}


async def test_text(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "Hi ö") as (_, client):
        whole = await client.post(MESSAGES, json=request())
    assert message_of(whole) == message(
        [{"type": "text", "text": "Hi ö"}], "end_turn", usage=usage(10, 6)
    )
    assert whole.headers["request-id"] == whole.headers["x-request-id"]
    assert whole.headers["x-baton-request-id"] == "msg_0"


async def test_streamed_text(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "Hi ö") as (_, client):
        streamed = await client.post(MESSAGES, json=request(stream=True))
    assert events(streamed) == [
        start(10), PING, *text_block(0, "Hi ö"), stop("end_turn", usage(10, 6)), END,
    ]  # fmt: skip


async def test_an_empty_answer_has_no_blocks(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "") as (_, client):
        streamed = await client.post(MESSAGES, json=request(stream=True))
        whole = await client.post(MESSAGES, json=request())
    assert events(streamed) == [start(10), PING, stop("end_turn", usage(10, 1)), END]
    assert message_of(whole)["content"] == []


async def test_thinking_precedes_the_text(thinker: Tokenizer) -> None:
    async with open_harness(thinker, "Hm.\n</think>\n\nYes") as (_, client):
        streamed = await client.post(MESSAGES, json=request(stream=True))
        whole = await client.post(MESSAGES, json=request())
    deltas: list[dict[str, Any]] = [{"type": "thinking_delta", "thinking": each} for each in "Hm."]
    thinking = block(
        0, {"type": "thinking", "thinking": "", "signature": ""},
        *deltas, {"type": "signature_delta", "signature": "unsigned"},
    )  # fmt: skip
    counts = usage(17, 18, thinking=12)
    assert events(streamed) == [
        start(17), PING, *thinking, *text_block(1, "Yes"), stop("end_turn", counts), END,
    ]  # fmt: skip
    assert message_of(whole)["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
        {"type": "text", "text": "Yes"},
    ]
    assert message_of(whole)["usage"] == counts


async def test_thinking_can_be_omitted(thinker: Tokenizer) -> None:
    shown = {"type": "adaptive", "display": "omitted"}
    async with open_harness(thinker, "Hm</think>Yes") as (_, client):
        streamed = await client.post(MESSAGES, json=request(stream=True, thinking=shown))
        whole = await client.post(MESSAGES, json=request(thinking=shown))
    signature = {"type": "signature_delta", "signature": "unsigned"}
    assert events(streamed)[2:5] == block(
        0, {"type": "thinking", "thinking": "", "signature": ""}, signature
    )
    assert message_of(whole)["content"][0]["thinking"] == ""


async def test_tool_calls_are_streamed(hermes: Tokenizer) -> None:
    second = '\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    tools = [TOOL, {"name": "g", "input_schema": {"type": "object"}}]
    async with open_harness(hermes, f"Hm\n{CALL}{second}") as (_, client):
        streamed = await client.post(MESSAGES, json=request(tools=tools, stream=True))
    got = events(streamed)
    ids = [each["content_block"]["id"] for each in got if "id" in each.get("content_block", {})]
    assert len(set(ids)) == 2 and all(each.startswith("toolu_") for each in ids)
    counts = usage(16, len(f"Hm\n{CALL}{second}") + 1)
    assert got == [
        start(16), PING,
        *text_block(0, "Hm"),
        *call_block(1, ids[0], "f", '{"x": 1}'),
        *call_block(2, ids[1], "g", "{}"),
        stop("tool_use", counts), END,
    ]  # fmt: skip


async def test_tool_calls_of_a_whole_message(hermes: Tokenizer) -> None:
    async with open_harness(hermes, f"Hm\n{CALL}\n{CALL}") as (router, client):
        both = message_of(await client.post(MESSAGES, json=request(tools=[TOOL])))
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        one = await client.post(MESSAGES, json=request(tools=[TOOL], tool_choice=choice))
        assert router.decode.cancelled == [("msg_1", 1)]
    first, *calls = both["content"]
    assert first == {"type": "text", "text": "Hm"}
    assert [(call["name"], call["input"]) for call in calls] == [("f", {"x": 1})] * 2
    assert both["stop_reason"] == "tool_use"
    assert len(message_of(one)["content"]) == 2


def test_arguments_that_are_no_object_are_shown_as_text() -> None:
    def encoded(text: str) -> Any:
        return orjson.loads(orjson.dumps(encode_arguments(text)))

    assert encoded('{"x": 1}') == {"x": 1}
    assert encoded(" ") == {}
    for wrong in ('{"x": ', "[1]", "1", '{"x": "\\ud800"}'):
        assert encoded(wrong) == {"INVALID_JSON": wrong}


@pytest.mark.parametrize("value", ["1" * 30, '{"x": ' * 300 + "1" + "}" * 300])
async def test_arguments_are_as_the_model_wrote_them(
    hermes: Tokenizer, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr(router_harness, "CONTEXT", 4096)
    call = f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>'
    async with open_harness(hermes, call) as (_, client):
        answer = await client.post(MESSAGES, json=request(tools=[TOOL], max_tokens=4000))
    assert answer.status_code == 200
    assert f'"input":{{"x": {value}}}' in answer.text


async def test_an_answer_can_end_at_max_tokens_or_with_the_context(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "x" * 600) as (_, client):
        short = message_of(await client.post(MESSAGES, json=request(max_tokens=2)))
        long = await client.post(MESSAGES, json=request(max_tokens=32_000, stream=True))
        full = message_of(await client.post(MESSAGES, json=request(max_tokens=32_000)))
    assert (short["content"][0]["text"], short["stop_reason"]) == ("xx", "max_tokens")
    assert full["stop_reason"] == "model_context_window_exceeded"
    assert full["usage"]["output_tokens"] == 512 - 10
    assert events(long)[-2]["delta"]["stop_reason"] == "model_context_window_exceeded"


async def test_stop_sequences(hermes: Tokenizer) -> None:
    body = request(stop_sequences=["zz", "lo"])
    async with open_harness(hermes, "Hello") as (_, client):
        whole = message_of(await client.post(MESSAGES, json=body))
        streamed = events(await client.post(MESSAGES, json={**body, "stream": True}))
    assert whole["content"] == [{"type": "text", "text": "Hel"}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "lo")
    assert streamed[-2] == stop("stop_sequence", usage(10, 5), "lo")


async def test_failure_in_the_middle_of_a_stream_is_its_last_event(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "Hello", automatic=False) as (router, client):
        task = asyncio.create_task(client.post(MESSAGES, json=request(stream=True)))
        await eventually(lambda: bool(router.decode.jobs))
        router.prefill.step()
        router.decode.step()
        await eventually(
            lambda: router.service.telemetry.history.explain("msg_0")["completion_tokens"] == 2
        )
        router.decode.fail_jobs("INVALID_ARGUMENT", "went wrong")
        response = await task
    *rest, last = events(response)
    assert rest == [start(10), PING, *text_block(0, "He")[:-1]]
    assert last == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "went wrong"},
        "request_id": response.headers["request-id"],
    }


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}])
async def test_failover_repeats_and_loses_no_event(
    hermes: Tokenizer, fields: dict[str, Any]
) -> None:
    """Without tools, tokens take the fast path; with tools, they go through the parser."""
    answer = "Hello, wörld!"
    async with open_harness(hermes, answer, automatic=False) as (router, client):
        spare = FakeWorker("d1", model_saying(answer), eos=EOS, automatic=False)
        router.placer.decode.append(spare)
        router.model.generation_context.connections.workers[spare.ref.id] = spare  # type: ignore[attr-defined]
        task = asyncio.create_task(client.post(MESSAGES, json=request(stream=True, **fields)))
        await eventually(lambda: bool(router.decode.jobs))
        router.prefill.step()
        for _ in range(8):
            router.decode.step()
        await eventually(
            lambda: router.service.telemetry.history.explain("msg_0")["completion_tokens"] == 9
        )
        router.decode.kill()
        while not task.done():
            router.prefill.step()
            spare.step()
            await asyncio.sleep(0)
        got = events(await task)
        explained = (await client.get("/admin/requests/msg_0")).json()
    prompt = 14 if fields else 10
    first, *deltas, last = text_block(0, answer)
    assert got[:3] == [start(prompt), PING, first]
    continued = {"type": "ping", "comment": "x-baton-continuation: exact"}
    assert got[-4:] == [continued, last, stop("end_turn", usage(prompt, 15)), END]
    pieces = [each["delta"]["text"] for each in got[3:-4]]  # tokens that wait are merged
    assert "".join(pieces) == answer and 8 < len(pieces) <= len(deltas)
    assert [each["decode"]["id"] for each in explained["placements"]] == ["d0", "d1"]


async def test_cached_tokens_are_not_counted_as_input(hermes: Tokenizer) -> None:
    marked = {"type": "text", "text": "x" * 20, "cache_control": {"type": "ephemeral"}}
    body = request({"role": "user", "content": [marked, {"type": "text", "text": "?"}]})
    async with open_harness(hermes, "x") as (router, client):
        first = message_of(await client.post(MESSAGES, json=body))["usage"]
        router.prefill.cached_tokens = 8
        second = message_of(await client.post(MESSAGES, json=body))["usage"]
        plain = message_of(await client.post(MESSAGES, json=request()))["usage"]
    prompt = len("<user>" + "x" * 20 + "\n\n?|>")
    assert first["cache_creation_input_tokens"] == 26
    assert (first["input_tokens"], first["cache_read_input_tokens"]) == (prompt - 26, 0)
    assert second["cache_read_input_tokens"] == 8
    assert second["cache_creation"]["ephemeral_5m_input_tokens"] == 18
    assert second["input_tokens"] == prompt - 26
    assert plain["input_tokens"] == 2 and plain["cache_creation_input_tokens"] == 0


async def test_forced_calls_have_a_grammar(hermes: Tokenizer, tmp_path: Path) -> None:
    async with open_harness(hermes, CALL) as (router, client):
        for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
            answer = await client.post(MESSAGES, json=request(tools=[TOOL], tool_choice=choice))
            assert message_of(answer)["content"][0]["input"] == {"x": 1}
        await client.post(MESSAGES, json=request(tools=[TOOL], tool_choice={"type": "none"}))
    forced = [job.spec.sampling.grammar is not None for job in router.prefill.submitted]
    assert forced == [True, True, False]
