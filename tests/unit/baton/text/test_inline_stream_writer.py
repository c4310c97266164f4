"""Tests that the fast path for a stream's tokens writes the same bytes as the general path."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from baton.text.tokenizer import Tokenizer
from router.http.body_senders import UvicornBodyWriter
from tests.router_harness import (
    CHAT,
    COMPLETE,
    RESPOND,
    RouterHarness,
    chat,
    serve_over_tcp,
    write_tokenizer,
)

TEXT = 'Größe 🎉 \x00text\x00 "q" naïve 日'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Counted:
    """Counts the chunks that took the fast path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_chunks = 0
        write = UvicornBodyWriter.write

        def count(push: UvicornBodyWriter, data: bytes) -> None:
            self.num_chunks += 1
            write(push, data)

        monkeypatch.setattr(UvicornBodyWriter, "write", count)


async def step_slowly(router: RouterHarness, task: asyncio.Task[Any]) -> None:
    """Step the workers so slowly that every token is read before the next one is generated."""
    while not task.done():
        router.prefill.step()
        router.decode.step()
        for _ in range(10):
            await asyncio.sleep(0)


async def stream(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], *, short: bool
) -> list[Any]:
    """Request a stream; return its events, without fields that differ between requests. The fast
    path is used if ``short`` is true."""
    blocks = (await stream_text(tokenizer, path, body, short=short)).split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [{**json.loads(block[6:]), "created": 0} for block in blocks[:-2]]


async def stream_text(tokenizer: Tokenizer, path: str, body: dict[str, Any], *, short: bool) -> str:
    """Request a stream whose tokens are sent one by one; return its text. The fast path is used if
    ``short`` is true."""
    router = RouterHarness(tokenizer, TEXT, automatic=False)
    router.decode.details = {}
    async with serve_over_tcp(router) as url, httpx.AsyncClient() as client:
        with pytest.MonkeyPatch.context() as patch:
            if not short:
                patch.setattr(UvicornBodyWriter, "is_open", False)
            response = asyncio.create_task(client.post(url + path, json=body))
            await step_slowly(router, response)
    return (await response).text


BODIES = {
    "chat": (CHAT, chat(stream=True)),
    "usage": (CHAT, chat(stream=True, stream_options={"include_usage": True})),
    "padded": (CHAT, chat(stream=True, stream_options={"include_obfuscation": True})),
    "several": (CHAT, chat(stream=True, n=3)),
    "completion": (COMPLETE, {"prompt": "x", "stream": True, "max_tokens": 60, "echo": True}),
}


def texts_of(events: list[Any]) -> dict[int, str]:
    """Return the text of each choice, by index."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
    return texts


@pytest.mark.parametrize("name", BODIES)
async def test_fast_path_equals_the_general_path(
    tokenizer: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = BODIES[name]
    counted = Counted(monkeypatch)
    long = await stream(tokenizer, path, body, short=False)
    assert counted.num_chunks == 0
    short = await stream(tokenizer, path, body, short=True)
    assert counted.num_chunks > len(texts_of(long)[0]) // 2
    assert texts_of(short) == texts_of(long)
    assert [event for event in short if event not in long] == []
    if name != "several":
        assert short == long


async def test_fast_path_writes_the_same_events_of_responses(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, counted = {"input": "Hi", "stream": True}, Counted(monkeypatch)
    long = await stream_text(tokenizer, RESPOND, body, short=False)
    assert counted.num_chunks == 0
    short = await stream_text(tokenizer, RESPOND, body, short=True)
    assert counted.num_chunks > len(TEXT) // 2
    times = re.compile(r'"(created|completed)_at":\d+')
    assert times.sub("", short) == times.sub("", long)


@pytest.mark.parametrize(
    "fields",
    [{"stop": ["🎉 nothing"]}, {"logprobs": True}, {"return_token_ids": True}],
    ids=["stop", "logprobs", "ids"],
)
async def test_streams_with_stops_logprobs_or_token_ids_use_the_general_path(
    tokenizer: Tokenizer, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    events = await stream(tokenizer, CHAT, chat(stream=True, **fields), short=True)
    assert counted.num_chunks == 0
    assert texts_of(events) == {0: TEXT}
