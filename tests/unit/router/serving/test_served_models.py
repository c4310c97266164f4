"""Tests that a router with several models serves each by its own workers, names and limits."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from baton.clock import SystemClock
from baton.core.api_key import api_key_digest
from baton.core.ids import TenantId
from baton.core.states import Role, WorkerState
from baton.text.tokenizer import Tokenizer
from router.app import build_app
from router.generation.generation_context import FailoverConfig, GenerationContext
from router.serving.served_model import ModelDirectory, ServedModel
from router.tenants.fair_turns import FairTurns
from router.tenants.tenant import DEFAULT_TENANT, Tenant
from router.tenants.tenant_directory import build_tenant_directory
from testkit.fakes.workers import FakeWorker, MemoryPlacer, MemoryWorkerConnections
from tests import router_harness
from tests.http_transport import HttpServerTransport
from tests.router_harness import (
    CHAT,
    COMPLETE,
    EOS,
    RESPOND,
    USER,
    VOCAB,
    RouterHarness,
    member,
    model_saying,
)

tokenizer = router_harness.tokenizer

OTHER = "other"


class TwoModels:
    """A router that serves ``demo``, which says "demo", and ``other``, which says "other" and has
    a context of 32 tokens."""

    def __init__(self, tokenizer: Tokenizer, automatic: bool = True, **settings: Any) -> None:
        self.router = RouterHarness(tokenizer, "demo", automatic, **settings)
        self.prefill = FakeWorker("p1", model_saying(OTHER), eos=EOS, automatic=True)
        self.decode = FakeWorker("d1", model_saying(OTHER), eos=EOS, automatic=True)
        placer = MemoryPlacer([self.prefill], [self.decode])
        links = MemoryWorkerConnections(self.prefill, self.decode)
        clock, config = SystemClock(), FailoverConfig(max_worker_wait_seconds=0.05)
        model = ServedModel.build(
            tokenizer,
            self.router.service.cluster.workers_of(OTHER, 32),
            GenerationContext(placer, links, clock, config),
            vocab_size=VOCAB,
        )
        context = self.router.service
        context.models = ModelDirectory(
            [*context.models.all, model], context.config.max_concurrent_requests
        )
        self.router.members.list += [
            member(name, role, model=OTHER)
            for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE))
        ]

    def drain(self, model: str) -> None:
        """Let all workers of a model drain."""
        self.router.members.list = [
            replace(each, state=WorkerState.DRAINING) if each.model == model else each
            for each in self.router.members.list
        ]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[httpx.AsyncClient]:
        await self.router.service.cluster.refresh()
        transport = HttpServerTransport(build_app(self.router.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
        assert self.router.service.models.limiter.num_in_use == 0


def named(model: str | None, **fields: Any) -> dict[str, Any]:
    return {"messages": USER, **({} if model is None else {"model": model}), **fields}


async def test_each_model_answers_its_own_requests(tokenizer: Tokenizer) -> None:
    two = TwoModels(tokenizer)
    async with two.open() as client:
        for name, expected in (("demo", "demo"), (OTHER, OTHER), (None, "demo")):
            answer = (await client.post(CHAT, json=named(name))).json()
            assert answer["model"] == expected
            assert answer["choices"][0]["message"]["content"] == expected
        metrics = (await client.get("/metrics")).text
        for name, count in (("demo", 2), (OTHER, 1)):
            assert f'baton_time_to_first_token_seconds_count{{model="{name}"}} {count}.0' in metrics


async def test_models_are_listed_with_their_own_contexts(tokenizer: Tokenizer) -> None:
    async with TwoModels(tokenizer).open() as client:
        listed = (await client.get("/v1/models")).json()
        assert [(each["id"], each["max_model_len"]) for each in listed["data"]] == [
            ("demo", 64),
            (OTHER, 32),
        ]
        assert (await client.get(f"/v1/models/{OTHER}")).json() == listed["data"][1]
        body = {"model": OTHER, "prompt": [1] * 40}
        error = (await client.post("/v1/completions", json=body)).json()["error"]
        assert "32" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": USER}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": USER}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/responses/input_tokens", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_unknown_models_are_refused_with_the_known_ones(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any]
) -> None:
    async with TwoModels(tokenizer).open() as client:
        response = await client.post(path, json={"model": "third", **fields})
        assert response.status_code == 404
        message = response.json()["error"]["message"]
        assert message == "The model 'third' does not exist; this server has 'demo', 'other'"
        assert (await client.post(path, json={"model": OTHER, **fields})).status_code == 200


async def test_a_path_that_two_models_share_names_none_of_them(tokenizer: Tokenizer) -> None:
    two = TwoModels(tokenizer)
    context = two.router.service
    for model in context.models.all:
        model.aliases = frozenset({"/models/demo", f"/models/only-{model.name}"})
    context.models = ModelDirectory(context.models.all, 8)
    async with two.open() as client:
        answer = await client.post(CHAT, json=named("/models/only-other"))
        assert answer.json()["model"] == OTHER
        assert (await client.post(CHAT, json=named("/models/demo"))).status_code == 404


async def test_tenants_see_only_their_models(tokenizer: Tokenizer) -> None:
    two = TwoModels(tokenizer)
    tenants = {
        TenantId("a"): Tenant(TenantId("a"), models=frozenset({OTHER})),
        TenantId("b"): Tenant(TenantId("b"), models=frozenset({"gone"})),
        TenantId("c"): Tenant(TenantId("c")),
    }
    keys = [(api_key_digest(f"key-{name}"), name) for name in tenants]
    directory = build_tenant_directory(tenants, keys, needs_keys=True)
    two.router.service.tenants.authenticator.set_directory(directory)

    def headers(name: str) -> dict[str, str]:
        return {"authorization": f"Bearer key-{name}"}

    async with two.open() as client:
        for name, models in (("a", [OTHER]), ("b", []), ("c", ["demo", OTHER])):
            listed = (await client.get("/v1/models", headers=headers(name))).json()
            assert [each["id"] for each in listed["data"]] == models
        answer = await client.post(CHAT, json=named(None), headers=headers("a"))
        assert answer.json()["model"] == OTHER
        refused = await client.post(CHAT, json=named("demo"), headers=headers("a"))
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            404,
            "The model 'demo' does not exist; this server has 'other'",
        )
        assert (await client.get("/v1/models/demo", headers=headers("a"))).status_code == 404
        refused = await client.post(CHAT, json=named(None), headers=headers("b"))
        assert (refused.status_code, "no model for this API key" in refused.text) == (404, True)


async def test_a_model_that_is_overloaded_leaves_room_for_the_other(tokenizer: Tokenizer) -> None:
    """The workers of ``demo`` don't answer, so its requests fill what one model may use. Those for
    the other model are still answered."""
    two = TwoModels(tokenizer, automatic=False, max_concurrent_requests=8)
    async with two.open() as client, asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(client.post(CHAT, json=named("demo"))) for _ in range(6)]
        while two.router.service.models.limiter.num_in_use < 6:
            await asyncio.sleep(0)
        refused = await client.post(CHAT, json=named("demo"))
        assert refused.status_code == 429
        assert "is reserved for other models" in refused.json()["error"]["message"]
        answer = await client.post(CHAT, json=named(OTHER))
        assert answer.json()["choices"][0]["message"]["content"] == OTHER
        for each in waiting:
            each.cancel()
        while two.router.service.models.limiter.num_in_use:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": USER, "max_tokens": 1}),
        (COMPLETE, {"prompt": "Hi", "max_tokens": 1}),
        (f"{RESPOND}/input_tokens", {"input": "Hi"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": USER}),
        ("/tokenize", {"prompt": "Hi"}),
    ],
)
async def test_tokenising_takes_a_turn_of_the_requests_model(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    turns: list[tuple[str, str, int]] = []

    async def wait(turns_: FairTurns, model: str, tenant: TenantId, size_bytes: int) -> None:
        turns.append((model, tenant, size_bytes))

    monkeypatch.setattr(FairTurns, "wait", wait)
    body = json.dumps({"model": OTHER, **fields})
    headers = {"content-type": "application/json"}
    async with TwoModels(tokenizer).open() as client:
        answer = await client.post(path, content=body, headers=headers)
    assert answer.status_code == 200
    assert turns == [(OTHER, DEFAULT_TENANT, len(body))]


async def test_readiness_names_the_models_without_workers(tokenizer: Tokenizer) -> None:
    two = TwoModels(tokenizer)
    async with two.open() as client:
        assert (await client.get("/ready")).json() == {"ready": True}
        two.drain(OTHER)
        await two.router.service.cluster.refresh()
        response = await client.get("/ready")
        assert (response.status_code, response.json()) == (
            200,
            {"ready": True, "models": {"demo": True, OTHER: False}},
        )
        two.drain("demo")
        await two.router.service.cluster.refresh()
        assert (await client.get("/ready")).status_code == 503
