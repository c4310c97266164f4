"""Tests OpenAI's Python client against ``/v1/responses``."""

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from baton.text.tokenizer import Tokenizer
from tests import router_harness
from tests.responses_harness import DictStore
from tests.router_harness import eventually, open_harness
from tests.unit.router.openai.test_openai_client import client_of
from tests.unit.router.responses.test_responses_requests import reader, room

__all__ = ["reader", "room"]

tokenizer = router_harness.tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOL: Any = {
    "type": "function", "name": "f", "strict": True,
    "parameters": {
        "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
        "additionalProperties": False,
    },
}  # fmt: skip


class Answer(BaseModel):
    x: int


async def test_create_and_stream(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (router, _), client_of(router) as client:
        whole = await client.responses.create(model="demo", input="Hi")
        assert whole.output_text == "Hello, wörld!" and whole.status == "completed"
        events = await client.responses.create(model="demo", input="Hi", stream=True)
        kinds = [event.type async for event in events]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        async with client.responses.stream(model="demo", input="Hi") as stream:
            deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(deltas) == final.output_text == "Hello, wörld!"
        count = await client.responses.input_tokens.count(model="demo", input="Hi")
        assert whole.usage is not None and count.input_tokens == whole.usage.input_tokens


async def test_parse(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, '{"x": 1}') as (router, _), client_of(router) as client:
        parsed = await client.responses.parse(model="demo", input="Hi", text_format=Answer)
        assert parsed.output_parsed == Answer(x=1)
        async with client.responses.stream(model="demo", input="Hi", text_format=Answer) as stream:
            assert (await stream.get_final_response()).output_parsed == Answer(x=1)


async def test_loop_of_tool_calls(reader: Tokenizer) -> None:
    async with open_harness(reader, f"Well{CALL}") as (router, _), client_of(router) as client:
        items: list[Any] = [{"role": "user", "content": "Hi"}]
        for _ in range(2):
            async with client.responses.stream(
                model="demo", input=items, tools=[TOOL], store=False
            ) as stream:
                response = await stream.get_final_response()
            items += response.output
            for call in response.output:
                if call.type == "function_call":
                    assert call.parsed_arguments == {"x": 1} == json.loads(call.arguments)
                    result = {"type": "function_call_output", "call_id": call.call_id}
                    items.append({**result, "output": "2"})
    prompt = bytes(router.prefill.submitted[1].spec.token_ids)
    assert prompt.startswith(b"[f ]<user>Hi|<assistant>Well!f:1|<tool>2#call_")


async def test_conversation(reader: Tokenizer) -> None:
    store = DictStore()
    async with open_harness(reader, "Yes", response_store=store) as (router, _):
        async with client_of(router) as client:
            one = await client.responses.create(model="demo", input="A")
            await client.responses.create(model="demo", input="B", previous_response_id=one.id)
            with pytest.raises(openai.BadRequestError) as missing:
                await client.responses.create(model="demo", input="B", previous_response_id="no")
    assert missing.value.code == "previous_response_not_found"
    prompt = bytes(router.prefill.submitted[1].spec.token_ids)
    assert prompt == b"<user>A|<assistant>Yes|<user>B|>"


async def test_failing_stream(tokenizer: Tokenizer) -> None:
    harness = open_harness(tokenizer, automatic=False, stores_responses=True)
    async with harness as (router, _), client_of(router) as client:

        async def listen() -> Any:
            events = await client.responses.create(model="demo", input="Hi", stream=True)
            return [event async for event in events][-1]

        listening = asyncio.create_task(listen())
        await eventually(lambda: bool(router.decode.jobs))
        router.prefill.step()
        router.decode.step()
        router.decode.fail_jobs("INTERNAL", "went wrong")
        last = await listening
        stored = await client.responses.retrieve(last.response.id)
    assert stored == last.response
    assert last.type == "response.failed" and last.response.error.code == "server_error"
