"""Tests tool calls over HTTP, with exact answers and chunks."""

from pathlib import Path
from typing import Any

import pytest

from baton.core.grammar import GrammarKind
from baton.text.tokenizer import Tokenizer
from router.serving.parsers.call_grammar import forbid_extra_properties
from router.serving.schema import tool as tool_schema
from router.serving.schema.tool import MAX_TOOLS
from tests.router_harness import CHAT, EOS, USER, chat, events, open_harness, wrong_error
from tests.unit import small_chats
from tests.unit.small_chats import (
    CALL,
    NAMED,
    OTHER,
    TEMPLATE,
    TOOL,
    deltas,
    load_tokenizer,
    message_of,
)

room_for_calls = small_chats.room_for_calls
hermes = small_chats.hermes


async def test_tool_call_is_parsed(hermes: Tokenizer) -> None:
    async with open_harness(hermes, f"Well.\n{CALL}") as (router, client):
        response = await client.post(CHAT, json=chat(tools=[TOOL]))
    message = message_of(response)
    call_id = message["tool_calls"][0]["id"]
    assert message == {
        "role": "assistant",
        "content": "Well.",
        "tool_calls": [
            {
                "id": call_id, "type": "function",
                "function": {"name": "f", "arguments": '{"x": 1}'},
            }
        ],
    }  # fmt: skip
    assert call_id.startswith("call_")
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert bytes(router.prefill.submitted[0].spec.token_ids) == b"[f ]<user>Hi|>"
    assert router.prefill.submitted[0].spec.sampling.grammar is None


async def test_tool_call_without_text_has_no_content(hermes: Tokenizer) -> None:
    async with open_harness(hermes, CALL) as (_, client):
        assert message_of(await client.post(CHAT, json=chat(tools=[TOOL])))["content"] is None


