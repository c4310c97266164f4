"""Tests the limits of tools and of what earlier turns of a chat have."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from baton.text.grammar.limits import MAX_GRAMMAR_BYTES
from baton.text.tokenizer import Tokenizer
from router.serving.schema.tool import MAX_TOOLS
from tests.router_harness import CHAT, RESPOND, USER, chat, open_harness, wrong_error
from tests.unit import small_chats
from tests.unit.small_chats import NAMED, TOOL, load_tokenizer, message_of

room_for_calls = small_chats.room_for_calls
hermes = small_chats.hermes

GRAMMAR_TOO_LARGE = {
    "message": "tools: a grammar may have at most 65536 bytes",
    "type": "invalid_request_error",
    "param": "tools",
    "code": "invalid_value",
}


@pytest.mark.parametrize("tool_parser", ["hermes", "llama3", "mistral", "pythonic", "none"])
async def test_grammars_of_tools_have_a_largest_size(hermes: Tokenizer, tool_parser: str) -> None:
    async with open_harness(hermes, "x", tool_parser=tool_parser) as (router, client):

        async def send(description: str) -> httpx.Response:
            schema = {"type": "object", "properties": {"x": {"description": description}}}
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            return await client.post(CHAT, json=chat(tools=[tool], tool_choice=NAMED))

        await send("")
        [empty] = [job.spec.sampling.grammar for job in router.prefill.submitted]
        assert empty is not None
        longest = MAX_GRAMMAR_BYTES - len(empty.text)
        message_of(await send("a" * longest))
        largest = router.prefill.submitted[1].spec.sampling.grammar
        assert largest is not None and len(largest.text) == MAX_GRAMMAR_BYTES
        refused = await send("a" * (longest + 1))
        assert len(router.model.text.grammar_validator._verdicts) == 2, "a large one was hashed"
    assert wrong_error(refused) == GRAMMAR_TOO_LARGE


@pytest.mark.parametrize("strict", [False, True])
async def test_definitions_are_not_repeated_beyond_the_largest_grammar(
    hermes: Tokenizer, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """The format with keyword arguments repeats the schema's definitions in each argument's rule:
    here, 1,000 times 20 KB."""
    dumped: list[int] = []

    def dumps(value: Any, **options: Any) -> str:
        text = json.dumps(value, **options)
        dumped.append(len(text))
        return text

    counting = SimpleNamespace(dumps=dumps)
    monkeypatch.setattr("router.serving.parsers.writing.json", counting)
    schema = {
        "type": "object",
        "properties": {f"p{number}": {"$ref": "#/$defs/d"} for number in range(1000)},
        "$defs": {"d": {"description": "a" * 20_000}},
    }
    function = {"name": "f", "parameters": schema, "strict": strict}
    body = chat(tools=[{"type": "function", "function": function}])
    if not strict:
        body["tool_choice"] = "required"
    async with open_harness(hermes, "x", tool_parser="pythonic") as (_, client):
        refused = await client.post(CHAT, json=body)
    assert wrong_error(refused) == GRAMMAR_TOO_LARGE
    assert [size for size in dumped if size > 20_000] == [20_151] * 4


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"properties": [1]}, "`properties` of a function's parameters must be an object"),
        ({"required": 1}, "`required` of a function's parameters must be a list of names"),
        ({"required": [[]]}, "`required` of a function's parameters must be a list of names"),
    ],
)
async def test_malformed_parameters_are_refused_by_keyword_calls(
    hermes: Tokenizer, schema: dict[str, Any], wrong: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    async with open_harness(hermes, "x", tool_parser="pythonic") as (_, client):
        error = wrong_error(await client.post(CHAT, json=chat(tools=[tool], tool_choice=NAMED)))
    assert (error["message"], error["param"]) == (f"tools: {wrong}", "tools")


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, lambda schema: chat(tools=[function_tool(schema)]), "tools[0]"),
        ("/tokenize", lambda schema: chat(tools=[function_tool(schema)]), "tools[0]"),
        (
            RESPOND,
            lambda schema: {
                "input": "Hi", "store": False,
                "tools": [{"type": "function", "name": "f", "parameters": schema}],
            },
            "tools[0]",
        ),
        (
            "/v1/messages",
            lambda schema: {
                "messages": USER, "max_tokens": 4, "tools": [{"name": "f", "input_schema": schema}],
            },
            "tools.0",
        ),
    ],
)  # fmt: skip
async def test_nesting_of_parameters_is_limited(
    hermes: Tokenizer, path: str, body: Callable[[Any], Any], field: str
) -> None:
    async with open_harness(hermes, "x") as (_, client):
        deepest = await client.post(path, json=body({"type": "object", **nested(32)}))
        refused = await client.post(path, json=body({"type": "object", **nested(33)}))
    assert deepest.status_code == 200, deepest.text
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["message"] == f"{field}: a tool's parameters may be nested at most 32 levels deep"
    assert error.get("param", field) == field  # Anthropic's errors have no param


def function_tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.mark.parametrize("convert", [dict, json.dumps])
@pytest.mark.parametrize("key", ["arguments", "more"])
async def test_nesting_of_earlier_calls_is_limited(
    hermes: Tokenizer, convert: Callable[[Any], Any], key: str
) -> None:
    """A function's unknown fields are given to the template, too; text in them is not parsed."""

    def body(levels: int) -> dict[str, Any]:
        function = {"name": "f", "arguments": "{}", key: convert(nested(levels))}
        call = {"id": "c1", "type": "function", "function": function}
        return {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]}

    async with open_harness(hermes, "x") as (_, client):
        message_of(await client.post(CHAT, json=body(32)))
        response = await client.post(CHAT, json=body(33))
    if (key, convert) == ("more", json.dumps):
        message_of(response)
        return
    assert wrong_error(response) == {
        "message": "messages: the arguments of a tool call may be nested at most 32 levels deep",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "invalid_value",
    }


async def test_text_of_a_chat_is_limited(tmp_path: Path) -> None:
    """A template may repeat the tools: here, once for each message."""
    source = "{% for m in messages %}{{ tools | tojson }}{% endfor %}"
    tokenizer = load_tokenizer(tmp_path, source)
    size = len('[{"type": "function", "function": {"name": "f", "description": ""}}]')
    description = "a" * (20_000 - size)
    tool = {"type": "function", "function": {"name": "f", "description": description}}
    limit = 16 * (262_144 + 2 * 512)
    messages = USER * (limit // 20_000 + 1)
    async with open_harness(tokenizer, "x") as (_, client):
        context = "This model's maximum context length is 512 tokens. However, "
        for path, beginning in ((CHAT, context), ("/tokenize", "")):
            body = {"messages": messages, "tools": [tool]}
            error = wrong_error(await client.post(path, json=body))
            assert error["message"] == beginning + (
                f"the chat template makes a text of more than {limit} characters from the messages "
                "and tools, the limit of one request; send fewer or shorter ones"
            )
            assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_allowed_tools_are_limited(hermes: Tokenizer) -> None:
    async with open_harness(hermes, "x") as (_, client):
        allowed: dict[str, Any] = {"mode": "auto", "tools": [NAMED] * (MAX_TOOLS + 1)}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        body = chat(tools=[TOOL], tool_choice=choice)
        error = wrong_error(await client.post(CHAT, json=body))
        assert error["param"] == "tool_choice"
        assert error["message"] == "tool_choice: allowed_tools may have at most 128 tools"
        allowed["tools"].pop()
        assert message_of(await client.post(CHAT, json=body))["content"] == "x"
