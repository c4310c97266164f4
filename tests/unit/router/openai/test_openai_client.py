"""Tests OpenAI's Python client against a router with in-memory workers: errors, failing streams and
reasoning. The cluster that the end-to-end tests share can't produce these with its demo model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from baton.text.tokenizer import Tokenizer
from router.app import build_app
from tests import router_harness
from tests.http_transport import HttpServerTransport
from tests.router_harness import RouterHarness, eventually, open_harness

tokenizer = router_harness.tokenizer

CHAT_FIELDS: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


@asynccontextmanager
async def client_of(router: RouterHarness, key: str = "sk-a") -> AsyncIterator[openai.AsyncOpenAI]:
    await router.service.cluster.refresh()
    app = build_app(router.service, router.batch_service, router.response_service)
    http = httpx.AsyncClient(transport=HttpServerTransport(app))
    async with openai.AsyncOpenAI(
        base_url="http://test/v1", api_key=key, max_retries=0, http_client=http
    ) as client:
        yield client


async def test_errors_raise_the_clients_exception_types(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, api_keys={"sk-a": "alice"}) as (router, _):
        async with client_of(router, "wrong") as unauthenticated:
            with pytest.raises(openai.AuthenticationError) as refused:
                await unauthenticated.chat.completions.create(**CHAT_FIELDS)
            assert refused.value.code == "invalid_api_key"
        async with client_of(router) as client:
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(**CHAT_FIELDS, n=0)
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("gpt-9")
            router.service.tenants.request_limiter._limit = 0
            with pytest.raises(openai.RateLimitError) as full:
                await client.chat.completions.create(**CHAT_FIELDS)
            assert int(full.value.response.headers["retry-after"]) >= 1
            router.service.tenants.request_limiter._limit = 10
            router.placer.decode = []
            with pytest.raises(openai.InternalServerError) as nobody:
                await client.chat.completions.create(**CHAT_FIELDS)
            assert nobody.value.status_code == 503


async def test_error_in_the_middle_of_a_stream_is_raised(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, automatic=False) as (router, _), client_of(router) as client:
        texts: list[str | None] = []

        async def listen() -> None:
            async for chunk in await client.chat.completions.create(**CHAT_FIELDS, stream=True):
                texts.append(chunk.choices[0].delta.content)

        listening = asyncio.create_task(listen())
        await eventually(lambda: bool(router.decode.jobs))
        router.prefill.step()
        router.decode.step()
        router.decode.fail_jobs("INVALID_ARGUMENT", "went wrong")
        with pytest.raises(openai.APIError, match="went wrong"):
            await listening
    assert "".join(text or "" for text in texts) == "He"


async def test_reasoning_is_read_by_the_stream_helper(tokenizer: Tokenizer) -> None:
    async with (
        open_harness(tokenizer, "<think>Hm</think>Yes", reasoning_parser="qwen3") as (router, _),
        client_of(router) as client,
    ):
        whole = await client.chat.completions.create(**CHAT_FIELDS)
        assert whole.choices[0].message.content == "Yes"
        assert whole.choices[0].message.model_extra == {"reasoning_content": "Hm"}
        assert whole.usage is not None and whole.usage.completion_tokens_details is not None
        # The count includes the opening tag's last token; in real models the tag is a single token.
        assert whole.usage.completion_tokens_details.reasoning_tokens == len(">Hm</think>")
        async with client.chat.completions.stream(**CHAT_FIELDS) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "Yes"
