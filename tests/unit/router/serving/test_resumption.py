"""Tests that a stream that one router has begun is continued by another one, event by event, and
what clients with wrong keys, bodies and events get."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import httpx
import orjson
import pytest

from baton.clock import ManualClock
from baton.errors import Unavailable
from baton.text.tokenizer import Tokenizer
from router.serving import resumption
from router.serving.kept_answers import (
    KEPT_SECONDS,
    TOKEN_BYTES,
    AnswerKey,
    AnswerOrigin,
    KeptAnswer,
    KeptTokens,
)
from router.tenants.request_usage import RequestUsage
from router.tenants.usage_store import UsageField
from testkit.fakes.kept_answers import MemoryKeptAnswers
from tests.documented_client import documented_client
from tests.router_harness import (
    CHAT,
    COMPLETE,
    RESPOND,
    VOCAB,
    RouterHarness,
    chat,
    eventually,
    open_harness,
    wrong_error,
)
from tests.unit import small_chats
from tests.unit.small_chats import CALL, TOOL

thinker = small_chats.thinker
room_for_calls = small_chats.room_for_calls

FUNCTION: Any = TOOL["function"]
KEY = {"idempotency-key": "k-1"}
TEXT = "Hm ö 😀.\n</think>\n\nYes, wörld STOP"
CALLING = f"f?</think>\n{CALL}"
USAGE = {"include_usage": True}
COMPLETION = {"model": "demo", "prompt": "ab", "stream": True}
MESSAGE = {"model": "demo", "max_tokens": 60, "stream": True}
RESPONSE = {"model": "demo", "input": "Hi", "stream": True, "store": False}
MESSAGES = "/v1/messages"

STREAMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": (CHAT, TEXT, chat(stream=True, stream_options=USAGE)),
    "chat with calls": (CHAT, CALLING, chat(stream=True, tools=[TOOL])),
    "chat with ids": (CHAT, TEXT, chat(stream=True, return_token_ids=True)),
    "chat with logprobs": (CHAT, TEXT, chat(stream=True, logprobs=True, top_logprobs=2)),
    "several chats": (CHAT, TEXT, chat(stream=True, n=3, stream_options=USAGE)),
    "completion": (COMPLETE, TEXT, COMPLETION),
    "completion with a stop": (COMPLETE, TEXT, {**COMPLETION, "stop": ["STOP", "d S?"]}),
    "padded completion": (
        COMPLETE, TEXT, {**COMPLETION, "stream_options": {"include_obfuscation": True}},
    ),
    "completions": (COMPLETE, TEXT, {**COMPLETION, "prompt": ["ab", "c"], "n": 2, "echo": True}),
    "short completion": (COMPLETE, TEXT, {**COMPLETION, "max_tokens": 5}),
    "echo": (COMPLETE, TEXT, {**COMPLETION, "max_tokens": 0, "echo": True}),
    "message": (MESSAGES, TEXT, {**MESSAGE, "messages": chat()["messages"]}),
    "message with calls": (
        MESSAGES,
        CALLING,
        {
            **MESSAGE,
            "messages": chat()["messages"],
            "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
        },
    ),
    "response": (RESPOND, TEXT, RESPONSE),
    "response with calls": (
        RESPOND, CALLING, {**RESPONSE, "tools": [{"type": "function", **FUNCTION}]},
    ),
    "response with logprobs": (
        RESPOND,
        TEXT,
        {**RESPONSE, "top_logprobs": 1, "include": ["message.output_text.logprobs"]},
    ),
}  # fmt: skip


class Forgetful(MemoryKeptAnswers):
    """Keeps only the first ``num_tokens`` tokens of each answer, as if its router had been killed
    a moment later."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(ManualClock())
        self._num_bytes = num_tokens * TOKEN_BYTES

    async def claim(
        self, key: AnswerKey, digest: bytes, origin: AnswerOrigin | None
    ) -> KeptAnswer | None:
        kept = await super().claim(key, digest, origin)
        if kept is None:
            return None
        choices = {
            index: replace(tokens, data=tokens.data[: self._num_bytes], finish_reason=None)
            if len(tokens.data) > self._num_bytes
            else tokens
            for index, tokens in kept.choices.items()
        }
        return replace(kept, choices=choices, charged=RequestUsage())

    async def charge(self, *_: Any) -> RequestUsage:
        return RequestUsage()


