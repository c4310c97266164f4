"""What clients say of an answer's format: what reaches the workers, and what is refused."""

import asyncio
from typing import Any

import pytest

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid
from baton.text.grammar import check
from baton.text.tokenizer import Tokenizer
from router.formats import Formats, after_thought
from router.problem import Problem
from tests.unit.test_router_http import CHAT, USER, open_house, tokenizer, wrong_error

__all__ = ["tokenizer"]

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ä", None]}}}
AS_TEXT = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ä", null]}}}'
OBJECT = Grammar(GrammarKind.JSON_OBJECT)
SHAPED = Grammar(GrammarKind.JSON_SCHEMA, AS_TEXT)
COMPLETION = "/v1/completions"


def named(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


GOOD: list[tuple[dict[str, Any], Grammar | None]] = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    ({"response_format": named(SCHEMA, strict=True, description="d")}, SHAPED),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, OBJECT),
    ({"guided_json": SCHEMA}, SHAPED),
    ({"guided_json": AS_TEXT}, SHAPED),
    ({"guided_regex": r"\d+"}, Grammar(GrammarKind.REGEX, r"\d+")),
    ({"guided_choice": ["a", "b"]}, Grammar(GrammarKind.CHOICE, '["a", "b"]')),
    ({"guided_grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, SHAPED),
    ({"structured_outputs": {"regex": "a"}}, Grammar(GrammarKind.REGEX, "a")),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar(GrammarKind.CHOICE, '["a"]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(GrammarKind.LARK, 'start: "a"')),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, Grammar(GrammarKind.REGEX, "a")),
]

BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "regex", "regex": "a"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": named(SCHEMA, name="a b")}, "response_format.json_schema.name"),
    ({"response_format": named(SCHEMA, extra=1)}, "response_format.json_schema.extra"),
    ({"response_format": named([])}, "response_format.json_schema.schema"),
    ({"response_format": named({"type": "integr"})}, "response_format"),
    ({"response_format": named({"type": "array", "uniqueItems": True})}, "response_format"),
    ({"response_format": named({"x-guidance": {}})}, "response_format"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "3"}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "a\\"}, "guided_regex"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice[0]"),
    ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
    ({"guided_grammar": 'start: "a"\n%llguidance {}'}, "guided_grammar"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(("fields", "grammar"), GOOD)
async def test_the_grammar_reaches_both_workers(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    async with open_house(tokenizer) as (house, client):
        asked = {"messages": USER} if path == CHAT else {"prompt": "x"}
        response = await client.post(path, json={**asked, **fields})
        assert response.status_code == 200, response.text
    for worker in (house.prefill, house.decode):
        assert [job.spec.sampling.grammar for job in worker.submitted] == [grammar]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_formats_that_nothing_can_follow(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    async with open_house(tokenizer) as (house, client):
        error = wrong_error(await client.post(COMPLETION, json={"prompt": "x", **fields}))
        assert error["param"] == param
        assert house.decode.submitted == []


async def test_a_call_that_is_forced_has_its_own_form(tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": USER, "tools": [tool], "tool_choice": "required", "guided_regex": "a"}
    async with open_house(tokenizer) as (_, client):
        assert wrong_error(await client.post(CHAT, json=body))["param"] == "guided_regex"


async def test_a_grammar_is_compiled_once_and_few_at_once() -> None:
    compiled: list[str] = []

    def check(grammar: Grammar) -> None:
        compiled.append(grammar.text)
        if grammar.text == "bad":
            raise Invalid("no")

    formats = Formats(check)
    good, bad = (Grammar(GrammarKind.REGEX, text) for text in ("good", "bad"))
    for _ in range(3):
        await formats.admit(good, "guided_regex")
        with pytest.raises(Problem, match="guided_regex: no"):
            await formats.admit(bad, "guided_regex")
    await formats.admit(None)
    assert compiled == ["good", "bad"]


async def test_the_same_grammar_from_many_at_once() -> None:
    formats = Formats()
    await asyncio.gather(*(formats.admit(OBJECT) for _ in range(20)))


@pytest.mark.parametrize("in_thought", [True, False])
def test_a_thought_may_come_first(in_thought: bool) -> None:
    for grammar in (OBJECT, SHAPED, Grammar(GrammarKind.CHOICE, '["a"]')):
        wrapped = after_thought(grammar, "guided_json", in_thought=in_thought)
        assert wrapped.kind is GrammarKind.LARK
        check(wrapped)
    own = Grammar(GrammarKind.LARK, 'start: "a"')
    assert after_thought(own, "guided_grammar", in_thought=in_thought) == own
    with pytest.raises(Problem) as refusal:
        after_thought(Grammar(GrammarKind.REGEX, ""), "guided_regex", in_thought=in_thought)
    assert refusal.value.param == "guided_regex"
