"""Tests Anthropic's Python client against a router with in-memory workers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from baton.text.tokenizer import Tokenizer
from tests.anthropic_harness import CALL, TOOL
from tests.router_harness import RouterHarness, open_harness, serve_over_tcp
from tests.unit import small_chats

hermes = small_chats.hermes
thinker = small_chats.thinker
room_for_calls = small_chats.room_for_calls

FIELDS: Any = {
    "model": "demo",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "Hi"}],
}


@asynccontextmanager
async def client_of(
    router: RouterHarness, key: str = "sk-a"
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        serve_over_tcp(router) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client,
    ):
        yield client


async def test_messages_and_streams_agree(thinker: Tokenizer) -> None:
    async with (
        open_harness(thinker, f"f?</think>Well.\n{CALL}") as (router, _),
        client_of(router) as client,
    ):
        whole = await client.messages.create(**FIELDS, tools=[TOOL])
        async with client.messages.stream(**FIELDS, tools=[TOOL]) as stream:
            types = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(
            model="demo", messages=FIELDS["messages"], tools=[TOOL]
        )
    kinds = [block.type for block in whole.content]
    assert kinds == ["thinking", "text", "tool_use"] and whole.stop_reason == "tool_use"
    expected, got = (each.model_dump(exclude_none=True) for each in (whole, streamed))
    for message in (expected, got):
        message.pop("id")
        message["content"][2].pop("id")
    assert got == expected
    assert types[0] == "message_start" and types[-1] == "message_stop"
    assert counted.input_tokens == whole.usage.input_tokens
    assert whole._request_id is not None


async def test_answers_match_the_clients_types(thinker: Tokenizer) -> None:
    async with (
        open_harness(thinker, f"f?</think>Well.\n{CALL}") as (router, _),
        client_of(router) as client,
    ):
        response = await client.messages.with_raw_response.create(**FIELDS, tools=[TOOL])
        data = (await response.http_response.aread()).decode()
    message = anthropic.types.Message.model_validate_json(data, strict=True)
    assert not message.model_extra and not message.usage.model_extra
    assert not any(block.model_extra for block in message.content)


async def test_a_conversation_with_tool_results(thinker: Tokenizer) -> None:
    """The client sends the answer back as it got it."""
    async with (
        open_harness(thinker, f"f?</think>{CALL}") as (router, _),
        client_of(router) as client,
    ):
        first = await client.messages.create(**FIELDS, tools=[TOOL])
        call = first.content[-1]
        assert call.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
        turns = [
            *FIELDS["messages"],
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(**{**FIELDS, "messages": turns}, tools=[TOOL])
    prompt = bytes(router.prefill.submitted[1].spec.token_ids).decode()
    assert prompt == f"[f ]<user>Hi|<assistant>(f?)!f:1|<tool>2#{call.id}|><think>"


async def test_errors_raise_the_clients_exception_types(hermes: Tokenizer) -> None:
    async with open_harness(hermes, api_keys={"sk-a": "alice"}) as (router, _):
        async with client_of(router, "wrong") as unauthenticated:
            with pytest.raises(anthropic.AuthenticationError):
                await unauthenticated.messages.create(**FIELDS)
        async with client_of(router) as client:
            with pytest.raises(anthropic.BadRequestError, match=r"max_tokens: ") as wrong:
                await client.messages.create(**{**FIELDS, "max_tokens": 0})
            assert wrong.value.request_id is not None
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**{**FIELDS, "model": "claude"})
            router.placer.decode = []
            with pytest.raises(anthropic.InternalServerError) as nobody:
                await client.messages.create(**FIELDS)
            assert nobody.value.status_code == 503


async def test_models_are_listed(hermes: Tokenizer) -> None:
    async with open_harness(hermes) as (router, _), client_of(router) as client:
        models = [model async for model in client.models.list()]
        one = await client.models.retrieve("demo")
    assert models == [one]
    assert (one.id, one.type, one.display_name) == ("demo", "model", "demo")
    assert one.created_at.tzinfo is not None and one.max_input_tokens == 512