@asynccontextmanager
async def two_routers(
    tokenizer: Tokenizer, first: str, second: str | None = None, **settings: Any
) -> AsyncIterator[tuple[RouterHarness, httpx.AsyncClient, RouterHarness, httpx.AsyncClient]]:
    """Two routers with workers of their own. Each worker of the second one sends three tokens at a
    time."""
    kept = settings.pop("kept_answers", None) or Forgetful(0)
    async with (
        open_harness(tokenizer, first, kept_answers=kept, **settings) as (router, client),
        open_harness(
            tokenizer, second or first, automatic=False, kept_answers=kept, **settings
        ) as (other, other_client),
        asyncio.TaskGroup() as tasks,
    ):
        stepping = tasks.create_task(_step_in_bursts(other))
        yield router, client, other, other_client
        stepping.cancel()


async def _step_in_bursts(router: RouterHarness) -> None:
    while True:
        for worker in (router.prefill, router.decode) * 3:
            worker.step()
        await asyncio.sleep(0)


async def request(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], last: str = "", **headers: str
) -> httpx.Response:
    sent = {**KEY, **headers} | ({"last-event-id": last} if last else {})
    return await client.post(path, json=body, headers=sent)


def frames(response: httpx.Response) -> list[tuple[str, str]]:
    """Return the ids of a stream's events, and the events."""
    assert response.status_code == 200, response.text
    assert not response.text or response.text.endswith("\n\n")
    found = []
    for frame in response.text.split("\n\n")[:-1]:
        if not frame.startswith((":", 'event: ping\ndata: {"type":"ping","comment"')):
            first, _, event = frame.partition("\n")
            assert first.startswith("id: "), frame
            found.append((first[4:], event))
    return found


def by_choice(events: list[tuple[str, str]]) -> dict[int, list[str]]:
    """Return the events of each choice; those without a choice are the stream's (-1). The time at
    which a response was completed is left out."""
    found: dict[int, list[str]] = {}
    for _, event in events:
        event = re.sub(r'"completed_at":\d+', '"completed_at":0', event)
        data = event.partition("data: ")[2]
        choices = [] if data == "[DONE]" else orjson.loads(data).get("choices") or []
        found.setdefault(choices[0]["index"] if choices else -1, []).append(event)
    return found


@pytest.mark.usefixtures("room_for_calls")
@pytest.mark.parametrize(("num_kept", "step"), [(0, 2), (7, 3), (1000, 7)])
@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_continues_after_any_of_its_events(
    name: str, num_kept: int, step: int, thinker: Tokenizer
) -> None:
    """Every ``step``-th event is the client's last one."""
    path, text, body = STREAMS[name]
    kept = Forgetful(num_kept)
    async with two_routers(thinker, text, kept_answers=kept) as (_, client, _, other):
        whole = frames(await request(client, path, body))
        assert len({event_id for event_id, _ in whole}) == len(whole) > 1
        for number in range(1, len(whole) + 1, step):
            event_id = whole[number - 1][0]
            rest = frames(await request(other, path, body, event_id))
            assert by_choice(whole[:number] + rest) == by_choice(whole), (event_id, rest)


async def test_a_stream_without_a_key_has_no_ids(thinker: Tokenizer) -> None:
    async with two_routers(thinker, TEXT) as (_, client, _, _):
        plain = await client.post(CHAT, json=chat(stream=True))
        keyed = await request(client, CHAT, chat(stream=True))
    assert "id: " not in plain.text
    assert len(frames(keyed)) == plain.text.count("\n\n")


async def test_a_retry_without_events_gets_the_same_answer(thinker: Tokenizer) -> None:
    async with two_routers(thinker, TEXT) as (router, client, other, other_client):
        first = await request(client, CHAT, chat(temperature=1))
        second = await request(other_client, CHAT, chat(temperature=1))
        seeds = [each.prefill.submitted[-1].spec.sampling.seed for each in (router, other)]
        ids = [each.prefill.submitted[-1].spec.request_id for each in (router, other)]
    assert first.json() == second.json()
    assert seeds == [77, 77] and ids == [first.json()["id"], first.json()["id"] + "-r2"]
    assert second.headers["x-baton-request-id"] == ids[1]


async def test_another_answer_is_not_continued(thinker: Tokenizer) -> None:
    """The workers of the second router write another answer, or a shorter one."""
    body = chat(stream=True)
    for text, place in ((TEXT.replace("Y", "y"), -4), (TEXT[:-8], -2)):
        async with two_routers(thinker, TEXT, text) as (_, client, _, other):
            whole = frames(await request(client, CHAT, body))
            refused = await request(other, CHAT, body, whole[place][0])
            early = frames(await request(other, CHAT, body, whole[2][0]))
        error = wrong_error(refused, 409)
        assert error["code"] == "conflict"
        assert refused.headers["x-should-retry"] == "false"
        assert error["message"].startswith("the answer was generated again and is another one")
        assert whole[3] == early[0]


