"""Tests structured output over HTTP: the grammars that reach the workers, and rejected formats."""

import asyncio
from typing import Any

import pytest

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid
from baton.text.grammar.compilation import validate_grammar
from baton.text.grammar.limits import MAX_GRAMMAR_BYTES
from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.openai.schema.completion import CompletionBody
from router.serving.grammar_validator import GrammarValidator, grammar_rule_for
from router.serving.parsers.model_output_format import ModelOutputFormat
from router.serving.parsers.reasoning_formats import REASONING_FORMATS
from router.serving.preprocessor import ModelLimits, Preprocessor
from tests.router_harness import CHAT, USER, eventually, open_harness, tokenizer, wrong_error

__all__ = ["tokenizer"]

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ä", None]}}}
AS_TEXT = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ä", null]}}}'
OBJECT = Grammar(GrammarKind.JSON_OBJECT)
SHAPED = Grammar(GrammarKind.JSON_SCHEMA, AS_TEXT)
COMPLETION = "/v1/completions"


def named(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


VALID_FORMATS: list[tuple[dict[str, Any], Grammar | None]] = [
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

INVALID_FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "regex", "regex": "a"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": named(SCHEMA, name="a b")}, "response_format.json_schema.name"),
    ({"response_format": named(SCHEMA, shema=1)}, "response_format.json_schema.shema"),
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
@pytest.mark.parametrize(("fields", "grammar"), VALID_FORMATS)
async def test_grammar_reaches_both_workers(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    async with open_harness(tokenizer) as (router, client):
        body = {"messages": USER} if path == CHAT else {"prompt": "x"}
        response = await client.post(path, json={**body, **fields})
        assert response.status_code == 200, response.text
    for worker in (router.prefill, router.decode):
        assert [job.spec.sampling.grammar for job in worker.submitted] == [grammar]


@pytest.mark.parametrize(("fields", "param"), INVALID_FORMATS)
async def test_invalid_formats_are_rejected(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    async with open_harness(tokenizer) as (router, client):
        error = wrong_error(await client.post(COMPLETION, json={"prompt": "x", **fields}))
        assert error["param"] == param
        assert router.decode.submitted == []


LARGE_FORMATS: list[dict[str, Any]] = [
    {"guided_json": {"description": "a" * MAX_GRAMMAR_BYTES}},
    {"guided_choice": ["a" * MAX_GRAMMAR_BYTES]},
    {"response_format": named({"description": "é" * (MAX_GRAMMAR_BYTES // 2)})},
    {"structured_outputs": {"grammar": "a" * (MAX_GRAMMAR_BYTES + 1)}},
]


@pytest.mark.parametrize("fields", LARGE_FORMATS)
def test_a_large_grammar_is_refused_before_a_prompt_is_prepared(fields: dict[str, Any]) -> None:
    [field] = fields
    with pytest.raises(ApiError) as error:
        CompletionBody.model_validate({"prompt": ["a"] * 1024, **fields})
    assert f"{field}: a grammar may have at most 65536 bytes" in str(error.value)


def test_all_prompts_of_a_request_share_their_sampling_parameters(tokenizer: Tokenizer) -> None:
    body = CompletionBody.model_validate(
        {"prompt": ["a", "bc", "d"], "guided_json": {"type": "object"}, "seed": 1}
    )
    preprocessor = Preprocessor(tokenizer, ModelOutputFormat(), ModelLimits(64, 259), None, 7)
    first, *others = preprocessor.prepare(body.request())
    assert first.sampling.grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    assert len(others) == 2
    assert all(each.sampling is first.sampling for each in others)


async def test_forced_tool_call_excludes_another_grammar(tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": USER, "tools": [tool], "tool_choice": "required", "guided_regex": "a"}
    async with open_harness(tokenizer) as (_, client):
        assert wrong_error(await client.post(CHAT, json=body))["param"] == "guided_regex"


class FakeChecker:
    """A grammar checker that waits for ``may_continue``, and then refuses only the grammar
    ``bad``."""

    def __init__(self, *, may_continue: bool = True) -> None:
        self.checks: list[tuple[str, str]] = []
        self.may_continue = asyncio.Event()
        if may_continue:
            self.may_continue.set()

    async def __call__(self, grammar: Grammar, tenant: str) -> None:
        self.checks.append((grammar.text, tenant))
        await self.may_continue.wait()
        if grammar.text == "bad":
            raise Invalid("no")


GOOD_REGEX, BAD_REGEX = (Grammar(GrammarKind.REGEX, text) for text in ("good", "bad"))


async def test_grammar_is_checked_once() -> None:
    checked = FakeChecker()
    formats = GrammarValidator(checked)
    for _ in range(3):
        await formats.check(GOOD_REGEX, "guided_regex")
        with pytest.raises(ApiError, match="guided_regex: no"):
            await formats.check(BAD_REGEX, "guided_regex")
    await formats.check(None)
    assert checked.checks == [("good", ""), ("bad", "")]


async def test_check_results_are_kept_per_tenant() -> None:
    """If results were shared, response times would show whether another tenant has used the same
    grammar."""
    checked = FakeChecker()
    formats = GrammarValidator(checked)
    for tenant in ("alice", "bob", "alice"):
        await formats.check(GOOD_REGEX, "guided_regex", tenant)
    assert checked.checks == [("good", "alice"), ("good", "bob")]


async def test_concurrent_requests_share_one_check() -> None:
    """Requests that arrive during a check wait for it and get the same result."""
    checked = FakeChecker(may_continue=False)
    formats = GrammarValidator(checked)
    checks = [asyncio.create_task(formats.check(BAD_REGEX, "guided_regex")) for _ in range(20)]
    await eventually(lambda: bool(checked.checks))
    checked.may_continue.set()
    results = await asyncio.gather(*checks, return_exceptions=True)
    assert [str(each) for each in results] == ["guided_regex: no"] * 20
    assert len(checked.checks) == 1 and not formats._pending_checks


async def test_cancelled_check_is_repeated_by_a_waiting_request() -> None:
    """If the request that started a check is cancelled, a request that waits for the same result
    starts a new check."""
    checked = FakeChecker(may_continue=False)
    formats = GrammarValidator(checked)
    first, second = (asyncio.create_task(formats.check(GOOD_REGEX)) for _ in range(2))
    await eventually(lambda: bool(checked.checks))
    first.cancel()
    await eventually(lambda: len(checked.checks) == 2)
    checked.may_continue.set()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first


@pytest.mark.parametrize("in_thought", [True, False])
def test_grammar_may_follow_reasoning(in_thought: bool) -> None:
    dialect = ModelOutputFormat(reasoning=REASONING_FORMATS[-1])
    for grammar in (OBJECT, SHAPED, Grammar(GrammarKind.CHOICE, '["a"]')):
        rule = grammar_rule_for(grammar, "guided_json")
        assert rule is not None
        wrapped = dialect.answer_grammar(rule, in_reasoning=in_thought)
        assert wrapped.kind is GrammarKind.LARK
        validate_grammar(wrapped)
    assert grammar_rule_for(Grammar(GrammarKind.LARK, 'start: "a"'), "guided_grammar") is None
    with pytest.raises(ApiError) as refusal:
        grammar_rule_for(Grammar(GrammarKind.REGEX, ""), "guided_regex")
    assert refusal.value.param == "guided_regex"
