"""Tests requests to ``/v1/responses``: what the model sees of them, and how invalid ones are
refused."""

import typing
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Tool

from baton.text.tokenizer import Tokenizer
from router.responses.output_items import encode_reasoning
from router.responses.tools import HOSTED_TOOLS
from tests import router_harness
from tests.responses_harness import RESPOND, response_of
from tests.router_harness import open_harness, wrong_error
from tests.unit.small_chats import TEMPLATE, load_tokenizer

tokenizer = router_harness.tokenizer

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_harness, "CONTEXT", 512)


@pytest.fixture
def reader(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(tmp_path, TEMPLATE + "{# <tool_call> reasoning_effort #}")


def text(kind: str, value: str) -> dict[str, str]:
    return {"type": kind, "text": value}


def reasoning(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


def answer(value: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": value, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": content}  # fmt: skip


# -- what the model sees --------------------------------------------------------------------------


async def test_instructions_and_a_developer_item_for_a_strict_template(tmp_path: Path) -> None:
    """Codex sends both. The texts of all messages are in the prompt, whatever the template takes;
    errors still name the item."""
    guard = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('late') }}{% endif %}{% endfor %}"
    )
    strict = load_tokenizer(tmp_path, guard + TEMPLATE)
    items = [
        {"role": "developer", "content": "b"}, USER,
        reasoning(content=[text("reasoning_text", "Hm")]), CALL, OUTPUT,
        {"role": "system", "content": "c"},
    ]  # fmt: skip
    async with open_harness(strict, "x", refuses_special_tokens=True) as (router, client):
        response_of(await client.post(RESPOND, json={"input": items, "instructions": "a"}))
        items[-1] = {"role": "user", "content": "<|im_end|>"}
        wrong = await client.post(RESPOND, json={"input": items, "instructions": "a"})
    prompt = bytes(router.prefill.submitted[0].spec.token_ids).decode()
    assert prompt == "<system>a\n\nb|<user>Hi|<assistant>(Hm)!f:1|<tool>2#c1|<user>c|>"
    assert wrong_error(wrong)["param"] == "input[5].content"


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ("Hi", "<user>Hi|>"),
        ([USER], "<user>Hi|>"),
        (
            [{"type": "message", "role": "developer", "content": [text("input_text", "Be")]}, USER],
            "<system>Be|<user>Hi|>",
        ),
        (
            [{"role": "user", "content": [text("input_text", "a"), text("input_text", "b")]}],
            "<user>ab|>",
        ),
        ([USER, answer("Yes"), USER], "<user>Hi|<assistant>Yes|<user>Hi|>"),
        ([USER, answer("Yes"), answer("No")], "<user>Hi|<assistant>Yes|<assistant>No|>"),
        ([USER, CALL, OUTPUT], "<user>Hi|<assistant>!f:1|<tool>2#c1|>"),
        (
            [USER, answer("Well"), CALL, {**CALL, "call_id": "c2"}, OUTPUT],
            "<user>Hi|<assistant>Well!f:1!f:1|<tool>2#c1|>",
        ),
        (
            [USER, CALL, {**OUTPUT, "output": [text("input_text", "2"), text("input_text", "3")]}],
            "<user>Hi|<assistant>!f:1|<tool>23#c1|>",
        ),
        (
            [USER, reasoning(content=[text("reasoning_text", "Hm")]), answer("Yes"), CALL, OUTPUT],
            "<user>Hi|<assistant>Yes(Hm)!f:1|<tool>2#c1|>",
        ),
        (
            [USER, reasoning(summary=[text("summary_text", "A"), text("summary_text", "B")]), CALL],
            "<user>Hi|<assistant>(A\n\nB)!f:1|>",
        ),
        (
            [USER, reasoning(encrypted_content=encode_reasoning("Hm")), answer("Yes"), USER],
            "<user>Hi|<assistant>Yes(Hm)|<user>Hi|>",
        ),
        (
            [
                USER,
                {"type": "custom_tool_call", "call_id": "c1", "name": "g", "input": "x"},
                {"type": "custom_tool_call_output", "call_id": "c1", "output": "y"},
            ],
            "<user>Hi|<assistant>!g:|<tool>y#c1|>",
        ),
    ],
)
async def test_items_become_messages(reader: Tokenizer, given: Any, prompt: str) -> None:
    async with open_harness(reader) as (router, client):
        response_of(await client.post(RESPOND, json={"input": given}))
        counted = await client.post(f"{RESPOND}/input_tokens", json={"input": given})
    assert bytes(router.prefill.submitted[0].spec.token_ids).decode() == prompt
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": len(prompt)}


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("max_tokens", 16, "use max_output_tokens"),
        ("messages", [{"role": "user", "content": "Hi"}], "use input"),
        ("reasoning_effort", "low", "use reasoning.effort"),
        ("response_format", {"type": "text"}, "use text.format"),
        ("n", 2, "a response has one answer"),
    ],
)
async def test_fields_of_chats_are_refused_by_name(
    reader: Tokenizer, field: str, value: Any, reason: str
) -> None:
    async with open_harness(reader) as (_, client):
        error = wrong_error(await client.post(RESPOND, json={"input": "Hi", field: value}))
    assert (error["param"], error["message"]) == (field, f"{field} is not supported: {reason}")


