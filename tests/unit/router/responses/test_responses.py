"""Tests answers of ``/v1/responses``: exact objects and events."""

import asyncio
from typing import Any

import orjson
import pytest

from baton.text.tokenizer import Tokenizer
from router.responses.encoder import TextLogprobs
from router.responses.output_items import decode_reasoning
from testkit.fakes.workers import FakeWorker
from tests import router_harness
from tests.responses_harness import RESPOND, response_events, response_of, summarize
from tests.router_harness import EOS, eventually, model_saying, open_harness, wrong_error
from tests.unit import small_chats

tokenizer = router_harness.tokenizer

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOL = {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False}
OTHER = {"type": "function", "name": "g"}
DEFAULTS = {"description": None, "parameters": None, "strict": False}
"""The fields that a response adds to a function which the request has without them."""

CUSTOM = {"type": "custom", "name": "run", "description": "Runs code."}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
SECOND = '\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
CUSTOM_CALL = '<tool_call>{"name": "run", "arguments": {"input": "a\\n\\"b\\""}}</tool_call>'
BEGIN = [("created", "in_progress"), ("in_progress", "in_progress")]


room_for_calls = small_chats.room_for_calls
thinker = small_chats.closing_thinker


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": "Hi", **fields}


def message_events(index: int, text: str, status: str = "completed") -> list[Any]:
    return [
        ("output_item.added", index, "message", "in_progress"),
        ("content_part.added", index, "output_text", ""),
        *([("output_text.delta", index, text)] if text else []),
        ("output_text.done", index, text),
        ("content_part.done", index, "output_text", text),
        ("output_item.done", index, "message", status),
    ]


def call_events(index: int, arguments: str) -> list[Any]:
    return [
        ("output_item.added", index, "function_call", "in_progress"),
        ("function_call_arguments.delta", index, arguments),
        ("function_call_arguments.done", index, arguments),
        ("output_item.done", index, "function_call", "completed"),
    ]


def reasoning_events(index: int, text: str) -> list[Any]:
    return [
        ("output_item.added", index, "reasoning", "in_progress"),
        ("content_part.added", index, "reasoning_text", ""),
        ("reasoning_text.delta", index, text),
        ("reasoning_text.done", index, text),
        ("content_part.done", index, "reasoning_text", text),
        ("output_item.done", index, "reasoning", "completed"),
    ]


# -- text -----------------------------------------------------------------------------------------


