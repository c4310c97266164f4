"""Tests reasoning and its variables over HTTP, with exact answers and chunks."""

from pathlib import Path
from typing import Any

import pytest

from baton.core.grammar import GrammarKind
from baton.text.tokenizer import Tokenizer
from tests.router_harness import CHAT, USER, chat, open_harness, wrong_error
from tests.unit import small_chats
from tests.unit.small_chats import CALL, NAMED, TEMPLATE, TOOL, deltas, load_tokenizer, message_of

room_for_calls = small_chats.room_for_calls
hermes = small_chats.hermes
thinker = small_chats.thinker


async def test_reasoning_is_separated_from_the_answer(thinker: Tokenizer) -> None:
    async with open_harness(thinker, "Hm.\n</think>\n\nYes") as (_, client):
        response = await client.post(CHAT, json=chat())
        streamed = await client.post(CHAT, json=chat(stream=True))
    message = message_of(response)
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")
    usage = response.json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("Hm.\n</think>")}
    assert usage["completion_tokens"] == len("Hm.\n</think>\n\nYes") + 1
    parts = deltas(streamed)
    assert [d for d in parts if d] == [
        {"role": "assistant", "content": ""},
        *({"reasoning_content": c} for c in "Hm."),
        *({"content": c} for c in "Yes"),
    ]


async def test_reasoning_before_a_tool_call(thinker: Tokenizer) -> None:
    text = f"f?</think>{CALL}"
    async with open_harness(thinker, text) as (router, client):
        message = message_of(await client.post(CHAT, json=chat(tools=[TOOL])))
        forced = chat(tools=[TOOL], tool_choice=NAMED)
        assert message_of(await client.post(CHAT, json=forced))["tool_calls"]
    assert message["reasoning_content"] == "f?" and message["content"] is None
    grammar = router.prefill.submitted[1].spec.sampling.grammar
    assert grammar is not None
    assert grammar.text.startswith(r'start: thought /\n{0,2}/ "<tool_call>\n{\"name\": \"" call')


async def test_thinking_can_be_switched_off(thinker: Tokenizer) -> None:
    async with open_harness(thinker, "Yes") as (router, client):
        for fields in (
            {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"},
        ):  # fmt: skip
            message = message_of(await client.post(CHAT, json=chat(**fields)))
            assert message == {"role": "assistant", "content": "Yes"}
        wrong = await client.post(CHAT, json=chat(chat_template_kwargs={"enable_thinkin": True}))
        taken = await client.post(CHAT, json=chat(chat_template_kwargs={"messages": "x"}))
        token = await client.post(CHAT, json=chat(chat_template_kwargs={"eos_token": "x"}))
    for each in (wrong, taken, token):
        assert wrong_error(each)["param"] == "chat_template_kwargs"
    assert "did you mean 'enable_thinking'?" in wrong_error(wrong)["message"]
    assert {bytes(job.spec.token_ids) for job in router.prefill.submitted} == {b"<user>Hi|>"}


async def test_reasoning_effort_unknown_to_the_template_is_ignored(hermes: Tokenizer) -> None:
    """Clients send ``reasoning_effort`` to any model; other servers ignore it, too."""
    async with open_harness(hermes, "Yes") as (router, client):
        for effort in ("low", "none"):
            message_of(await client.post(CHAT, json=chat(reasoning_effort=effort)))
    assert {bytes(job.spec.token_ids) for job in router.prefill.submitted} == {b"<user>Hi|>"}


async def test_any_reasoning_effort_is_accepted(thinker: Tokenizer) -> None:
    async with open_harness(thinker, "Hm</think>Yes") as (_, client):
        for effort in ("some", "", "maximal"):
            message = message_of(await client.post(CHAT, json=chat(reasoning_effort=effort)))
            assert (message["reasoning_content"], message["content"]) == ("Hm", "Yes")


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": "Hm"},
        {"thinking": "Hm"},
        {"reasoning_details": [
            {"type": "reasoning.text", "text": "H", "signature": "x"},
            {"type": "reasoning.summary", "summary": "m"},
            {"type": "reasoning.encrypted", "data": "x"},
            "x",
        ]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "Hm", "signature": "x"}]},
        {"reasoning_content": "Hm", "reasoning": "Ha", "thinking": "Ho"},
        {"reasoning_content": "", "reasoning": {"effort": "low"}, "reasoning_details": [],
         "thinking": 1, "thinking_blocks": [{"thinking": "Hm"}]},
    ],
)  # fmt: skip
async def test_reasoning_of_earlier_turns_has_many_names(
    hermes: Tokenizer, fields: dict[str, Any]
) -> None:
    message = {"role": "assistant", "content": "Yes", **fields}
    user = {"role": "user", "content": "Hi", "reasoning": "not the assistant's"}
    async with open_harness(hermes, "x") as (router, client):
        message_of(await client.post(CHAT, json={"messages": [user, message, *USER]}))
    prompt = b"<user>Hi|<assistant>Yes(Hm)|<user>Hi|>"
    assert bytes(router.prefill.submitted[0].spec.token_ids) == prompt


async def test_reasoning_of_earlier_turns_is_rendered(hermes: Tokenizer) -> None:
    message = {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}
    async with open_harness(hermes, "x") as (router, client):
        await client.post(CHAT, json={"messages": [*USER, message, *USER]})
    prompt = b"<user>Hi|<assistant>Yes(Hm)|<user>Hi|>"
    assert bytes(router.prefill.submitted[0].spec.token_ids) == prompt


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}


async def test_grammar_applies_from_the_first_token_without_reasoning(
    thinker: Tokenizer, tmp_path: Path
) -> None:
    """Thinking is switched off. One template then writes no ``<think>``; the other one opens and
    closes the reasoning."""
    folder = tmp_path / "qwen3"
    folder.mkdir()
    shut = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    qwen3 = load_tokenizer(folder, TEMPLATE + shut)
    off = ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"})
    for tokenizer in (thinker, qwen3):
        async with open_harness(tokenizer, "1") as (router, client):
            for fields in off:
                asked = chat(response_format=SCHEMA, **fields)
                assert message_of(await client.post(CHAT, json=asked))["content"] == "1"
                forced = chat(tools=[TOOL], tool_choice="required", **fields)
                await client.post(CHAT, json=forced)
            message_of(await client.post(CHAT, json=chat(response_format=SCHEMA)))
        grammars = [job.spec.sampling.grammar for job in router.prefill.submitted]
        kinds = [grammar.kind for grammar in grammars if grammar is not None]
        assert kinds[0] is kinds[2] is GrammarKind.JSON_SCHEMA
        texts = [grammar.text for grammar in grammars if grammar is not None]
        assert "think" not in texts[1] + texts[3]
        assert "thought" in texts[4]
