"""Tests that errors about schemas name the tool and the part of the schema, in all APIs, and quote
no grammar."""

import json
from typing import Any

import pytest

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid
from baton.text.grammar.compilation import validate_grammar
from baton.text.grammar.schema_fault import find_fault
from baton.text.tokenizer import Tokenizer
from tests.router_harness import CHAT, RESPOND, USER, chat, open_harness, wrong_error
from tests.unit import small_chats

hermes = small_chats.hermes
thinker = small_chats.thinker
room_for_calls = small_chats.room_for_calls

LOOKAHEAD = {"type": "string", "pattern": "(?=a)b"}
UNKNOWN_TYPE = {"type": "integr"}


def complain(schema: Any) -> str:
    try:
        validate_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    except Invalid as error:
        return str(error)
    return ""


def properties(**schemas: Any) -> dict[str, Any]:
    return {"type": "object", "properties": schemas}


FAULTS: list[tuple[dict[str, Any], str]] = [
    (UNKNOWN_TYPE, "type"),
    (properties(city=LOOKAHEAD), "properties.city.pattern"),
    (properties(city={"type": "array", "uniqueItems": True}), "properties.city.uniqueItems"),
    (properties(first=LOOKAHEAD, second=LOOKAHEAD), "properties.first.pattern"),
    (properties(first={"type": "string"}, second=UNKNOWN_TYPE), "properties.second.type"),
    (properties(**{"a b": {"anyOf": [{"type": "null"}, {"type": "array", "items": LOOKAHEAD}]}}),
     'properties["a b"].anyOf[1].items.pattern'),
    (properties(x={"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}),
     "properties.x.oneOf"),
    (properties(x={"$ref": "#/$defs/missing"}), "properties.x.$ref"),
    ({**properties(x={"$ref": "#/$defs/d"}), "$defs": {"d": properties(y=LOOKAHEAD), "e": {}}},
     "$defs.d.properties.y.pattern"),
    ({**properties(x={"type": "integer", "minimum": 5, "maximum": 3}), "required": ["x"]}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "path"), FAULTS)
def test_path_of_a_fault(schema: dict[str, Any], path: str) -> None:
    before = json.dumps(schema)
    assert find_fault(schema, complain, lambda: True) == path
    assert json.dumps(schema) == before


def test_many_properties_take_few_variants() -> None:
    schemas = {f"p{number}": {"type": "string"} for number in range(1000)}
    schemas["p700"] = LOOKAHEAD
    num_variants = 0

    def count(schema: Any) -> str:
        nonlocal num_variants
        num_variants += 1
        return complain(schema)

    assert find_fault(properties(**schemas), count, lambda: True) == "properties.p700.pattern"
    assert num_variants < 50


def test_path_ends_early_when_time_is_up() -> None:
    answers = iter([True] * 4)
    path = find_fault(properties(city=LOOKAHEAD), complain, lambda: next(answers, False))
    assert path == "properties.city"


# -- the errors of requests -----------------------------------------------------------------------

NOT_SUPPORTED = "look-around, including look-ahead and look-behind, is not supported"
FAULT = f"properties.city.pattern: {NOT_SUPPORTED}"
BAD = properties(city=LOOKAHEAD)
GOOD = properties(city={"type": "string"})
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": BAD}}


def function(name: str, schema: Any, **fields: Any) -> dict[str, Any]:
    return {
        "type": "function", "function": {"name": name, "parameters": schema, **fields},
    }  # fmt: skip


CHAT_TOOLS = [function("now", GOOD), function("other", GOOD), function("weather", BAD)]
STRICT_TOOLS = [function("loose", BAD), function("weather", BAD, strict=True)]
RESPONSE_TOOLS = [
    {"type": "web_search"},
    {"type": "function", "name": "now"},
    {
        "type": "namespace",
        "name": "messages",
        "tools": [{"type": "function", "name": "weather", "parameters": BAD}],
    },
]
RESPONSE_FORMAT = {"format": {"type": "json_schema", "name": "n", "schema": BAD}}

REQUESTS: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, chat(tools=CHAT_TOOLS, tool_choice="required"),
     "tools[2].function.parameters", " (weather)"),
    (CHAT, chat(tools=STRICT_TOOLS), "tools[1].function.parameters", " (weather)"),
    (CHAT, chat(response_format=FORMAT), "response_format", ""),
    ("/v1/completions", {"prompt": "x", "guided_json": BAD}, "guided_json", ""),
    (RESPOND, {"input": "Hi", "tools": RESPONSE_TOOLS, "tool_choice": "required"},
     "tools[2].tools[0].parameters", " (messages__weather)"),
    (RESPOND, {"input": "Hi", "text": RESPONSE_FORMAT}, "text.format", ""),
]  # fmt: skip


@pytest.mark.parametrize("model", ["hermes", "thinker"])
@pytest.mark.parametrize(("path", "body", "param", "name"), REQUESTS)
async def test_error_names_the_tool_and_the_part(
    request: pytest.FixtureRequest,
    model: str,
    path: str,
    body: dict[str, Any],
    param: str,
    name: str,
) -> None:
    """A reasoning model's grammar is a larger one, in which the schema is a part."""
    async with open_harness(request.getfixturevalue(model), "x") as (_, client):
        error = wrong_error(await client.post(path, json=body))
    assert error["message"] == f"{param}{name}: {FAULT}"
    assert error["param"] == param


async def test_anthropics_error_names_the_tool_and_the_part(hermes: Tokenizer) -> None:
    tools = [{"name": "now", "input_schema": GOOD}, {"name": "weather", "input_schema": BAD}]
    body = {"messages": USER, "max_tokens": 4, "tools": tools, "tool_choice": {"type": "any"}}
    async with open_harness(hermes, "x") as (_, client):
        answer = await client.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"tools.1.input_schema (weather): {FAULT}"


@pytest.mark.parametrize("tool_parser", ["hermes", "llama3", "mistral", "pythonic", "none"])
async def test_no_format_of_calls_quotes_a_grammar(hermes: Tokenizer, tool_parser: str) -> None:
    body = chat(tools=CHAT_TOOLS, tool_choice="required")
    async with open_harness(hermes, "x", tool_parser=tool_parser) as (_, client):
        error = wrong_error(await client.post(CHAT, json=body))
    assert error["message"] == f"tools[2].function.parameters (weather): {FAULT}"


async def test_property_that_is_named_like_a_field_keeps_its_name(hermes: Tokenizer) -> None:
    tool = {"type": "function", "name": "f", "parameters": properties(messages=LOOKAHEAD)}
    body = {"input": "Hi", "tools": [tool], "tool_choice": "required"}
    async with open_harness(hermes, "x") as (_, client):
        error = wrong_error(await client.post(RESPOND, json=body))
    assert error["message"] == (
        f"tools[0].parameters (f): properties.messages.pattern: {NOT_SUPPORTED}"
    )
