"""Tests how a router resolves, lists, loads and unloads LoRA adapters."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.checkpoints.adapter_checkpoint import adapter_digest
from baton.checkpoints.checkpoint import DEMO_MODEL, load_model_config
from baton.clock import ManualClock
from baton.core.adapter import AdapterEntry, AdapterRef, WorkerAdapter
from baton.core.api_key import api_key_digest
from baton.core.block_key import KeyRoot, block_keys
from baton.core.ids import Epoch, RequestId, TenantId
from baton.core.member import Member
from baton.core.placement import PlacementQuery
from baton.core.states import Role
from baton.errors import Invalid, Unavailable
from baton.registry.membership import REJOIN_SECONDS
from baton.text.tokenizer import Tokenizer
from router.generation.adapter_directory import AdapterDirectory
from router.generation.cluster import Cluster
from router.generation.ring_placer import RingPlacer
from router.tenants.tenant import Tenant
from router.tenants.tenant_directory import build_tenant_directory
from testkit.fakes.adapter_registry import MemoryAdapterRegistry
from tests import router_harness
from tests.router_harness import CHAT, COMPLETE, USER, RouterHarness, StaticMembers, member

tokenizer = router_harness.tokenizer

OLD, NEW = b"old".ljust(16), b"new".ljust(16)
SQL = AdapterEntry("sql", "/adapters/sql", OLD, "demo")


def loaded(name: str, digest: bytes = OLD, **fields: Any) -> WorkerAdapter:
    return WorkerAdapter(name, digest, **fields)


def read_digest(model: str, path: Path) -> bytes:
    """Stand in for the router's reading of the folder."""
    if path.name == "broken":
        raise Invalid(f"{path} is broken")
    if len(path.name) > 1000:
        return adapter_digest(path, load_model_config(DEMO_MODEL), 16)
    return NEW if path.name == "new" else OLD


class AdapterRouter:
    """A router with the workers ``p0`` and ``d0``, which announce ``adapters``."""

    def __init__(self, tokenizer: Tokenizer, *adapters: WorkerAdapter) -> None:
        self.router = RouterHarness(tokenizer, "demo", automatic=True)
        self.registry = MemoryAdapterRegistry()
        self.announce(*adapters)
        self.directory = AdapterDirectory(
            self.router.service.cluster, self.registry, self.router.service.clock, read_digest
        )
        self.router.service.models.adapters = self.directory

    def announce(self, *adapters: WorkerAdapter) -> None:
        self.router.members.list = [
            member(name, role, adapters=adapters)
            for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE))
        ]

    @asynccontextmanager
    async def open(self, *entries: AdapterEntry) -> AsyncIterator[httpx.AsyncClient]:
        for entry in entries:
            await self.registry.put_adapter(entry)
        await self.directory.refresh()
        async with await self.router.client() as client:
            yield client


async def test_request_for_an_adapter_is_placed_with_its_keys(tokenizer: Tokenizer) -> None:
    served = AdapterRouter(tokenizer, loaded("sql"))
    async with served.open(SQL) as client:
        for model in ("sql", "demo"):
            body = {"model": model, "prompt": [1, 2, 3, 4, 5], "max_tokens": 2}
            answer = (await client.post(COMPLETE, json=body)).json()
            assert answer["model"] == model
    of_adapter, of_base = served.router.placer.queries
    assert (of_adapter.adapter, of_base.adapter) == (AdapterRef("sql", OLD), None)
    assert (of_adapter.model, of_base.model) == ("demo", "demo")
    for query, adapter in ((of_adapter, OLD.hex()), (of_base, "")):
        root = KeyRoot(bytes.fromhex("ab"), "f32", 4, adapter, _salt(served))
        assert list(query.block_keys) == block_keys(root.key(), [1, 2, 3, 4, 5], 4)


def _salt(served: AdapterRouter) -> bytes:
    tenants = served.router.service.tenants.authenticator.directory
    tenant = next(iter(served.router.placer.queries)).tenant
    return tenants.tenant(tenant).attributes(None, None, 0).salt