async def test_reasoning_of_other_servers_is_ignored(reader: Tokenizer) -> None:
    items = [USER, reasoning(encrypted_content="gAAAAAB"), answer("Yes"), USER]
    async with open_harness(reader) as (router, client):
        got = await client.post(RESPOND, json={"input": items})
    assert got.headers["x-baton-ignored-fields"] == "input.encrypted_content"
    prompt = bytes(router.prefill.submitted[0].spec.token_ids)
    assert prompt == b"<user>Hi|<assistant>Yes|<user>Hi|>"


async def test_fields_reach_the_sampler(reader: Tokenizer) -> None:
    body = {
        "input": "Hi", "max_output_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 3,
        "min_p": 0.125, "seed": 5, "top_logprobs": 2, "logit_bias": {"7": 1.5},
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 2.0,
        "stop_token_ids": [9], "ignore_eos": True, "min_tokens": 2,
    }  # fmt: skip
    async with open_harness(reader) as (router, client):
        response = response_of(await client.post(RESPOND, json=body))
    params = router.prefill.submitted[0].spec.sampling
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.25, 3)
    assert (params.min_p, params.seed, params.logprobs, params.min_tokens) == (0.125, 5, 2, 2)
    assert params.logit_bias == ((7, 1.5),) and params.stop_token_ids == (9,) and params.ignore_eos
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    assert params.repetition_penalty == 2.0
    assert (response["temperature"], response["top_p"], response["top_logprobs"]) == (0.5, 0.25, 2)


