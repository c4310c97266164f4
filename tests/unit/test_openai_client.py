"""What OpenAI's own client raises and reads, over twins: what a shared cluster can't show."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from baton.text.tokenizer import Tokenizer
from router.app import build_app
from tests.unit import test_router_http
from tests.unit.test_router_http import House, eventually, open_house

tokenizer = test_router_http.tokenizer

ASKED: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


@asynccontextmanager
async def client_of(house: House, key: str = "sk-a") -> AsyncIterator[openai.AsyncOpenAI]:
    await house.service.cluster.refresh()
    http = httpx.AsyncClient(transport=httpx.ASGITransport(build_app(house.service, house.desk)))
    async with openai.AsyncOpenAI(
        base_url="http://test/v1", api_key=key, max_retries=0, http_client=http
    ) as client:
        yield client


async def test_kinds_of_errors(tokenizer: Tokenizer) -> None:
    async with open_house(tokenizer, api_keys={"sk-a": "alice"}) as (house, _):
        async with client_of(house, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError) as refused:
                await stranger.chat.completions.create(**ASKED)
            assert refused.value.code == "invalid_api_key"
        async with client_of(house) as client:
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(**ASKED, n=0)
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("gpt-9")
            house.service.gate._limit = 0
            with pytest.raises(openai.RateLimitError) as full:
                await client.chat.completions.create(**ASKED)
            assert int(full.value.response.headers["retry-after"]) >= 1
            house.service.gate._limit = 10
            house.placer.decode = []
            with pytest.raises(openai.InternalServerError) as nobody:
                await client.chat.completions.create(**ASKED)
            assert nobody.value.status_code == 503


async def test_an_error_in_mid_stream_is_raised(tokenizer: Tokenizer) -> None:
    async with open_house(tokenizer, automatic=False) as (house, _), client_of(house) as client:
        texts: list[str | None] = []

        async def listen() -> None:
            async for chunk in await client.chat.completions.create(**ASKED, stream=True):
                texts.append(chunk.choices[0].delta.content)

        listening = asyncio.create_task(listen())
        await eventually(lambda: bool(house.decode.jobs))
        house.prefill.step()
        house.decode.step()
        house.decode.fail("INVALID_ARGUMENT", "went wrong")
        with pytest.raises(openai.APIError, match="went wrong"):
            await listening
    assert "".join(text or "" for text in texts) == "He"


async def test_thoughts_are_read_by_the_stream_helper(tokenizer: Tokenizer) -> None:
    async with (
        open_house(tokenizer, "<think>Hm</think>Yes", reasoning_parser="qwen3") as (house, _),
        client_of(house) as client,
    ):
        whole = await client.chat.completions.create(**ASKED)
        assert whole.choices[0].message.content == "Yes"
        assert whole.choices[0].message.model_extra == {"reasoning_content": "Hm"}
        assert whole.usage is not None and whole.usage.completion_tokens_details is not None
        # From the one that completes the opening tag, which is a token of its own in real models.
        assert whole.usage.completion_tokens_details.reasoning_tokens == len(">Hm</think>")
        async with client.chat.completions.stream(**ASKED) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "Yes"