async def test_adapters_are_listed_with_their_parent(tokenizer: Tokenizer) -> None:
    served = AdapterRouter(tokenizer, loaded("sql"), loaded("own", in_settings=True))
    async with served.open(SQL, replace(SQL, name="elsewhere", model="unknown")) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        parents = [(each["id"], each.get("parent")) for each in listed]
        assert parents == [("demo", None), ("own", "demo"), ("sql", "demo")]
        assert (await client.get("/v1/models/sql")).json() == listed[2]
        assert (await client.get("/v1/models/elsewhere")).status_code == 404


async def test_unknown_name_is_not_found(tokenizer: Tokenizer) -> None:
    """An adapter that workers still announce, but that was removed, no longer exists."""
    async with AdapterRouter(tokenizer, loaded("removed")).open() as client:
        response = await client.post(CHAT, json={"model": "removed", "messages": USER})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("announced", "reason"),
    [
        ((), "no worker has loaded it yet"),
        ((loaded("sql", error="/adapters/sql: the file is missing"),), "no worker can load it"),
    ],
)
async def test_adapter_that_no_worker_has_loaded_is_unavailable(
    tokenizer: Tokenizer, announced: tuple[WorkerAdapter, ...], reason: str
) -> None:
    async with AdapterRouter(tokenizer, *announced).open(SQL) as client:
        response = await client.post(CHAT, json={"model": "sql", "messages": USER})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "2"
        assert response.json()["error"]["message"] == f"the adapter sql is not loaded: {reason}"


async def test_new_weights_are_used_once_a_worker_has_them(tokenizer: Tokenizer) -> None:
    served = AdapterRouter(tokenizer, loaded("sql", OLD))
    async with served.open(replace(SQL, digest=NEW)):
        adapter = served.directory.find("sql")
        assert adapter is not None and adapter.ref.digest == OLD
        served.announce(loaded("sql", NEW))
        await served.router.service.cluster.refresh()
        adapter = served.directory.find("sql")
        assert adapter is not None and adapter.ref.digest == NEW


async def test_tenants_see_the_adapters_of_their_models(tokenizer: Tokenizer) -> None:
    served = AdapterRouter(tokenizer, loaded("sql"), loaded("own", in_settings=True))
    tenants = {
        TenantId(name): Tenant(TenantId(name), models=models)
        for name, models in (
            ("all", None),
            ("base", frozenset({"demo"})),
            ("one", frozenset({"sql"})),
            ("none", frozenset({"other"})),
        )
    }
    keys = [(api_key_digest(f"key-{name}"), name) for name in tenants]
    directory = build_tenant_directory(tenants, keys, needs_keys=True)
    served.router.service.tenants.authenticator.set_directory(directory)
    async with served.open(SQL) as client:
        for name, models in (
            ("all", ["demo", "own", "sql"]),
            ("base", ["demo", "own", "sql"]),
            ("one", ["sql"]),
            ("none", []),
        ):
            headers = {"authorization": f"Bearer key-{name}"}
            listed = (await client.get("/v1/models", headers=headers)).json()["data"]
            assert [each["id"] for each in listed] == models
            body = {"model": "own", "messages": USER}
            status = (await client.post(CHAT, json=body, headers=headers)).status_code
            assert status == (200 if "own" in models else 404)


async def test_admin_loads_lists_and_unloads(tokenizer: Tokenizer) -> None:
    served = AdapterRouter(tokenizer, loaded("sql"), loaded("own", in_settings=True))
    async with served.open(SQL) as client:
        body = {"name": "sql", "path": "/adapters/sql"}
        described = (await client.post("/admin/adapters", json=body)).json()
        assert described == {
            "name": "sql", "model": "demo", "path": "/adapters/sql", "digest": OLD.hex(),
            "loaded_on": ["d0", "p0"], "errors": {},
        }  # fmt: skip
        assert await served.registry.adapters() == [SQL]
        listed = (await client.get("/admin/adapters")).json()["adapters"]
        assert [each["name"] for each in listed] == ["own", "sql"]
        assert (await client.delete("/admin/adapters/own")).status_code == 409
        assert (await client.delete("/admin/adapters/sql")).json()["deleted"]
        assert (await client.delete("/admin/adapters/sql")).status_code == 404
        assert await served.registry.adapters() == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"name": "x", "path": "/broken"}, "/broken is broken"),
        ({"name": "x", "path": "/" + "x" * 3000}, "File name too long: /xxx"),
        ({"name": "x", "path": "x"}, "must be absolute"),
        ({"name": "x", "path": "/x", "model": "other"}, "the model 'other' does not exist"),
        ({"name": "demo", "path": "/x"}, "demo is the name of a model"),
        ({"name": "a b", "path": "/x"}, "the name must begin"),
        ({"name": "x"}, "the body must be like"),
        ({"name": 1, "path": "/x"}, "the body must be like"),
    ],
)
async def test_wrong_admin_requests_are_refused(
    tokenizer: Tokenizer, body: dict[str, Any], reason: str
) -> None:
    served = AdapterRouter(tokenizer)
    async with served.open() as client:
        response = await client.post("/admin/adapters", json=body)
        assert response.status_code == 400
        assert reason in response.json()["error"]["message"]
        assert await served.registry.adapters() == []