async def test_response_object(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        response = response_of(
            await client.post(RESPOND, json=request(instructions="Be kind", metadata={"a": "b"}))
        )
    text = b"<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    prompt = router.model.text.tokenizer.encode(f"{text.decode()}<|im_start|>assistant\n")
    assert list(router.prefill.submitted[0].spec.token_ids) == prompt
    part = {"type": "output_text", "text": "Hello, wörld!", "annotations": [], "logprobs": []}
    assert response.pop("completed_at") >= response.pop("created_at") > 0
    assert response == {
        "id": "resp_0", "object": "response", "model": "demo", "background": False,
        "status": "completed", "error": None, "incomplete_details": None,
        "instructions": "Be kind", "metadata": {"a": "b"},
        "output": [
            {
                "id": "msg_0_0", "type": "message", "status": "completed", "role": "assistant",
                "content": [part],
            }
        ],
        "usage": {
            "input_tokens": len(prompt),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 15, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(prompt) + 15,
        },
        "max_output_tokens": None, "max_tool_calls": None, "parallel_tool_calls": True,
        "previous_response_id": None, "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None}, "safety_identifier": None,
        "service_tier": "default", "store": False, "temperature": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto",
        "tools": [], "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "user": None,
    }  # fmt: skip


async def test_text_is_streamed(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        events = response_events(await client.post(RESPOND, json=request(stream=True)))
        whole = response_of(await client.post(RESPOND, json=request()))
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert deltas == [*"Hello, wörld!"]
    assert summarize(events) == [
        *BEGIN, *message_events(0, "Hello, wörld!"), ("completed", "completed"),
    ]  # fmt: skip
    first, final = events[0]["response"], events[-1]["response"]
    assert first["output"] == [] and first["usage"] is None
    assert events[4] == {
        "type": "response.output_text.delta", "sequence_number": 4, "item_id": "msg_0_0",
        "output_index": 0, "content_index": 0, "delta": "H", "logprobs": [],
    }  # fmt: skip
    assert events[-2]["item"] == final["output"][0]
    ids = {"id", "created_at", "completed_at", "output"}
    assert {k: v for k, v in final.items() if k not in ids} == {
        k: v for k, v in whole.items() if k not in ids
    }
    assert final["output"][0]["content"] == whole["output"][0]["content"]


async def test_answer_without_text_has_an_empty_message(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, "") as (_, client):
        response = response_of(await client.post(RESPOND, json=request()))
        events = response_events(await client.post(RESPOND, json=request(stream=True)))
    assert [item["content"][0]["text"] for item in response["output"]] == [""]
    assert summarize(events) == [*BEGIN, *message_events(0, ""), ("completed", "completed")]


async def test_answer_that_reaches_its_limit_is_incomplete(tokenizer: Tokenizer) -> None:
    body = request(max_output_tokens=5)
    async with open_harness(tokenizer) as (_, client):
        response = response_of(await client.post(RESPOND, json=body))
        events = response_events(await client.post(RESPOND, json={**body, "stream": True}))
    assert response["status"] == "incomplete" and response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert summarize(events) == [
        *BEGIN, *message_events(0, "Hello", "incomplete"), ("incomplete", "incomplete"),
    ]  # fmt: skip
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_obfuscation_hides_the_sizes_of_deltas(tokenizer: Tokenizer) -> None:
    options = {"include_obfuscation": True}
    async with open_harness(tokenizer) as (_, client):
        answer = await client.post(RESPOND, json=request(stream=True, stream_options=options))
    padded = [event for event in response_events(answer) if "obfuscation" in event]
    assert "".join(event["delta"] for event in padded) == "Hello, wörld!"
    assert {
        len(f'"{each["delta"]}"'.encode() + each["obfuscation"].encode()) for each in padded
    } == {256}


async def test_obfuscation_hides_the_sizes_of_deltas_with_logprobs(tokenizer: Tokenizer) -> None:
    fields = request(stream=True, stream_options={"include_obfuscation": True}, top_logprobs=2)
    fields["include"] = ["message.output_text.logprobs"]
    async with open_harness(tokenizer) as (_, client):
        answer = await client.post(RESPOND, json=fields)
    deltas = [event for event in response_events(answer) if event["type"].endswith(".delta")]
    assert "".join(event["delta"] for event in deltas) == "Hello, wörld!"
    for event in deltas:
        padding = len(event.pop("obfuscation"))
        assert (len(orjson.dumps(event)) + padding) % 256 == 0


NO_ARGUMENTS = '<tool_call>{"name": "g"}</tool_call>'


@pytest.mark.parametrize(
    "text",
    [NO_ARGUMENTS + "{}", "Wait" + NO_ARGUMENTS + "a" + CALL + "a", NO_ARGUMENTS + "</tool_call>"],
)
async def test_logprobs_are_the_same_with_and_without_a_stream(
    thinker: Tokenizer, text: str
) -> None:
    """The difficult case is a tool call without arguments: the parser adds the arguments ``{}``,
    for which the model has generated no tokens, and so no logprobs."""
    body = request(top_logprobs=0, include=["message.output_text.logprobs"], tools=[TOOL, OTHER])
    async with open_harness(thinker, text) as (_, client):
        whole = response_of(await client.post(RESPOND, json=body))
        events = response_events(await client.post(RESPOND, json={**body, "stream": True}))
    shown = [
        [item.get("content") for item in response["output"]]
        for response in (whole, events[-1]["response"])
    ]
    assert shown[0] == shown[1]
    for [part] in filter(None, shown[0]):
        assert "".join(each["token"] for each in part["logprobs"]) == part["text"]


async def test_logprobs_of_many_calls_take_linear_time(
    thinker: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, an answer of a thousand calls would block the router for minutes."""
    held: list[int] = []
    take = TextLogprobs.take

    def count(logprobs: TextLogprobs, text: str, *, newest: bool) -> list[dict[str, Any]]:
        held.append(len(logprobs._tokens))
        return take(logprobs, text, newest=newest)

    monkeypatch.setattr(TextLogprobs, "take", count)
    body = request(top_logprobs=0, include=["message.output_text.logprobs"], tools=[TOOL])
    async with open_harness(thinker, CALL * 5 + "Done") as (_, client):
        response = response_of(await client.post(RESPOND, json=body))
    assert len(response["output"]) == 6
    assert max(held) < 2 * len(CALL)


async def test_logprobs_are_those_of_the_text(thinker: Tokenizer) -> None:
    body = request(include=["message.output_text.logprobs"], top_logprobs=1, tools=[TOOL])
    async with open_harness(thinker, f"<think>Hm</think>Yes{CALL}", reasoning_parser="qwen3") as (
        _,
        client,
    ):
        response = response_of(await client.post(RESPOND, json=body))
        events = response_events(await client.post(RESPOND, json={**body, "stream": True}))
    content = response["output"][1]["content"][0]
    assert "".join(each["token"] for each in content["logprobs"]) == "Yes"
    assert content["logprobs"][0].keys() == {"token", "bytes", "logprob", "top_logprobs"}
    assert events[-1]["response"]["output"][1]["content"] == [content]
    streamed = [
        e["logprobs"][0]["token"]
        for e in events
        if e["type"].endswith("text.delta") and "logprobs" in e
    ]
    assert streamed == ["Y", "e", "s"]


# -- reasoning ------------------------------------------------------------------------------------


async def test_reasoning_precedes_the_text(thinker: Tokenizer) -> None:
    async with open_harness(thinker, "<think>Hm</think>Yes", reasoning_parser="qwen3") as (
        _,
        client,
    ):
        response = response_of(await client.post(RESPOND, json=request()))
        events = response_events(await client.post(RESPOND, json=request(stream=True)))
    assert response["output"][0] == {
        "id": "rs_0_0", "type": "reasoning", "status": "completed", "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm"}],
    }  # fmt: skip
    assert response["output"][1]["content"][0]["text"] == "Yes"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert summarize(events) == [
        *BEGIN, *reasoning_events(0, "Hm"), *message_events(1, "Yes"), ("completed", "completed"),
    ]  # fmt: skip
    assert [item["id"] for item in events[-1]["response"]["output"]] == ["rs_1_0", "msg_1_1"]


async def test_requested_summary_is_the_reasoning(thinker: Tokenizer) -> None:
    body = request(reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])
    async with open_harness(thinker, "<think>Hm</think>Yes", reasoning_parser="qwen3") as (
        _,
        client,
    ):
        response = response_of(await client.post(RESPOND, json=body))
        events = response_events(await client.post(RESPOND, json={**body, "stream": True}))
    item = response["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "Hm"}] and "content" not in item
    assert decode_reasoning(item["encrypted_content"]) == "Hm"
    assert summarize(events)[2:8] == [
        ("output_item.added", 0, "reasoning", "in_progress"),
        ("reasoning_summary_part.added", 0, "summary_text", ""),
        ("reasoning_summary_text.delta", 0, "Hm"),
        ("reasoning_summary_text.done", 0, "Hm"),
        ("reasoning_summary_part.done", 0, "summary_text", "Hm"),
        ("output_item.done", 0, "reasoning", "completed"),
    ]
    assert events[-1]["response"]["output"][0]["encrypted_content"] == item["encrypted_content"]


# -- tool calls -----------------------------------------------------------------------------------


async def test_calls_are_items(thinker: Tokenizer) -> None:
    async with open_harness(thinker, f"Well.\n{CALL}{SECOND}") as (router, client):
        body = request(tools=[TOOL, OTHER])
        response = response_of(await client.post(RESPOND, json=body))
        events = response_events(await client.post(RESPOND, json={**body, "stream": True}))
    assert bytes(router.prefill.submitted[0].spec.token_ids) == b"[f g ]<user>Hi|>"
    message, one, two = response["output"]
    assert message["content"][0]["text"] == "Well."
    assert one == {
        "id": "fc_0_1", "type": "function_call", "status": "completed",
        "call_id": one["call_id"], "name": "f", "arguments": '{"x": 1}',
    }  # fmt: skip
    assert two["name"] == "g" and two["arguments"] == "{}"
    assert one["call_id"].startswith("call_") and one["call_id"] != two["call_id"]
    assert response["tools"] == [DEFAULTS | TOOL, DEFAULTS | OTHER]
    assert summarize(events) == [
        *BEGIN, *message_events(0, "Well."), *call_events(1, '{"x": 1}'), *call_events(2, "{}"),
        ("completed", "completed"),
    ]  # fmt: skip
    arguments = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
    assert arguments == [*'{"x": 1}', *"{}"]


async def test_calls_of_custom_tools_have_text(thinker: Tokenizer) -> None:
    body = request(tools=[CUSTOM])
    async with open_harness(thinker, CUSTOM_CALL) as (router, client):
        response = response_of(await client.post(RESPOND, json=body))
        events = response_events(await client.post(RESPOND, json={**body, "stream": True}))
    assert bytes(router.prefill.submitted[0].spec.token_ids) == b"[run ]<user>Hi|>"
    assert response["output"] == [
        {
            "id": "ctc_0_0", "type": "custom_tool_call", "name": "run", "input": 'a\n"b"',
            "call_id": response["output"][0]["call_id"],
        }
    ]  # fmt: skip
    assert summarize(events) == [
        *BEGIN,
        ("output_item.added", 0, "custom_tool_call", None),
        ("custom_tool_call_input.delta", 0, 'a\n"b"'),
        ("custom_tool_call_input.done", 0, 'a\n"b"'),
        ("output_item.done", 0, "custom_tool_call", None),
        ("completed", "completed"),
    ]


async def test_tools_of_a_namespace_are_functions(thinker: Tokenizer) -> None:
    space = {"type": "namespace", "name": "n", "description": "d", "tools": [TOOL, OTHER]}
    text = '<tool_call>{"name": "n__f", "arguments": {"x": 1}}</tool_call>'
    async with open_harness(thinker, text) as (router, client):
        body = request(tools=[TOOL, space])
        response = response_of(await client.post(RESPOND, json=body))
        (call,) = response["output"]
        history = [{"role": "user", "content": "Hi"}, call]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        await client.post(RESPOND, json=request(input=[*history, output], tools=[space]))
    assert (call["name"], call["namespace"]) == ("f", "n")
    assert response["tools"] == [DEFAULTS | TOOL, space]
    first, second = (bytes(job.spec.token_ids) for job in router.prefill.submitted)
    assert first == b"[f n__f n__g ]<user>Hi|>"
    assert second == (
        b"[n__f n__g ]<user>Hi|<assistant>!n__f:1|<tool>2#%b|>" % call["call_id"].encode()
    )


async def test_parallel_calls_can_be_switched_off(thinker: Tokenizer) -> None:
    async with open_harness(thinker, f"{CALL}{SECOND}") as (_, client):
        body = request(tools=[TOOL, OTHER], parallel_tool_calls=False)
        response = response_of(await client.post(RESPOND, json=body))
    assert [item["name"] for item in response["output"]] == ["f"]
    assert response["parallel_tool_calls"] is False


async def test_tool_choice(thinker: Tokenizer) -> None:
    named = {"type": "function", "name": "f"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [named, {"type": "web_search"}]}
    custom = {"type": "custom", "name": "run"}
    async with open_harness(thinker, CALL) as (router, client):
        for choice in ("none", "required", named, allowed, custom):
            body = request(tools=[TOOL, OTHER, CUSTOM], tool_choice=choice)
            assert response_of(await client.post(RESPOND, json=body))["tool_choice"] == choice
    prompts = [bytes(job.spec.token_ids) for job in router.prefill.submitted]
    assert prompts == [
        b"<user>Hi|>", b"[f g run ]<user>Hi|>", b"[f ]<user>Hi|>", b"[f ]<user>Hi|>",
        b"[run ]<user>Hi|>",
    ]  # fmt: skip
    forced = [job.spec.sampling.grammar is not None for job in router.prefill.submitted]
    assert forced == [False, True, True, False, True]


async def test_hosted_tools_are_left_out(thinker: Tokenizer) -> None:
    async with open_harness(thinker, "Yes") as (router, client):
        body = request(tools=[{"type": "web_search"}, TOOL, {"type": "code_interpreter"}])
        answer = await client.post(RESPOND, json=body)
    assert response_of(answer)["tools"] == [DEFAULTS | TOOL]
    ignored = answer.headers["x-baton-ignored-fields"]
    assert ignored == "tools.web_search, tools.code_interpreter"
    assert bytes(router.prefill.submitted[0].spec.token_ids) == b"[f ]<user>Hi|>"


async def test_answers_follow_their_format(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    async with open_harness(tokenizer, '{"x": 1}') as (router, client):
        body = request(text={"format": form, "verbosity": "low"})
        response = response_of(await client.post(RESPOND, json=body))
    assert response["text"] == {"format": {"description": None} | form, "verbosity": "low"}
    grammar = router.prefill.submitted[0].spec.sampling.grammar
    assert grammar is not None and '"x"' in grammar.text


async def test_limit_within_a_call_makes_it_incomplete(thinker: Tokenizer) -> None:
    for tool, text, name in ((TOOL, CALL, "arguments"), (CUSTOM, CUSTOM_CALL, "input")):
        body = request(tools=[tool], max_output_tokens=text.index("{", 14) + 3)
        async with open_harness(thinker, text) as (_, client):
            response = response_of(await client.post(RESPOND, json=body))
            events = response_events(await client.post(RESPOND, json={**body, "stream": True}))
        (item,) = response["output"]
        assert (response["status"], item["status"]) == ("incomplete", "incomplete")
        assert [part["text"] for part in item["content"]] == [""]
        assert events[-1]["type"] == "response.incomplete"
        call = events[-2]["item"]
        assert call[name].startswith("{") and not call[name].endswith("}")
        assert call.get("status") in ("incomplete", None)


async def test_limit_within_the_reasoning(thinker: Tokenizer) -> None:
    body = request(max_output_tokens=10)
    async with open_harness(thinker, "<think>Hm, well", reasoning_parser="qwen3") as (_, client):
        response = response_of(await client.post(RESPOND, json=body))
        events = response_events(await client.post(RESPOND, json={**body, "stream": True}))
    (item,) = response["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")
    assert item["content"][0]["text"] == "Hm,"
    assert events[-2]["item"]["content"] == item["content"]


# -- failures -------------------------------------------------------------------------------------


async def test_failure_in_the_middle_of_a_stream(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, automatic=False) as (router, client):
        task = asyncio.create_task(client.post(RESPOND, json=request(stream=True)))
        await eventually(lambda: bool(router.decode.jobs))
        router.prefill.step()
        router.decode.step()
        await eventually(
            lambda: router.service.telemetry.history.explain("resp_0")["completion_tokens"] == 2
        )
        router.decode.fail_jobs("INVALID_ARGUMENT", "went wrong")
        events = response_events(await task)
    assert summarize(events) == [
        *BEGIN,
        ("output_item.added", 0, "message", "in_progress"),
        ("content_part.added", 0, "output_text", ""),
        ("output_text.delta", 0, "He"),
        ("failed", "failed"),
    ]
    response = events[-1]["response"]
    assert response["error"] == {"code": "invalid_prompt", "message": "went wrong"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "He"


async def test_failure_before_the_first_token_sets_the_http_status(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, client):
        router.placer.decode = []
        assert wrong_error(await client.post(RESPOND, json=request(stream=True)), 503)


@pytest.mark.parametrize("stream", [False, True])
async def test_failover_is_invisible_to_the_client(tokenizer: Tokenizer, stream: bool) -> None:
    async with open_harness(tokenizer, automatic=False) as (router, client):
        spare = FakeWorker("d1", model_saying("Hello, wörld!"), eos=EOS, automatic=False)
        router.placer.decode.append(spare)
        router.model.generation_context.connections.workers[spare.ref.id] = spare  # type: ignore[attr-defined]
        task = asyncio.create_task(client.post(RESPOND, json=request(stream=stream)))
        await eventually(lambda: bool(router.decode.jobs))
        router.prefill.step()
        for _ in range(8):
            router.decode.step()
        await eventually(
            lambda: router.service.telemetry.history.explain("resp_0")["completion_tokens"] == 9
        )
        router.decode.kill()
        while not task.done():
            router.prefill.step()
            spare.step()
            await asyncio.sleep(0)
        answer = await task
    if not stream:
        assert response_of(answer)["output"][0]["content"][0]["text"] == "Hello, wörld!"
        return
    assert summarize(response_events(answer)) == [
        *BEGIN, *message_events(0, "Hello, wörld!"), ("completed", "completed"),
    ]  # fmt: skip