async def test_wrong_keys_bodies_and_events(thinker: Tokenizer) -> None:
    clock = ManualClock()
    keys = {"key-of-tenant-a": "a", "key-of-tenant-b": "b"}
    settings: dict[str, Any] = {"api_keys": keys, "kept_answers": MemoryKeptAnswers(clock)}
    own, stranger = ({"authorization": f"Bearer {key}"} for key in keys)
    body = chat(stream=True)
    async with two_routers(thinker, TEXT, **settings) as (_, client, _, other):
        whole = frames(await request(client, CHAT, body, **own))
        last = whole[3][0]
        unknown = await request(other, CHAT, body, last, **own, **{"idempotency-key": "k-2"})
        foreign = await request(other, CHAT, body, last, **stranger)
        assert wrong_error(foreign, 404) == wrong_error(unknown, 404)
        fresh = frames(await request(other, CHAT, body, **stranger))
        assert [event_id for event_id, _ in fresh] == [event_id for event_id, _ in whole]
        assert fresh != whole, "another tenant's answer has an id of its own"

        for path, changed in ((CHAT, {**body, "top_p": 0.5}), (COMPLETE, COMPLETION)):
            for events in ("", last):
                refused = await request(other, path, changed, events, **own)
                assert wrong_error(refused, 422)["code"] == "idempotency_key_reused"
        for wrong in ("7", "1.0000000g", f"{last},{last}", "01.00000000", "١.00000000".encode()):
            refused = await request(other, CHAT, body, wrong, **own)  # type: ignore[arg-type]
            assert wrong_error(refused)["message"].startswith("Last-Event-ID is ")
        for key in ("", "two words", "x" * 256):
            refused = await request(other, CHAT, body, **own, **{"idempotency-key": key})
            assert wrong_error(refused)["message"].startswith("Idempotency-Key must have 1 to 255")
        headers = {**own, "last-event-id": last}
        refused = await other.post(CHAT, json=body, headers=headers)
        assert "needs that request's Idempotency-Key" in wrong_error(refused)["message"]
        invalid = await request(client, CHAT, {**body, "n": 0}, **own, **{"idempotency-key": "k-3"})
        assert wrong_error(invalid)
        frames(await request(client, CHAT, body, **own, **{"idempotency-key": "k-3"}))

        clock.advance(KEPT_SECONDS)
        late = await request(other, CHAT, body, last, **own)
        assert wrong_error(late, 404) == wrong_error(unknown, 404)
    assert f"kept for {KEPT_SECONDS:g} s" in wrong_error(late, 404)["message"]


async def test_a_stream_goes_on_with_the_tokens_that_are_kept(thinker: Tokenizer) -> None:
    """The second router computes the prompt with them, and nothing of a whole answer."""
    body = {**COMPLETION, "prompt": "ab", "n": 2}
    async with two_routers(thinker, TEXT, kept_answers=Forgetful(7)) as (_, client, router, other):
        whole = frames(await request(client, COMPLETE, body))
        rest = await request(other, COMPLETE, body, whole[3][0])
        specs = [job.spec for job in router.prefill.submitted]
    assert [(spec.epoch, spec.num_emitted_tokens) for spec in specs] == [(2, 7), (2, 7)]
    assert bytes(specs[0].token_ids) == b"ab" + TEXT.encode()[:7]
    assert rest.text.count(": x-baton-continuation: exact\n\n") == 1

    kept = MemoryKeptAnswers(ManualClock())
    async with two_routers(thinker, TEXT, kept_answers=kept) as (_, client, router, other):
        whole = frames(await request(client, COMPLETE, body))
        rest = await request(other, COMPLETE, body, whole[3][0])
        assert by_choice(whole[:4] + frames(rest)) == by_choice(whole)
    assert router.prefill.submitted == []


async def test_kept_tokens_that_can_not_be_the_answers_are_not_used(thinker: Tokenizer) -> None:
    kept = MemoryKeptAnswers(ManualClock())
    body = {**COMPLETION, "max_tokens": 9}
    async with two_routers(thinker, TEXT, kept_answers=kept) as (_, client, router, other):
        context = replace(router.model.generation_context, vocab_size=VOCAB)
        router.model.generation_context = context
        whole = frames(await request(client, COMPLETE, body))
        for data in (bytes([1, 0, 0, 0]) * 10, bytes([44, 1, 0, 0])):
            [entry] = kept.entries.values()
            entry.choices[0] = KeptTokens(data)
            rest = frames(await request(other, COMPLETE, body, whole[3][0]))
            assert whole[:4] + rest == whole
    assert [job.spec.epoch for job in router.prefill.submitted] == [1, 1]


