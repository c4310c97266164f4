"""Tests the way of a forwarded request through the router, over workers in memory."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from baton.core.ids import Incarnation, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement, PlacementQuery
from baton.core.server_api import KNOWN_PATHS, ForwardedHead, ForwardRequest, ServerApi
from baton.core.states import Role, WorkerState
from baton.errors import BatonError, Invalid, NotFound, Overloaded, Unavailable
from baton.text.tokenizer import Tokenizer
from router.limits import MAX_WORKER_DEATHS
from router.tenants.usage_store import UsageField
from tests.router_harness import RouterHarness, eventually, member, tokenizer
from tests.unit.router.batch_harness import (
    BatchRouter,
    batch_line,
    jsonl,
    read_lines,
    start_batch,
    wait_until_finished,
)

__all__ = ["tokenizer"]
EMBEDDINGS = "/v1/embeddings"
ANSWER = json.dumps({"data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3}}).encode()
JSON = {"content-type": "application/json", "content-length": str(len(ANSWER))}

Script = Callable[[str, int], Iterable["Step"]]
Step = ForwardedHead | bytes | BatonError
ONE = Incarnation(1)
WHOLE: list[Step] = [ForwardedHead(200, JSON), ANSWER]


class ScriptedClient:
    """Answers the requests to each worker as ``script`` says; ``asked`` are those workers."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.asked: list[str] = []
        self.requests: list[ForwardRequest] = []
        self.goes_on = False
        """True if its answers don't end."""

    async def forward(
        self, address: str, request: ForwardRequest
    ) -> AsyncGenerator[ForwardedHead | bytes]:
        self.asked.append(address.partition(":")[0])
        self.requests.append(request)
        for step in self._script(self.asked[-1], len(self.asked)):
            if isinstance(step, BatonError):
                raise step
            yield step
        if self.goes_on:
            await asyncio.Event().wait()


class FirstPlacer:
    """Places each request on the first worker that is not excluded."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self.queries: list[PlacementQuery] = []

    async def place(self, query: PlacementQuery) -> Placement:
        self.queries.append(query)
        for name in self._names:
            if WorkerId(name) not in query.excluded:
                return Placement(None, WorkerRef(WorkerId(name), f"{name}:1", ONE), "first")
        raise Unavailable("no worker is left")


class Forwarding:
    """A router over workers with servers, of which the last one offers nothing but tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script,
        root: Path | None = None,
    ) -> None:
        self.client = ScriptedClient(script)
        names = ["m0", "m1", "m2", "plain"]
        self.placer = FirstPlacer([names[-1], *names[:-1]])
        self.batches = None if root is None else BatchRouter(tokenizer, root)
        self.router = self.batches.router if self.batches else RouterHarness(tokenizer, "x", True)
        self.router.members.list = [
            member(name, Role.MIXED, server_api=ServerApi(f"served-{name}", KNOWN_PATHS))
            for name in names[:-1]
        ] + [member("plain", Role.MIXED)]
        self.router.service.forward_client = self.client  # type: ignore[assignment]
        model = self.router.model
        model.generation_context = replace(model.generation_context, placer=self.placer)

    async def post(self, body: dict[str, Any], path: str = EMBEDDINGS) -> httpx.Response:
        async with await self.router.client() as client:
            return await client.post(path, json=body)


def whole(worker: str, number: int) -> list[Step]:
    return WHOLE


async def test_a_request_goes_to_a_worker_that_offers_its_path(tokenizer: Tokenizer) -> None:
    forwarding = Forwarding(tokenizer, whole)
    response = await forwarding.post({"model": "demo", "input": "hello"})
    assert (response.status_code, response.content) == (200, ANSWER)
    assert response.headers["x-baton-decode"] == "m0"
    [query], [request] = forwarding.placer.queries, forwarding.client.requests
    assert query.excluded == {"plain"}
    assert (query.max_new_tokens, query.block_keys, query.num_tokens) == (1, (), 3)
    assert json.loads(request.body)["model"] == "served-m0"
    [record] = forwarding.router.service.telemetry.history.finished
    assert (record.num_prompt_tokens, record.finish_reason) == (3, "stop")


async def test_chats_with_images_are_placed_by_their_parts(tokenizer: Tokenizer) -> None:
    forwarding = Forwarding(tokenizer, whole)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]
    for content in ("b", "c"):
        more = [*messages, {"role": "user", "content": content}]
        await forwarding.post({"messages": more}, "/v1/chat/completions")
    first, second = (query.block_keys for query in forwarding.placer.queries)
    assert len(first) == len(second) == 3
    assert (first[:2], first[2] == second[2]) == (second[:2], False)
    assert forwarding.placer.queries[0].num_tokens >= 3 * 4  # a block for each key