async def test_admin_calls_need_the_admin_key(tokenizer: Tokenizer) -> None:
    served = AdapterRouter(tokenizer)
    async with served.open() as client:
        for method, path in (
            ("GET", "/admin/adapters"),
            ("POST", "/admin/adapters"),
            ("DELETE", "/admin/adapters/x"),
            ("POST", "/v1/load_lora_adapter"),
            ("POST", "/v1/unload_lora_adapter"),
        ):
            headers = {"origin": "http://elsewhere.example"}
            assert (await client.request(method, path, headers=headers)).status_code == 403


async def test_adapters_survive_the_loss_of_the_registrys_data() -> None:
    clock, registry = ManualClock(), MemoryAdapterRegistry()
    directory = AdapterDirectory(Cluster(StaticMembers([]), clock), registry, clock, read_digest)
    await registry.put_adapter(SQL)
    await directory.refresh()
    registry.database_id = "another"
    await registry.remove_adapter("sql")
    await directory.refresh()
    assert await registry.adapters() == [SQL]
    await registry.remove_adapter("sql")  # by another router
    await directory.refresh()
    assert directory.find("sql") is not None
    clock.advance(REJOIN_SECONDS)
    await directory.refresh()
    assert directory.find("sql") is None


async def test_adapter_that_was_just_removed_does_not_count_as_loaded(tokenizer: Tokenizer) -> None:
    """The request waits until the workers' old announcement is gone, and then for a new one."""
    served = AdapterRouter(tokenizer, loaded("sql"))
    async with served.open() as client:
        request = asyncio.create_task(
            client.post("/admin/adapters", json={"name": "sql", "path": "/adapters/sql"})
        )
        await asyncio.sleep(0.2)
        assert await served.registry.adapters() == []
        served.announce()
        await served.router.service.cluster.refresh()
        while await served.registry.adapters() == []:
            await asyncio.sleep(0.01)
        assert not request.done()
        served.announce(loaded("sql"))
        await served.router.service.cluster.refresh()
        assert (await request).json()["loaded_on"] == ["d0", "p0"]


async def test_ring_places_only_where_the_adapter_is_loaded() -> None:
    workers = [
        member(f"{role.value}-{number}", role, adapters=(loaded("sql"),) if number % 2 else ())
        for role in (Role.PREFILL, Role.DECODE)
        for number in range(4)
    ]
    placer = await ring_over(workers)
    for number in range(20):
        placement = await placer.place(query(f"r{number}", AdapterRef("sql", OLD)))
        assert {worker.id[-1] for worker in placement.workers} <= {"1", "3"}
    with pytest.raises(Unavailable, match="no worker has loaded the adapter sql"):
        await placer.place(query("r", AdapterRef("sql", NEW)))


async def ring_over(workers: list[Member]) -> RingPlacer:
    cluster = Cluster(StaticMembers(workers), ManualClock())
    await cluster.refresh()
    return RingPlacer(cluster.workers_of("demo", 64))


def query(name: str, adapter: AdapterRef) -> PlacementQuery:
    return PlacementQuery(
        RequestId(name), Epoch(1), TenantId(""), 64, 16, (), frozenset(), model="demo",
        adapter=adapter,
    )  # fmt: skip