async def test_tool_calls_are_streamed(hermes: Tokenizer) -> None:
    second = '\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    async with open_harness(hermes, f"Hm\n{CALL}{second}") as (_, client):
        response = await client.post(CHAT, json=chat(tools=[TOOL, OTHER], stream=True))
        again = await client.post(CHAT, json=chat(tools=[TOOL, OTHER]))
    got = deltas(response)
    begun = [d["tool_calls"][0] for d in got if "id" in d.get("tool_calls", [{}])[0]]
    assert got == [
        {"role": "assistant", "content": ""},
        {"content": "H"},
        {"content": "m"},
        {"tool_calls": [begun[0]]},
        *({"tool_calls": [{"index": 0, "function": {"arguments": c}}]} for c in '{"x": 1}'),
        {"tool_calls": [begun[1]]},
        *({"tool_calls": [{"index": 1, "function": {"arguments": c}}]} for c in "{}"),
        {},
    ]
    assert [(call["index"], call["type"], call["function"]) for call in begun] == [
        (0, "function", {"name": "f", "arguments": ""}),
        (1, "function", {"name": "g", "arguments": ""}),
    ]
    assert len({call["id"] for call in begun}) == 2
    assert events(response)[-2]["choices"][0]["finish_reason"] == "tool_calls"
    calls = message_of(again)["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"x": 1}', "{}"]


async def test_call_that_is_cut_off_can_not_be_run(hermes: Tokenizer) -> None:
    cut = f"Hm\n{CALL}"[: f"Hm\n{CALL}".index("1}}") + 2]  # without the brace that ends the object
    async with open_harness(hermes, f"Hm\n{CALL}") as (_, client):
        limits = {"tools": [TOOL], "max_tokens": len(cut)}
        whole = await client.post(CHAT, json=chat(**limits))
        streamed = await client.post(CHAT, json=chat(**limits, stream=True))
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    assert message_of(whole) == {"role": "assistant", "content": "Hm"}
    pieces = [
        d["tool_calls"][0]["function"]["arguments"] for d in deltas(streamed) if "tool_calls" in d
    ]
    assert "".join(pieces) == '{"x": 1'
    assert events(streamed)[-2]["choices"][0]["finish_reason"] == "length"


async def test_unknown_template_is_told(hermes: Tokenizer, tmp_path: Path) -> None:
    unknown = load_tokenizer(tmp_path, "{{ tools }}{{ messages[0].content }}")
    for tokenizer, told in ((hermes, None), (unknown, "json; template unknown")):
        async with open_harness(tokenizer, "Hi") as (_, client):
            answer = await client.post(CHAT, json=chat(tools=[TOOL]))
            assert answer.headers.get("x-baton-tool-format") == told
            plain = await client.post(CHAT, json=chat())
            assert "x-baton-tool-format" not in plain.headers
            [described] = (await client.get("/v1/models")).json()["data"]
        assert described["tool_format"] == ("json" if told else "hermes")
        assert described["reasoning_format"] == "none"


async def test_invalid_tool_call_is_text(hermes: Tokenizer) -> None:
    text = "a <tool_call> b"
    async with open_harness(hermes, text) as (_, client):
        response = await client.post(CHAT, json=chat(tools=[TOOL]))
        plain = await client.post(CHAT, json=chat())
        none = await client.post(CHAT, json=chat(tools=[TOOL], tool_choice="none"))
        streamed = await client.post(CHAT, json=chat(tools=[TOOL], stream=True))
    for each in (response, plain, none):
        assert message_of(each) == {"role": "assistant", "content": text}
        assert each.json()["choices"][0]["finish_reason"] == "stop"
    assert "".join(d.get("content", "") for d in deltas(streamed)) == text


async def test_without_tools_markup_is_text(hermes: Tokenizer) -> None:
    async with open_harness(hermes, CALL) as (router, client):
        assert message_of(await client.post(CHAT, json=chat()))["content"] == CALL
        body = chat(tools=[TOOL], tool_choice="none")
        assert message_of(await client.post(CHAT, json=body))["content"] == CALL
    assert {bytes(job.spec.token_ids) for job in router.prefill.submitted} == {b"<user>Hi|>"}


async def test_parallel_tool_calls_can_be_disabled(hermes: Tokenizer) -> None:
    async with open_harness(hermes, f"{CALL}\n{CALL}") as (router, client):
        body = chat(tools=[TOOL], parallel_tool_calls=False)
        response = await client.post(CHAT, json=body)
        assert router.decode.cancelled == [("chatcmpl-0", 1)]
    assert len(message_of(response)["tool_calls"]) == 1
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


async def test_forced_tool_calls_have_a_grammar(hermes: Tokenizer) -> None:
    async with open_harness(hermes, CALL) as (router, client):
        for choice in ("required", NAMED):
            body = chat(tools=[TOOL, OTHER], tool_choice=choice)
            assert message_of(await client.post(CHAT, json=body))["tool_calls"]
    required, named = (job.spec.sampling.grammar for job in router.prefill.submitted)
    assert required is not None and named is not None
    assert required.kind is named.kind is GrammarKind.LARK
    assert required.text.splitlines()[:2] == [
        r'start: "<tool_call>\n{\"name\": \"" call ("\n<tool_call>\n{\"name\": \"" call)* ',
        "call: call_0 | call_1",
    ]
    assert named.text.splitlines()[:3] == [
        r'start: "<tool_call>\n{\"name\": \"" call ',
        "call: call_0",
        r'call_0: "f\", \"arguments\": " args_0 "}\n</tool_call>"',
    ]
    assert bytes(router.prefill.submitted[1].spec.token_ids) == b"[f ]<user>Hi|>"


async def test_allowed_tools_restrict_prompt_and_grammar(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "x") as (router, client):
        for mode in ("auto", "required"):
            allowed = {"mode": mode, "tools": [NAMED]}
            choice = {"type": "allowed_tools", "allowed_tools": allowed}
            await client.post(CHAT, json=chat(tools=[TOOL, OTHER], tool_choice=choice))
    auto, required = router.prefill.submitted
    assert bytes(auto.spec.token_ids) == bytes(required.spec.token_ids) == b"[f ]<user>Hi|>"
    assert auto.spec.sampling.grammar is None and required.spec.sampling.grammar is not None


@pytest.mark.parametrize("num_answers", [1, 3])
async def test_tool_choice_is_resolved_once_for_all_answers(
    hermes: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_answers: int
) -> None:
    """The choice of a request is resolved once."""
    allowed = {"mode": "auto", "tools": [NAMED] * MAX_TOOLS}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    calls: list[Any] = []

    def resolve(choice: Any, tools: Any) -> Any:
        calls.append(choice)
        return resolve_tool_choice(choice, tools)

    resolve_tool_choice = tool_schema._resolve_tool_choice
    monkeypatch.setattr(tool_schema, "_resolve_tool_choice", resolve)
    async with open_harness(hermes, "x") as (router, client):
        body = chat(tools=[TOOL, OTHER], tool_choice=choice, n=num_answers)
        answer = (await client.post(CHAT, json=body)).json()
    assert [each["message"]["content"] for each in answer["choices"]] == ["x"] * num_answers
    assert calls == [choice]
    assert bytes(router.prefill.submitted[0].spec.token_ids) == b"[f ]<user>Hi|>"


async def test_template_without_tools_rejects_them_unless_forced(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    text = '{"name": "f", "arguments": {"x": 1}}'
    async with open_harness(tokenizer, text) as (_, client):
        refused = await client.post(CHAT, json=chat(tools=[TOOL]))
        forced = await client.post(CHAT, json=chat(tools=[TOOL], tool_choice="required"))
        hidden = await client.post(CHAT, json=chat(tools=[TOOL], tool_choice="none"))
    assert wrong_error(refused)["param"] == "tools"
    assert message_of(forced)["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    assert message_of(hidden)["content"] == text


async def test_special_token_can_begin_a_tool_call(tmp_path: Path) -> None:
    """Special tokens are hidden in the answer, but the parser must see those that begin a tool
    call."""
    tokenizer = load_tokenizer(tmp_path, TEMPLATE + "{# <|python_tag|> #}", "<|python_tag|>")
    async with open_harness(tokenizer) as (router, client):
        tokens = [258, *b'{"name": "f", "parameters": {"x": 2}}', EOS]
        for worker in (router.prefill, router.decode):
            worker._next_token = lambda known, spec: tokens[len(known) - spec.num_prompt_tokens]  # type: ignore
        called = await client.post(CHAT, json=chat(tools=[TOOL]))
        plain = await client.post(CHAT, json=chat())
        shown = await client.post(CHAT, json=chat(skip_special_tokens=False))
    assert message_of(called)["tool_calls"][0]["function"]["arguments"] == '{"x": 2}'
    assert message_of(plain)["content"].startswith('{"name"')
    assert message_of(shown)["content"].startswith('<|python_tag|>{"name"')


async def test_tool_calls_and_results_are_rendered_into_the_prompt(hermes: Tokenizer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]},
    ]
    async with open_harness(hermes, "x") as (router, client):
        await client.post(CHAT, json={"messages": messages})
    prompt = b"<user>Hi|<assistant>!f:1|<tool>ok#c1|>"
    assert bytes(router.prefill.submitted[0].spec.token_ids) == prompt


async def test_tool_call_ids_have_mistrals_form(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, TEMPLATE + "{# [TOOL_CALLS] #}")
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'
    async with open_harness(tokenizer, text) as (_, client):
        message = message_of(await client.post(CHAT, json=chat(tools=[TOOL])))
    assert len(message["tool_calls"][0]["id"]) == 9 and message["tool_calls"][0]["id"].isalnum()


async def test_forced_tool_calls_allow_no_extra_arguments(hermes: Tokenizer) -> None:
    async with open_harness(hermes, CALL) as (router, client):
        message_of(await client.post(CHAT, json=chat(tools=[TOOL], tool_choice="required")))
    grammar = router.prefill.submitted[0].spec.sampling.grammar
    assert grammar is not None and '"additionalProperties": false' in grammar.text


INNER = {"type": "object", "properties": {"y": {}}}
CLOSED = {**INNER, "additionalProperties": False}
OPEN_SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {"properties": {"y": {}}, "additionalProperties": {"type": "string"}},
    {"properties": {"y": {}}, "patternProperties": {"x": {}}},
    {"properties": {"y": {}}, "allOf": [INNER]},
    {"properties": {"y": {}}, "anyOf": [INNER]},
    {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": INNER}},
    {"const": {"properties": {"y": 1}}},
    {"not": INNER},
]


@pytest.mark.parametrize("schema", OPEN_SCHEMAS)
def test_complex_schemas_are_not_closed(schema: dict[str, Any]) -> None:
    assert forbid_extra_properties(schema) == schema


def test_schemas_are_closed_recursively() -> None:
    assert forbid_extra_properties({"properties": {"a": INNER}}) == {
        "properties": {"a": CLOSED}, "additionalProperties": False,
    }  # fmt: skip
    assert forbid_extra_properties({"items": INNER, "prefixItems": [INNER]}) == {
        "items": CLOSED, "prefixItems": [CLOSED],
    }  # fmt: skip
    schema = {"anyOf": [INNER, {"$ref": "#/$defs/A"}], "$defs": {"A": INNER}}
    assert forbid_extra_properties(schema) == {
        "anyOf": [CLOSED, {"$ref": "#/$defs/A"}], "$defs": {"A": CLOSED},
    }  # fmt: skip
