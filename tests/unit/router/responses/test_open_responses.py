"""Tests ``/v1/responses`` against Open Responses (openresponses.org): the seven cases of its
acceptance tests, and the schemas of all states of a response and of all events of a stream."""

import asyncio
from typing import Any

import httpx
import pytest

from baton.text.tokenizer import Tokenizer
from tests.open_responses_schema import EVENTS, RESPONSE, event_errors, response_errors
from tests.responses_harness import RESPOND, response_events, response_of
from tests.router_harness import eventually, open_harness, wrong_error
from tests.unit import small_chats

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Returns the weather at a place.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n</tool_call>'
PIXEL = "data:image/png;base64,iVBORw0KGgo="


room_for_calls = small_chats.room_for_calls
thinker = small_chats.closing_thinker


def request(*messages: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    items = [{"type": "message", "role": role, "content": text} for role, text in messages]
    return {"model": "demo", "input": items, **fields}


def checked_response(answer: httpx.Response) -> dict[str, Any]:
    response = response_of(answer)
    assert response_errors(response) == []
    return response


def checked_events(answer: httpx.Response) -> list[dict[str, Any]]:
    events = response_events(answer)
    assert [error for event in events for error in event_errors(event)] == []
    return events


# -- the cases of the acceptance tests ------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([("user", "Greet me.")], id="basic-response"),
        pytest.param([("system", "Speak briefly."), ("user", "Hi")], id="system-prompt"),
        pytest.param(
            [("user", "I am Ada."), ("assistant", "Hello Ada!"), ("user", "Who am I?")],
            id="multi-turn",
        ),
    ],
)
async def test_text(thinker: Tokenizer, messages: list[tuple[str, str]]) -> None:
    async with open_harness(thinker, "Hello") as (router, client):
        response = checked_response(await client.post(RESPOND, json=request(*messages)))
        [job] = router.prefill.submitted
    assert (
        thinker.decode(job.spec.token_ids)
        == "".join(f"<{role}>{text}|" for role, text in messages) + ">"
    )
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["completed_at"] >= response["created_at"] > 0
    assert (response["presence_penalty"], response["frequency_penalty"]) == (0, 0)


async def test_streaming_response(thinker: Tokenizer) -> None:
    async with open_harness(thinker, "1 2 3") as (_, client):
        body = request(("user", "Count."), stream=True)
        events = checked_events(await client.post(RESPOND, json=body))
    final = events[-1]["response"]
    assert (events[-1]["type"], final["status"]) == ("response.completed", "completed")
    assert final["completed_at"] >= final["created_at"]
    assert [event["response"]["completed_at"] for event in events[:2]] == [None, None]


async def test_tool_calling(thinker: Tokenizer) -> None:
    async with open_harness(thinker, CALL) as (_, client):
        body = request(("user", "Weather in Ulm?"), tools=[WEATHER])
        response = checked_response(await client.post(RESPOND, json=body))
    assert [(item["type"], item["arguments"]) for item in response["output"]] == [
        ("function_call", '{"place": "Ulm"}')
    ]
    assert response["tools"] == [{**WEATHER, "strict": False}]


async def test_tool_calling_streaming(thinker: Tokenizer) -> None:
    async with open_harness(thinker, CALL) as (_, client):
        body = request(("user", "Weather in Ulm?"), tools=[WEATHER], stream=True)
        events = checked_events(await client.post(RESPOND, json=body))
    kinds = [event["type"] for event in events]
    assert [kind for number, kind in enumerate(kinds) if kind not in kinds[:number]] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip


async def test_image_input_is_refused(thinker: Tokenizer) -> None:
    """No model takes images, so this case can't pass; the error names the part."""
    parts = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": PIXEL},
    ]
    async with open_harness(thinker) as (_, client):
        error = wrong_error(await client.post(RESPOND, json=request(("user", parts))))
    assert error["param"] == "input[0].content[1].type"


# -- the schemas ----------------------------------------------------------------------------------

FORMAT = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({}, {}),
        ({"presence_penalty": 1.5, "frequency_penalty": -1}, {"presence_penalty": 1.5,
         "frequency_penalty": -1}),
        ({"text": {"format": FORMAT}},
         {"text": {"format": {**FORMAT, "description": None, "strict": False},
                   "verbosity": "medium"}}),
        ({"tools": [{"type": "function", "name": "f"}]},
         {"tools": [{"type": "function", "name": "f", "description": None, "parameters": None,
                     "strict": False}]}),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}, {}),
        ({"reasoning": {"effort": "low", "summary": "auto"}},
         {"reasoning": {"effort": "low", "summary": "auto"}}),
        ({"max_output_tokens": 2}, {"status": "incomplete", "completed_at": None}),
    ],
)  # fmt: skip
async def test_fields_of_a_response(
    thinker: Tokenizer, fields: dict[str, Any], sent: dict[str, Any]
) -> None:
    async with open_harness(thinker, "{}") as (_, client):
        body = request(("user", "Hi"), **fields)
        response = checked_response(await client.post(RESPOND, json=body))
    assert {name: response[name] for name in sent} == sent


async def test_all_events_of_a_stream_are_valid(thinker: Tokenizer) -> None:
    """The events that the specification has, and that this router can send."""
    seen: set[str] = set()
    asked = {
        "tools": [WEATHER],
        "top_logprobs": 1,
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "stream_options": {"include_obfuscation": True},
        "stream": True,
    }
    text = f"<think>Hm</think>Yes{CALL}"
    async with open_harness(thinker, text, reasoning_parser="qwen3") as (_, client):
        for summary, limit in (("auto", None), ("none", 30)):
            body = request(
                ("user", "Hi"), **asked, reasoning={"summary": summary}, max_output_tokens=limit
            )
            events = checked_events(await client.post(RESPOND, json=body))
            seen |= {event["type"] for event in events}
    [logprob] = next(e for e in events if e["type"] == "response.output_text.delta")["logprobs"]
    assert (logprob["token"], logprob["bytes"]) == ("Y", [ord("Y")])
    not_sent_here = {"response.queued", "response.failed"}
    assert seen == EVENTS.keys() - not_sent_here


async def test_failed_response_is_valid(thinker: Tokenizer) -> None:
    async with open_harness(thinker, automatic=False) as (router, client):
        task = asyncio.create_task(client.post(RESPOND, json=request(("user", "Hi"), stream=True)))
        await eventually(lambda: bool(router.decode.jobs))
        router.prefill.step()
        router.decode.fail_jobs("INVALID_ARGUMENT", "went wrong")
        failed = checked_events(await task)[-1]
    assert failed["type"] == "response.failed"
    assert failed["response"]["completed_at"] is None


def test_a_missing_field_is_found() -> None:
    complete = dict.fromkeys(RESPONSE["required"])
    for name in RESPONSE["required"]:
        lacking = {key: value for key, value in complete.items() if key != name}
        assert f": {name!r} is a required property" in response_errors(lacking)
