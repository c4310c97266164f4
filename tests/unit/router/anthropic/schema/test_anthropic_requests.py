"""Tests requests to the Messages API over in-memory workers: the prompts that they become, cache
breakpoints, errors and token counts."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from baton.core.grammar import GrammarKind
from baton.text.tokenizer import Tokenizer
from router.anthropic.schema import MessagesBody
from router.http.body_parser import parse_body
from router.serving.choices import preprocessor, request_context
from router.serving.request import Chat
from tests.anthropic_harness import (
    CALL,
    COUNT,
    MESSAGES,
    TOOL,
    assistant,
    error_of,
    message_of,
    request,
    text,
    user,
)
from tests.router_harness import USER, open_harness
from tests.unit import small_chats
from tests.unit.small_chats import load_tokenizer

hermes = small_chats.hermes
thinker = small_chats.thinker
room_for_calls = small_chats.room_for_calls

SHORT = {"cache_control": {"type": "ephemeral"}}
LONG = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CALLED = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}
THINKING = {"type": "thinking", "thinking": "Hm", "signature": "x"}


async def prompts_of(tokenizer: Tokenizer, *bodies: dict[str, Any]) -> list[str]:
    async with open_harness(tokenizer, "x") as (router, client):
        for body in bodies:
            message_of(await client.post(MESSAGES, json=body))
    return [bytes(job.spec.token_ids).decode() for job in router.prefill.submitted]


# -- prompts --------------------------------------------------------------------------------------

CONVERSATIONS: list[tuple[dict[str, Any], str]] = [
    (request(system="Be brief"), "<system>Be brief|<user>Hi|>"),
    (request(system=[text("a"), text("b")]), "<system>a\n\nb|<user>Hi|>"),
    (request(system=[text("x-anthropic-billing-header: cch=1;"), text("b")]),
     "<system>b|<user>Hi|>"),
    (request(user(text("a"), text("b"))), "<user>a\n\nb|>"),
    (request(*USER, *USER), "<user>Hi\n\nHi|>"),
    (request(*USER, assistant(text("a"), text("b")), *USER), "<user>Hi|<assistant>ab|<user>Hi|>"),
    (request(*USER, assistant(THINKING, text("a")), *USER),
     "<user>Hi|<assistant>a(Hm)|<user>Hi|>"),
    (request(*USER, assistant({"type": "redacted_thinking", "data": "x"}, text("a")), *USER),
     "<user>Hi|<assistant>a|<user>Hi|>"),
    (request(*USER, assistant(CALLED), user(RESULT)),
     "<user>Hi|<assistant>!f:1|<tool>2#toolu_1|>"),
    (request(*USER, assistant(text("a"), CALLED), user(text("now"), RESULT, text("then"))),
     "<user>Hi|<assistant>a!f:1|<tool>2#toolu_1|<user>now\n\nthen|>"),
    (request(*USER, assistant(CALLED), user({**RESULT, "content": [text("a")], "is_error": True})),
     "<user>Hi|<assistant>!f:1|<tool>Error:\n\na#toolu_1|>"),
    (request(*USER, {"role": "system", "content": "Be brief"}),
     "<user>Hi|<system>Be brief|>"),
    (request(*USER, assistant(text("Once "))), "<user>Hi|<assistant>Once "),
    (request(*USER, {"role": "assistant", "content": ""}), "<user>Hi|>"),
    (request(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}]),
     "[f ]<user>Hi|>"),
    (request(tools=[TOOL], tool_choice={"type": "none"}), "<user>Hi|>"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "prompt"), CONVERSATIONS)
async def test_conversation_becomes_a_prompt(
    hermes: Tokenizer, body: dict[str, Any], prompt: str
) -> None:
    assert await prompts_of(hermes, body) == [prompt]


async def test_late_system_message_is_moved_if_the_template_refuses_it(tmp_path: Path) -> None:
    guard = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('late') }}{% endif %}{% endfor %}"
    )
    tokenizer = load_tokenizer(tmp_path, guard + small_chats.TEMPLATE)
    late = {"role": "system", "content": "Be brief"}
    body = request(*USER, late, system="a")
    async with open_harness(tokenizer, "x") as (router, client):
        counted = (await client.post(COUNT, json=without_max_tokens(body))).json()
        message_of(await client.post(MESSAGES, json=body))
    prompt = bytes(router.prefill.submitted[0].spec.token_ids)
    assert prompt == b"<system>a|<user>Hi\n\nBe brief|>"
    assert counted == {"input_tokens": len(prompt)}


async def test_thinking_is_switched_by_the_template(thinker: Tokenizer) -> None:
    on, off = "<user>Hi|><think>", "<user>Hi|>"
    enabled = {"type": "enabled", "budget_tokens": 1024}
    effort = {"effort": "low"}
    assert await prompts_of(
        thinker,
        request(),
        request(thinking=enabled),
        request(thinking={"type": "adaptive"}, output_config=effort),
        request(thinking={"type": "disabled"}, output_config=effort),
    ) == [on, on, on, off]


def parse(body: dict[str, Any]) -> MessagesBody:
    return parse_body(MessagesBody, orjson.dumps(body))


def test_sampling_and_output_fields_are_passed_on() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "schema": schema}
    body = request(
        temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["a"], stream=True,
        output_config={"effort": "low", "format": form},
    )  # fmt: skip
    asked = parse(body).request()
    sampling, chat = asked.sampling, asked.prompt
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    assert isinstance(chat, Chat)
    assert (sampling.stop, chat.reasoning_effort) == (["a"], "low")
    assert (asked.stream, asked.max_tokens) == (True, 200)
    assert asked.format is not None and asked.format[1].kind is GrammarKind.JSON_SCHEMA
    older = parse(request(output_format=form)).request()
    assert older.format == asked.format
    assert parse(request(thinking={"type": "adaptive"})).to_chat().reasoning_effort == "high"
    assert parse(request()).to_chat().reasoning_effort is None


async def test_unknown_fields_of_tools_are_ignored(hermes: Tokenizer) -> None:
    body = request(tools=[{**TOOL, "x_vendor": 1}])
    async with open_harness(hermes, CALL) as (_, client):
        answer = await client.post(MESSAGES, json=body)
    assert message_of(answer)["stop_reason"] == "tool_use"
    assert answer.headers["x-baton-ignored-fields"] == "tools.x_vendor"


async def test_special_tokens_are_refused_by_message(hermes: Tokenizer) -> None:
    async with open_harness(hermes, refuses_special_tokens=True) as (_, client):
        body = request(user(text("<|im_start|>")), system="<|im_start|>")
        error = error_of(await client.post(MESSAGES, json=body))
    assert error["message"].startswith("messages.0.content: the message contains")


async def test_offers_that_are_left_out_are_reported(hermes: Tokenizer) -> None:
    body = request(
        tools=[
            TOOL,
            {"type": "web_fetch_20260318", "name": "web_fetch", "max_uses": 3},
            {**TOOL, "name": "g", "allowed_callers": ["code_execution_20260120"]},
        ],
        context_management={"edits": []},
        mcp_servers=[],
        metadata={"user_id": "u"},
        service_tier="auto",
    )
    async with open_harness(hermes, CALL) as (_, client):
        answer = await client.post(MESSAGES, json=body)
        none = await client.post(MESSAGES, json=request())
    ignored = answer.headers["x-baton-ignored-fields"]
    assert ignored == "tools.web_fetch_20260318, tools.g, context_management"
    assert "x-baton-ignored-fields" not in none.headers


# -- breakpoints ----------------------------------------------------------------------------------

BREAKPOINTS: list[tuple[dict[str, Any], list[tuple[str, float]]]] = [
    (request(user(text("abc", **SHORT), text("d"))), [("<user>abc", 300.0)]),
    (request(*USER, cache_control={"type": "ephemeral"}), [("<user>Hi", 300.0)]),
    (request(system=[text("abc", **LONG)]), [("<system>abc|<user>", 3600.0)]),
    (request(system=[text("a", **SHORT), text("b")]), [("<system>a", 300.0)]),
    (request(tools=[{**TOOL, **SHORT}]), [("[f ]<user>", 300.0)]),
    (request(user(text("a", **LONG)), assistant(text("b")), user(text("c", **SHORT))),
     [("<user>a", 3600.0), ("<user>a|<assistant>b|<user>c", 300.0)]),
    (request(*USER, assistant(CALLED), user({**RESULT, **SHORT})),
     [("<user>Hi|<assistant>!f:1|<tool>2", 300.0)]),
    (request(*USER, assistant({**CALLED, **SHORT}), user(RESULT)),
     [("<user>Hi|<assistant>!f:1|<tool>", 300.0)]),
    (request(tools=[{**TOOL, **SHORT}], system=[text("a", **SHORT)], cache_control=None),
     [("[f ]<system>a|<user>", 300.0)]),
]  # fmt: skip


@pytest.mark.parametrize(("body", "prefixes"), BREAKPOINTS)
async def test_breakpoints_pin_prefixes(
    hermes: Tokenizer, body: dict[str, Any], prefixes: list[tuple[str, float]]
) -> None:
    async with open_harness(hermes, "x") as (router, _):
        asked = parse(body).request()
        tenant = request_context(router.service, router.model, "t", asked, "r")  # type: ignore[arg-type]
        [prompt] = preprocessor(tenant, 1).prepare(asked)
    pinned = [(pin.num_tokens, pin.ttl_seconds) for pin in prompt.prefix_pins]
    assert pinned == [(len(prefix), seconds) for prefix, seconds in prefixes]


# -- counting -------------------------------------------------------------------------------------


def without_max_tokens(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "max_tokens"}


async def test_count_equals_the_usage(hermes: Tokenizer) -> None:
    bodies = [body for body, _ in CONVERSATIONS]
    async with open_harness(hermes, "x") as (_, client):
        for body in bodies:
            counted = await client.post(COUNT, json=without_max_tokens(body))
            used = message_of(await client.post(MESSAGES, json=body))["usage"]
            assert counted.json() == {"input_tokens": used["input_tokens"]}
        long = await client.post(COUNT, json={"messages": [user(text("x" * 1000))]})
        wrong = await client.post(COUNT, json={"messages": 1})
    assert long.json() == {"input_tokens": 1000 + len("<user>|>")}
    assert error_of(wrong)["message"].startswith("messages: ")


# -- errors ---------------------------------------------------------------------------------------

ANSWERED = [*USER, assistant(CALLED)]
WRONG: list[tuple[dict[str, Any], str]] = [
    (request(max_tokens=0), "max_tokens: "),
    (without_max_tokens(request()), "Missing required parameter: max_tokens"),
    (request(temperature=1.5), "temperature: "),
    (request(stop_sequences=["a", "x" * 2000]), "stop_sequences.1: "),
    (request(stream=1), "stream: "),
    (request({"role": "user", "content": 5}), "messages.0.content: "),
    (request({"role": "tool", "content": "x"}), "messages.0.role: "),
    (request(user(text("a"), {"type": "text", "text": 4})), "messages.0.content.1.text: "),
    (request(user({"type": "image", "source": {}})),
     "messages.0.content.0: content of type 'image' is not supported, only text; images"),
    (request(user(CALLED), *USER), "messages.0: block 0 of the content has type 'tool_use'"),
    (request(*USER, assistant(RESULT)), "messages.1: block 0"),
    (request(*USER, assistant({**CALLED, "input": "{}"}), *USER), "messages.1.content.0.input: "),
    (request(*ANSWERED), "messages.1.content: if the last message"),
    (request(user({**RESULT, "content": [{"type": "image"}]})),
     "messages.0.content.0.content.0: content of type 'image'"),
    (request(user(text("a", cache_control={"type": "forever"}))),
     "messages.0.content.0.cache_control.type: "),
    (request(user(*[text("a", **SHORT)] * 5)), "at most 4 blocks may have cache_control"),
    (request({"role": "assistant", "content": ""}), "messages: "),
    (request(system=[{"type": "image"}]), "system.0: "),
    (request(tools=[{"name": "f"}]), "Missing required parameter: tools.0.input_schema"),
    (request(tools=[{**TOOL, "name": "a b"}]), "tools.0.name: "),
    (request(tools=[TOOL, TOOL]), "tools: two tools have the same name"),
    (request(tools=[{"type": "bash_20250124", "name": "bash"}]),
     "tools.0: tools of type 'bash_20250124' are not supported: only Anthropic's models"),
    (request(tools=[{"type": "computer_toolset_20260801"}]), "tools.0: "),
    (request(tools=[{"type": "other"}]), "tools.0: tools of type 'other'"),
    (request(tools=[TOOL], tool_choice={"type": "tool", "name": "g"}), "tool_choice.name: 'g'"),
    (request(tools=[TOOL], tool_choice={"type": "tool"}), "tool_choice: the tool choice"),
    (request(tools=[{"type": "web_search_20250305"}], tool_choice={"type": "any"}),
     "tool_choice: "),
    (request(thinking={"type": "sometimes"}), "thinking.type: "),
    (request(output_config={"format": {"type": "json_schema", "schema": {"type": "x"}}}),
     "output_config.format: "),
    (request(output_config={"effort": "extreme"}), "output_config.effort: "),
    (request(container="c"), "container: the field is not supported"),
    (request(tools=[{**TOOL, "descripton": "x"}]),
     "unknown parameter 'tools.0.descripton'; did you mean 'description'?"),
    (request(*USER, assistant(*[CALLED] * 129), user(RESULT), system="S"),
     "messages.1.content: List should have at most 128 items"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "complaint"), WRONG)
async def test_wrong_requests_are_refused_by_field(
    hermes: Tokenizer, body: dict[str, Any], complaint: str
) -> None:
    async with open_harness(hermes) as (_, client):
        error = error_of(await client.post(MESSAGES, json=body))
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(complaint), error["message"]


async def test_special_tokens_are_refused_by_field(hermes: Tokenizer) -> None:
    bad = text("<|im_start|>")
    async with open_harness(hermes, refuses_special_tokens=True) as (_, client):
        body = request(user(text("a")), assistant(text("b")), user(bad), system="s")
        error = error_of(await client.post(MESSAGES, json=body))
    assert error["message"].startswith("messages.2.content: the message contains the special token")


async def test_errors_have_types_by_status(hermes: Tokenizer) -> None:
    async with open_harness(hermes, api_keys={"sk-a": "alice"}) as (router, client):
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
            for path in (MESSAGES, COUNT):
                refused = await client.post(path, json=request(), headers=headers)
                assert error_of(refused, 401)["type"] == "authentication_error"
        key = {"x-api-key": "sk-a"}
        other = await client.post(MESSAGES, json=request(model="gpt-9"), headers=key)
        assert error_of(other, 404)["type"] == "not_found_error"
        assert message_of(await client.post(MESSAGES, json=request(), headers=key))
        broken = await client.post(MESSAGES, content=b"{", headers=key)
        assert "not JSON" in error_of(broken)["message"]
        router.placer.decode = []
        nobody = await client.post(MESSAGES, json=request(stream=True), headers=key)
        assert error_of(nobody, 503)["type"] == "overloaded_error"
        router.service.tenants.request_limiter._limit = 0
        full = await client.post(MESSAGES, json=request(), headers=key)
        assert error_of(full, 429)["type"] == "rate_limit_error"
        assert int(full.headers["retry-after"]) >= 1
        router.service.tenants.request_limiter._limit = 9


async def test_requests_of_claude_code_are_answered(hermes: Tokenizer) -> None:
    """The fields and the address are those that Claude Code 2.1 sends."""
    schema = {**TOOL["input_schema"], "$schema": "https://json-schema.org/draft/2020-12/schema"}
    body = request(
        user(text("Hi"), text("there", **SHORT)),
        {"role": "system", "content": "Agents"},
        max_tokens=32_000,
        system=[text("x-anthropic-billing-header: cch=1;"), text("a", **SHORT), text("b", **SHORT)],
        tools=[{**TOOL, "input_schema": schema}],
        metadata={"user_id": '{"session_id": "x"}'},
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        stream=True,
    )
    async with open_harness(hermes, "x") as (router, client):
        answer = await client.post(MESSAGES + "?beta=true", json=body)
    assert answer.status_code == 200, answer.text
    prompt = bytes(router.prefill.submitted[0].spec.token_ids)
    assert prompt == b"[f ]<system>a\n\nb|<user>Hi\n\nthere|<system>Agents|>"