async def test_each_answer_of_a_chat_takes_a_slot(tokenizer: Tokenizer) -> None:
    in_use: list[int] = []

    def count(worker: str, number: int) -> list[Step]:
        in_use.append(forwarding.router.service.tenants.request_limiter.num_in_use)
        return WHOLE

    forwarding = Forwarding(tokenizer, count)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    chat = {"messages": [{"role": "user", "content": [image]}], "n": 3}
    assert (await forwarding.post(chat, "/v1/chat/completions")).status_code == 200
    assert in_use == [3]
    assert forwarding.router.service.tenants.request_limiter.num_in_use == 0


@pytest.mark.parametrize("error", [Unavailable("gone"), NotFound("not here"), Overloaded("full")])
async def test_another_worker_is_asked_before_the_answer_begins(
    tokenizer: Tokenizer, error: BatonError
) -> None:
    forwarding = Forwarding(tokenizer, lambda worker, _: [error] if worker == "m0" else WHOLE)
    with capture_logs() as logs:
        response = await forwarding.post({"input": "hello"})
    assert (response.status_code, forwarding.client.asked) == (200, ["m0", "m1"])
    [entry] = [each for each in logs if each["event"] == "request_fails_over"]
    assert (entry["excluded"], entry["epoch"]) == (["m0"], 2)


async def test_a_request_ends_once_it_may_have_killed_two_servers(tokenizer: Tokenizer) -> None:
    forwarding = Forwarding(tokenizer, lambda *_: [Unavailable("died")])
    response = await forwarding.post({"input": "hello"})
    assert (response.status_code, len(forwarding.client.asked)) == (503, MAX_WORKER_DEATHS)
    assert response.json()["error"]["message"].endswith("the last failure: died")


async def test_workers_that_do_not_serve_are_not_counted(tokenizer: Tokenizer) -> None:
    forwarding = Forwarding(
        tokenizer, lambda worker, _: WHOLE if worker == "m2" else [NotFound("draining")]
    )
    response = await forwarding.post({"input": "hello"})
    assert (response.status_code, forwarding.client.asked) == (200, ["m0", "m1", "m2"])


async def test_what_no_other_server_would_do_better_is_not_repeated(tokenizer: Tokenizer) -> None:
    forwarding = Forwarding(tokenizer, lambda *_: [Invalid("odd")])
    response = await forwarding.post({"input": "hello"})
    assert (response.status_code, len(forwarding.client.asked)) == (400, 1)


async def test_nothing_is_repeated_after_the_answer_has_begun(tokenizer: Tokenizer) -> None:
    head = ForwardedHead(200, {"content-type": "text/event-stream"})
    forwarding = Forwarding(tokenizer, lambda *_: [head, b"data: 1\n\n", Unavailable("broke")])
    response = await forwarding.post({"input": "hello"})
    assert len(forwarding.client.asked) == 1
    first, error, end = response.text.split("\n\n")
    assert (first, end) == ("data: 1", "")
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "broke"
    [record] = forwarding.router.service.telemetry.history.finished
    assert (record.finish_reason, record.error) == ("error", "broke")
    assert (record.num_tokens, record.cached_tokens) == (1, None)  # the prompt costs nothing


async def test_a_client_that_leaves_is_charged_for_the_events_that_came(
    tokenizer: Tokenizer,
) -> None:
    head = ForwardedHead(200, {"content-type": "text/event-stream"})
    forwarding = Forwarding(tokenizer, lambda *_: [head, *[b'data: {"choices":[1]}\n\n'] * 3])
    forwarding.client.goes_on = True
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    chat = {"messages": [{"role": "user", "content": [image]}], "stream": True}
    tenants, finished = (
        forwarding.router.service.tenants,
        forwarding.router.service.telemetry.history.finished,
    )
    async with (
        await forwarding.router.client() as client,
        client.stream("POST", "/v1/chat/completions", json=chat) as answer,
    ):
        lines = answer.aiter_lines()
        for _ in range(5):
            await anext(lines)
    await eventually(lambda: len(finished) == 1)
    [record] = finished
    assert (record.finish_reason, record.num_tokens) == ("cancelled", 3)
    await eventually(lambda: tenants.request_limiter.num_in_use == 0)
    charged = {field: count for (_, _, field), count in tenants.usage_recorder.unsent().items()}
    assert charged[UsageField.COMPLETION] == 3


async def test_a_client_that_leaves_with_its_answer_is_charged_what_the_server_counted(
    tokenizer: Tokenizer,
) -> None:
    """The client closes its connection before the server has ended the answer."""
    forwarding = Forwarding(tokenizer, whole)
    forwarding.client.goes_on = True
    finished = forwarding.router.service.telemetry.history.finished
    async with (
        await forwarding.router.client() as client,
        client.stream("POST", EMBEDDINGS, json={"input": "hello" * 100}) as answer,
    ):
        assert await anext(answer.aiter_bytes()) == ANSWER
    await eventually(lambda: len(finished) == 1)
    [record] = finished
    assert (record.num_prompt_tokens, record.cached_tokens) == (3, 0)


