"""Tests that streams of all APIs begin although there is no output yet, and are never silent for
long."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest

from baton.text.tokenizer import Tokenizer
from router.http import response_writer
from router.http.response_writer import ResponseWriter
from tests import router_harness
from tests.router_harness import (
    CHAT,
    COMPLETE,
    RESPOND,
    USER,
    eventually,
    open_harness,
    serve_over_tcp,
    step_until_done,
)

tokenizer = router_harness.tokenizer

COMMENT, EVENT = b": ping\n\n", b'event: ping\ndata: {"type":"ping"}\n\n'
MESSAGES: Any = USER
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    COMPLETE: {"prompt": "Hi"},
    RESPOND: {"input": "Hi", "store": False},
    "/v1/messages": {"messages": USER, "max_tokens": 20},
}


@pytest.fixture
def frequent_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_writer, "FIRST_BYTE_SECONDS", 0.01)
    monkeypatch.setattr(response_writer, "PING_SECONDS", 0.01)


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[ResponseWriter]:
    """The writers of all responses of the test."""
    created: list[ResponseWriter] = []

    class RecordedWriter(ResponseWriter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            created.append(self)

    monkeypatch.setattr("router.serving.request_handler.ResponseWriter", RecordedWriter)
    return created


class OpenStream:
    """A stream that is being read. ``data`` is what has been received of its body."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.data = b""
        self._chunks = response.aiter_raw()

    async def read_until(self, end: bytes, count: int = 1) -> None:
        while self.data.count(end) < count:
            self.data += await anext(self._chunks)

    async def read_all(self) -> bytes:
        async for chunk in self._chunks:
            self.data += chunk
        return self.data


@asynccontextmanager
async def open_stream(client: httpx.AsyncClient, path: str) -> AsyncIterator[OpenStream]:
    body = {"model": "demo", "stream": True, **BODIES[path]}
    async with asyncio.timeout(60), client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        yield OpenStream(response)


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_begins_before_its_first_token_and_is_never_silent(
    path: str,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    frequent_pings: None,
    writers: list[ResponseWriter],
) -> None:
    ping = EVENT if path == "/v1/messages" else COMMENT
    async with (
        open_harness(tokenizer, automatic=False) as (router, client),
        open_stream(client, path) as stream,
    ):
        await stream.read_until(ping, 3)
        assert stream.data.replace(ping, b"") == b""
        headers = stream.response.headers
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["x-baton-request-id"] and headers["x-accel-buffering"] == "no"
        await eventually(lambda: len(router.decode.jobs) == 1)
        for _ in range(3):
            router.prefill.step()
            router.decode.step()
        await stream.read_until(b'"H')  # the first token's text
        await stream.read_until(ping, stream.data.count(ping) + 2)
        monkeypatch.setattr(response_writer, "PING_SECONDS", 60.0)
        reading = asyncio.create_task(stream.read_all())
        await step_until_done(router, reading)
        received = await reading
    assert [writer._ping_timer for writer in writers] == [None]
    *events, rest = received.replace(ping, b"").split(b"\n\n")
    assert rest == b"" and all(event.startswith((b"data: ", b"event: ")) for event in events)


async def test_the_clients_skip_pings(tokenizer: Tokenizer, frequent_pings: None) -> None:
    """OpenAI's and Anthropic's clients, with a ping before and between all events."""
    async with (
        open_harness(tokenizer, automatic=False) as (router, _),
        serve_over_tcp(router) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as other,
    ):

        async def chat() -> str:
            chunks = await client.chat.completions.create(
                model="demo",
                messages=MESSAGES,
                stream=True,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        async def complete() -> str:
            chunks = await client.completions.create(model="demo", prompt="Hi", stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        async def respond() -> str:
            async with client.responses.stream(model="demo", input="Hi", store=False) as stream:
                return (await stream.get_final_response()).output_text

        async def message() -> str:
            async with other.messages.stream(
                model="demo",
                max_tokens=20,
                messages=MESSAGES,
            ) as stream:
                return await stream.get_final_text()

        tasks = [asyncio.create_task(each()) for each in (chat, complete, respond, message)]
        await eventually(lambda: len(router.decode.jobs) == len(tasks))
        while not all(task.done() for task in tasks):
            router.prefill.step()
            router.decode.step()
            await asyncio.sleep(0.02)  # longer than the interval of pings
        assert [await task for task in tasks] == ["Hello, wörld!"] * 4


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_after_a_ping_is_the_last_event(
    path: str, tokenizer: Tokenizer, frequent_pings: None
) -> None:
    """The status 200 has been sent by then."""
    ping = EVENT if path == "/v1/messages" else COMMENT
    async with (
        open_harness(tokenizer, automatic=False) as (router, client),
        open_stream(client, path) as stream,
    ):
        await stream.read_until(ping)
        await eventually(lambda: len(router.decode.jobs) == 1)
        router.decode.fail_jobs("INVALID_ARGUMENT", "went wrong")
        received = (await stream.read_all()).replace(ping, b"")
    *events, last, rest = received.split(b"\n\n")
    kinds = [event.partition(b"\n")[0] for event in events]
    error = json.loads(last[last.index(b"{") :])
    assert rest == b""
    match path:
        case "/v1/messages":
            assert kinds == [] and last.startswith(b"event: error\ndata: ")
            assert error["error"] == {"type": "invalid_request_error", "message": "went wrong"}
        case "/v1/responses":
            assert kinds == [b"event: response.created", b"event: response.in_progress"]
            assert last.startswith(b"event: response.failed\ndata: ")
            assert error["response"]["error"] == {"code": "invalid_prompt", "message": "went wrong"}
        case _:
            assert kinds == [] and last.startswith(b"data: ")
            assert (error["error"]["type"], error["error"]["message"]) == (
                "invalid_request_error",
                "went wrong",
            )