async def test_a_later_connection_gets_the_answer(thinker: Tokenizer) -> None:
    """The first one ends with an error when its router next keeps the answer's tokens."""
    clock, body = ManualClock(), chat(stream=True)
    kept = MemoryKeptAnswers(clock)
    async with two_routers(thinker, TEXT, kept_answers=kept) as (_, other, router, client):
        stalled = asyncio.create_task(request(client, CHAT, body))
        await eventually(lambda: router.decode.jobs != [])
        router.decode.jobs.clear()  # it generates nothing more
        whole = frames(await request(other, CHAT, body))
        service = router.service.resumption
        assert service is not None
        await service.keep_all()
        ended = await stalled
    assert "another request with this Idempotency-Key has come" in ended.text
    assert len(whole) > ended.text.count("\nid: ") + 1
    assert '"code":"conflict"' in ended.text


def usage(*routers: RouterHarness) -> tuple[int, int, int]:
    """Return the requests, prompt tokens and answers' tokens that tenants were charged for."""
    total: Counter[UsageField] = Counter()
    for router in routers:
        for (_, _, field), count in router.service.tenants.usage_recorder.unsent().items():
            total[field] += count
    return total[UsageField.REQUESTS], total[UsageField.PROMPT], total[UsageField.COMPLETION]


NUM_TOKENS = len(TEXT.encode()) + 1
WHOLE = (1, 2, NUM_TOKENS)
FULL = {**COMPLETION, "max_tokens": 60}


async def test_an_answer_is_charged_once(thinker: Tokenizer) -> None:
    """Its router ends before it charges anything, or charges all of it."""
    for kept, charged in ((Forgetful(5), 0), (MemoryKeptAnswers(ManualClock()), 1)):
        async with two_routers(thinker, TEXT, kept_answers=kept) as (first, client, second, other):
            for stream in (True, False):
                body = {**FULL, "stream": stream}
                await request(client, COMPLETE, body, **{"idempotency-key": f"k-{stream}"})
                await request(other, COMPLETE, body, **{"idempotency-key": f"k-{stream}"})
            assert usage(first) == tuple(2 * count for count in WHOLE)
            assert usage(second) == tuple(2 * count * (not charged) for count in WHOLE)


async def test_a_client_that_left_is_charged_for_the_rest(thinker: Tokenizer) -> None:
    """A client that claims the answer before it has left the first router is charged there for
    nothing."""
    for leaves_first in (True, False):
        kept = MemoryKeptAnswers(ManualClock())
        async with two_routers(thinker, TEXT, kept_answers=kept) as (last, other, first, client):
            async with client.stream("POST", COMPLETE, json=FULL, headers=KEY) as answer:
                lines = answer.aiter_lines()
                while not (line := await anext(lines)).startswith("id: 9."):
                    pass
                first.decode.jobs.clear()  # it generates nothing more
                if not leaves_first:
                    rest = await request(other, COMPLETE, FULL, line[4:])
            await eventually(lambda: first.service.tenants.request_limiter.num_in_use == 0)
            if leaves_first:
                assert usage(first)[:2] == (1, 2) and 9 <= usage(first)[2] < NUM_TOKENS
                rest = await request(other, COMPLETE, FULL, line[4:])
            else:
                assert usage(first) == (0, 0, 0)
        assert len(frames(rest)) > 0
        assert usage(first, last) == WHOLE


async def test_an_answer_is_charged_also_if_nobody_continues_it(thinker: Tokenizer) -> None:
    """Its client claims it once more, for nothing, when it has read a part of it."""
    kept = MemoryKeptAnswers(ManualClock())
    async with two_routers(thinker, TEXT, kept_answers=kept) as (other, again, first, client):
        async with client.stream("POST", COMPLETE, json=FULL, headers=KEY) as answer:
            lines = answer.aiter_lines()
            while not (await anext(lines)).startswith("id: 9."):
                pass
            first.decode.jobs.clear()  # it generates nothing more
            refused = await request(again, COMPLETE, FULL, "nonsense")
            assert wrong_error(refused)["message"].startswith("Last-Event-ID is ")
            service = first.service.resumption
            assert service is not None
            await service.keep_all()
            assert '"code":"conflict"' in "".join([line async for line in lines])
        await eventually(lambda: first.service.tenants.request_limiter.num_in_use == 0)
        assert usage(other) == (0, 0, 0)
        assert usage(first)[:2] == (1, 2) and 9 <= usage(first)[2] < NUM_TOKENS