async def test_a_refusal_of_the_server_costs_no_tokens(tokenizer: Tokenizer) -> None:
    refused: list[Step] = [ForwardedHead(422, {"content-type": "text/plain"}), b"no"]
    forwarding = Forwarding(tokenizer, lambda *_: refused)
    response = await forwarding.post({"input": "hello"})
    assert (response.status_code, response.text) == (422, "no")
    [record] = forwarding.router.service.telemetry.history.finished
    assert (record.finish_reason, record.cached_tokens) == ("error", None)


async def test_without_ready_workers_the_client_may_retry(tokenizer: Tokenizer) -> None:
    forwarding = Forwarding(tokenizer, whole)
    forwarding.router.members.list = []
    assert (await forwarding.post({"input": "hello"})).status_code == 503


async def test_a_request_waits_for_servers_that_may_soon_be_ready(tokenizer: Tokenizer) -> None:
    """They drain while they compute nothing, and it is known what they will offer then."""
    forwarding = Forwarding(tokenizer, whole)
    ready = forwarding.router.members.list
    paused = forwarding.router.members.list = [
        replace(each, state=WorkerState.DRAINING) for each in ready
    ]
    async with await forwarding.router.client() as client:
        listed = (await client.get("/v1/models")).json()["data"][0]["capabilities"]
        assert EMBEDDINGS in listed
        response = await client.post(EMBEDDINGS, json={"input": "hello"})
        assert (response.status_code, forwarding.client.asked) == (503, [])
        config = forwarding.router.model.generation_context.config
        forwarding.router.model.generation_context = replace(
            forwarding.router.model.generation_context,
            config=replace(config, max_worker_wait_seconds=30.0),
        )
        waiting = asyncio.create_task(client.post(EMBEDDINGS, json={"input": "hello"}))
        while forwarding.router.service.tenants.request_limiter.num_in_use == 0:
            await asyncio.sleep(0)
        forwarding.router.members.list = [ready[0], *paused[1:-1], ready[-1]]
        await forwarding.router.service.cluster.refresh()
        response = await waiting
    assert (response.status_code, forwarding.client.asked) == (200, ["m0"])


async def test_embeddings_may_come_in_a_batch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    other: list[Step] = [ForwardedHead(200, {"content-type": "application/octet-stream"}), b"\n"]
    forwarding = Forwarding(tokenizer, lambda _, number: WHOLE if number == 1 else other, tmp_path)
    assert forwarding.batches is not None
    lines = [batch_line(name, EMBEDDINGS, input="hello") for name in ("a", "b")]
    async with forwarding.batches.open() as client:
        batch = await start_batch(client, jsonl(*lines), endpoint=EMBEDDINGS)
        done = await wait_until_finished(client, batch)
        output = await read_lines(client, done["output_file_id"])
        errors = await read_lines(client, done["error_file_id"])
    assert [each["response"]["body"] for each in output] == [json.loads(ANSWER)]
    assert "must be JSON" in errors[0]["response"]["body"]["error"]["message"]


@pytest.mark.parametrize("error", [Unavailable("broke"), Invalid("odd")])
async def test_an_answer_that_breaks_off_is_none_in_a_batch(
    tokenizer: Tokenizer, tmp_path: Path, error: BatonError
) -> None:
    broken: list[Step] = [ForwardedHead(200, JSON), ANSWER[:10], error]
    forwarding = Forwarding(tokenizer, lambda _, number: WHOLE if number > 1 else broken, tmp_path)
    assert forwarding.batches is not None
    line = batch_line("a", EMBEDDINGS, input="hello")
    async with forwarding.batches.open() as client:
        batch = await start_batch(client, jsonl(line), endpoint=EMBEDDINGS)
        done = await wait_until_finished(client, batch)
        [result] = await read_lines(client, done["output_file_id"] or done["error_file_id"])
    if isinstance(error, Invalid):
        assert result["response"]["body"]["error"]["message"] == "odd"
    else:
        assert result["response"]["body"] == json.loads(ANSWER)


async def test_an_answer_in_a_batch_has_a_limit(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Its bytes count as those of the request's body until its end."""
    in_use: list[int] = []

    def count(worker: str, number: int) -> Iterator[Step]:
        yield ForwardedHead(200, JSON)
        for _ in range(10):
            in_use.append(budget.num_in_use)
            yield b" " * 2**20

    forwarding = Forwarding(tokenizer, count, tmp_path)
    assert forwarding.batches is not None
    budget = forwarding.router.service.resources.body_budget
    line = batch_line("a", EMBEDDINGS, input="hello")
    async with forwarding.batches.open() as client:
        batch = await start_batch(client, jsonl(line), endpoint=EMBEDDINGS)
        done = await wait_until_finished(client, batch)
        [result] = await read_lines(client, done["error_file_id"])
    message = result["response"]["body"]["error"]["message"]
    assert message == "in a batch, an answer may have at most 8388608 bytes: split the request"
    assert [round(num_bytes / 2**20) for num_bytes in in_use] == [*range(9)]
    assert budget.num_in_use == 0