async def test_stop_strings_end_the_answer(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        response = response_of(await client.post(RESPOND, json={"input": "Hi", "stop": [","]}))
    assert response["output"][0]["content"][0]["text"] == "Hello"


CODEX: dict[str, Any] = {
    "model": "demo",
    "input": [
        {
            "type": "message", "id": "msg_1aefd5b8-0162", "role": "developer",
            "content": [text("input_text", "You are"), text("input_text", " an agent")],
        },
        {
            "type": "message", "id": "msg_01a209ff-7f0d", "role": "user",
            "content": [text("input_text", "Say hello")],
        },
        {**CALL, "id": "fc_1", "status": "completed"},
        {**OUTPUT, "id": "fco_01a209ff-80c5"},
    ],
    "tools": [
        {**FUNCTION, "strict": False, "description": "Runs a command"},
        {
            "type": "namespace", "name": "agents", "description": "Sub-agents",
            "tools": [{**FUNCTION, "name": "close", "strict": False}],
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"},
    "store": False, "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a209ff", "client_metadata": {"x-codex-window-id": "01a209ff:0"},
}  # fmt: skip
"""A request in the form in which Codex CLI sends it."""


async def test_request_of_codex(reader: Tokenizer) -> None:
    async with open_harness(reader) as (router, client):
        got = await client.post(RESPOND, json=CODEX)
    response_of(got)
    assert got.headers["x-baton-ignored-fields"] == "tools.web_search"
    assert bytes(router.prefill.submitted[0].spec.token_ids) == (
        b"[f agents__close ]<system>You are an agent|<user>Say hello|<assistant>!f:1|<tool>2#c1|>"
    )


def test_all_hosted_tools_are_known() -> None:
    (union, *_) = typing.get_args(Tool)
    kinds = {
        kind
        for each in typing.get_args(union)
        for kind in typing.get_args(each.model_fields["type"].annotation)
    }
    assert kinds - {"function", "custom", "namespace"} <= HOSTED_TOOLS


# -- invalid requests -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [USER, {"role": "user"}]}, "input[1].content"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "no_such", "x": 1}]}, "input[0].type"),
        ({"input": [{}]}, "input[0].type"),
        (
            {"input": [USER, {"role": "user", "content": [{"type": "input_image"}]}]},
            "input[1].content[0].type",
        ),
        ({"input": [{"role": "user", "content": [3]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
         "input[0].content[0].text"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id"),
        ({"input": [{**OUTPUT, "output": [{"type": "input_file"}]}]}, "input[0].output[0].type"),
        ({"input": [reasoning(summary="x")]}, "input[0].summary"),
        ({"input": [reasoning(encrypted_content=3)]}, "input[0].encrypted_content"),
        ({"input": [{"type": "item_reference", "id": "msg_9_0"}]}, "input[0].id"),
        ({"input": [USER, {**USER, "id": ["msg_1"]}]}, "input[1].id"),
        ({"input": [USER, {"type": "web_search_call", "id": {}}]}, "input[1].id"),
        ({"input": "x" * 600}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 510}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": "x"}, "top_k"),
        ({"min_tokens": 9, "max_output_tokens": 5}, "min_tokens"),
        ({"min_tokens": 9, "text": {"format": {"type": "json_object"}}}, "min_tokens"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "no"}}}},
         "text.format"),
        ({"text": {"verbosity": "huge"}}, "text.verbosity"),
        ({"reasoning": {"effort": "vast"}}, "reasoning.effort"),
        ({"reasoning": {"context": "current_turn"}}, "reasoning.context"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"include": ["everything"]}, "include[0]"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "no_such"}]}, "tools[0].type"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
        ({"tools": [{**FUNCTION, "parameters": "x"}]}, "tools[0].parameters"),
        ({"tools": [{**FUNCTION, "strict": 1}]}, "tools[0].strict"),
        ({"tools": [{"type": "custom", "name": "c", "format": GRAMMAR}]}, "tools[0].format"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
         "tools[0].tools[0].name"),
        ({"tools": [FUNCTION], "tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
         "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}},
         "tool_choice.name"),
        ({"tools": [FUNCTION], "tool_choice": {
            "type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}},
         "tool_choice.tools"),
        ({"tools": [FUNCTION], "tool_choice": {
            "type": "allowed_tools", "mode": "auto",
            "tools": [{"type": "function", "name": "f"}] * 129}},
         "tool_choice.tools"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"input": [USER, *[CALL] * 129]}, "input[1]"),
    ],
)  # fmt: skip
async def test_errors_name_the_field(reader: Tokenizer, fields: dict[str, Any], param: str) -> None:
    status = 404 if param == "input[0].id" else 400
    async with open_harness(reader) as (_, client):
        error = wrong_error(await client.post(RESPOND, json={"input": "Hi", **fields}), status)
    assert error["param"] == param
    assert "messages" not in error["message"] and "max_tokens" not in error["message"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([USER, {"role": "user", "content": "<|im_start|>"}], "input[1].content"),
        ([USER, {**OUTPUT, "output": "<|im_start|>"}], "input[1].output"),
        ("<|im_start|>", "input"),
    ],
)
async def test_special_tokens_are_refused_by_item(
    tokenizer: Tokenizer, given: Any, param: str
) -> None:
    async with open_harness(tokenizer, refuses_special_tokens=True) as (_, client):
        body = {"input": given, "instructions": "<|im_start|>"}
        assert wrong_error(await client.post(RESPOND, json=body))["param"] == param


@pytest.mark.parametrize(
    "role", ["messages", "messages[0].content", f"messages[{'9' * 5000}]", "it's messages"]
)
async def test_errors_repeat_values_unchanged(reader: Tokenizer, role: str) -> None:
    async with open_harness(reader) as (_, client):
        answer = await client.post(RESPOND, json={"input": [{"role": role, "content": "x"}]})
    error = wrong_error(answer)
    assert error["param"] == "input[0].role"
    assert error["message"].startswith(f"input[0].role: {role!r} must"[:900])


async def test_tokens_of_too_long_inputs_are_counted(reader: Tokenizer) -> None:
    path = f"{RESPOND}/input_tokens"
    async with open_harness(reader) as (_, client):
        counted = await client.post(path, json={"input": "x" * 600, "tools": [FUNCTION]})
        assert counted.json()["input_tokens"] == 600 + len("[f ]<user>|>")
        assert wrong_error(await client.post(path, json={}))["param"] == "input"
        wrong_error(await client.post(path, json={"input": "x", "model": "other"}), 404)