async def test_answers_are_not_kept_without_redis(thinker: Tokenizer) -> None:
    class Unreachable(MemoryKeptAnswers):
        async def claim(self, *_: Any) -> KeptAnswer | None:
            raise Unavailable("no Redis")

    kept = Unreachable(ManualClock())
    async with two_routers(thinker, TEXT, kept_answers=kept) as (_, client, _, _):
        plain = await request(client, CHAT, chat(stream=True))
        refused = await request(client, CHAT, chat(stream=True), "1.00000000")
    assert plain.status_code == 200 and "id: " not in plain.text
    assert wrong_error(refused, 503)


async def test_a_tenants_answers_have_a_limit(
    thinker: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for the first answer, but not for its choice, which is then not kept."""
    monkeypatch.setattr(resumption, "MAX_TENANT_KEPT_TOKENS", resumption.ENTRY_TOKENS + 6)
    kept = MemoryKeptAnswers(ManualClock())
    async with two_routers(thinker, TEXT, kept_answers=kept) as (router, client, _, other):
        service, clock = router.service.resumption, ManualClock()
        assert service is not None
        service._clock = clock
        whole = frames(await request(client, CHAT, chat(stream=True)))
        assert [entry.choices for entry in kept.entries.values()] == [{}]
        plain = await request(client, CHAT, chat(stream=True), **{"idempotency-key": "k-2"})
        assert "id: " not in plain.text
        rest = frames(await request(other, CHAT, chat(stream=True), whole[2][0]))
        assert whole[:3] + rest == whole
        clock.advance(60)
        await service.keep_all()
        assert service._buckets == {}
        frames(await request(client, CHAT, chat(stream=True), **{"idempotency-key": "k-2"}))


async def test_each_choice_takes_room(thinker: Tokenizer) -> None:
    kept = MemoryKeptAnswers(ManualClock())
    async with two_routers(thinker, TEXT, kept_answers=kept) as (router, client, _, _):
        service = router.service.resumption
        assert service is not None
        service._clock = ManualClock()
        frames(await request(client, CHAT, chat(stream=True, n=2)))
        [bucket] = service._buckets.values()
    [entry] = kept.entries.values()
    num_tokens = sum(choice.end for choice in entry.choices.values())
    assert len(entry.choices) == 2
    spent = bucket.spent(resumption.MAX_TENANT_KEPT_TOKENS, 0.0)
    assert spent == 3 * resumption.ENTRY_TOKENS + num_tokens


async def test_tokens_that_are_not_kept_take_no_room(
    thinker: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumption, "MAX_KEPT_TOKENS", 5)
    kept = MemoryKeptAnswers(ManualClock())
    async with two_routers(thinker, TEXT, kept_answers=kept) as (router, client, _, _):
        service = router.service.resumption
        assert service is not None
        service._clock = ManualClock()
        frames(await request(client, CHAT, chat(stream=True)))
        [bucket] = service._buckets.values()
    assert [entry.choices for entry in kept.entries.values()] == [{}]
    assert bucket.spent(resumption.MAX_TENANT_KEPT_TOKENS, 0.0) == resumption.ENTRY_TOKENS


@pytest.mark.parametrize(("ids", "expected"), [(True, ["a", "b"]), (False, ["a"])])
def test_the_documented_client_repeats_nothing(
    monkeypatch: pytest.MonkeyPatch, ids: bool, expected: list[str]
) -> None:
    """Its first connection breaks. A stream without ids comes from its beginning if it is asked
    for again."""
    got: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.headers.get("last-event-id"):
            return httpx.Response(200, text="id: 2\ndata: b\n\n")
        first = b"id: 1\ndata: a\n\n" if ids else b"data: a\n\n"
        return httpx.Response(200, stream=Broken(first))

    with httpx.Client(transport=httpx.MockTransport(handle)) as client:
        monkeypatch.setattr(httpx, "stream", client.stream)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        with nullcontext() if ids else pytest.raises(httpx.ReadError):
            for data in islice(documented_client()("http://router", {}), 5):
                got.append(data)
    assert got == expected


class Broken(httpx.SyncByteStream):
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __iter__(self) -> Iterator[bytes]:
        yield self._data
        raise httpx.ReadError("reset")
