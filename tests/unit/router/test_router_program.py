"""Tests the router as a process: startup, serving over real sockets, drain, stop, and tenant
salts."""

import asyncio
import json
import resource
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from baton.clock import SystemClock
from baton.config import Settings
from baton.core.ids import TenantId
from baton.core.member import Member
from baton.core.request import FinishReason
from baton.core.states import Role, WorkerState
from baton.core.task import Task
from baton.core.tenant import tenant_salt
from baton.errors import Unavailable
from baton.network.free_port import free_port
from baton.network.pinned_tls import pinned_tls_context
from baton.serve.lifecycle import Lifecycle, ProgramState
from orchestrator.preflight import router_obstacle
from router.http.listeners import connection_limits, raise_open_file_limit
from router.limits import RESERVED_OPEN_FILES
from router.program import WORKER_POLL_SECONDS, RouterProgram
from testkit.fakes.registry import MemoryRegistry
from tests import certificates
from tests.router_harness import write_tokenizer
from tests.unit.router.http.test_router_connections import framed_worker as worker
from tests.unit.router.http.test_router_connections import member, output

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8,
    "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 300, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "eos_token_id": 257, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (write_tokenizer(tmp_path) / "config.json").write_text(json.dumps(CONFIG))
    return Settings(model=str(tmp_path), redis_url="redis://127.0.0.1:9/0", port=0, id="router-7")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> MemoryRegistry:
    """An in-memory registry, in place of the router's Redis. The fixture also keeps the router from
    changing the garbage collector's settings, since other tests run in this process."""
    monkeypatch.setattr("router.program.tune_garbage_collector", lambda: None)
    fake = MemoryRegistry(SystemClock())
    monkeypatch.setattr("router.program.RedisRegistry", lambda *_: fake)
    return fake


async def router_in(registry: MemoryRegistry) -> Member | None:
    return next((m for m in await registry.members() if m.role is Role.ROUTER), None)


async def wait_until_ready(registry: MemoryRegistry) -> None:
    async with asyncio.timeout(60):
        while (me := await router_in(registry)) is None or me.state is not WorkerState.READY:
            await asyncio.sleep(0.01)


async def test_router_serves_and_drains(settings: Settings, registry: MemoryRegistry) -> None:
    async with worker() as (core, ref, _), httpx.AsyncClient() as client:
        await registry.announce(
            member("w", Role.DECODE, framed_address=ref.framed_address, model=settings.model_name),
            60,
        )
        program = RouterProgram(settings)
        lifecycle = Lifecycle(program, 5)
        living = asyncio.create_task(lifecycle.run())
        await wait_until_ready(registry)
        me = await router_in(registry)
        assert me is not None
        assert (me.id, me.address) == ("router-7", program.address)
        url = f"http://{program.address}"
        assert (await client.get(url + "/ready")).status_code == 200
        body = {"prompt": "hello", "max_tokens": 2}
        request_task = asyncio.create_task(client.post(url + "/v1/completions", json=body))
        await core.wait(lambda: core.submitted)
        [(spec, task, _source)] = core.submitted
        assert (task, bytes(spec.token_ids)) == (Task.PREFILL_AND_DECODE, b"hello")
        lifecycle.request_stop()
        await asyncio.sleep(0.05)
        assert (await client.get(url + "/ready")).status_code == 503
        refused = await client.post(url + "/v1/completions", json=body)
        assert refused.status_code == 503
        end = replace(output(spec.request_id, 104, 105), finish_reason=FinishReason.LENGTH)
        core.streams[0].put(end)
        answer = (await request_task).json()
        assert answer["choices"][0]["text"] == "hi"
        assert answer["model"] == Path(settings.model).name
        await living
    assert lifecycle.state is ProgramState.STOPPED
    assert await router_in(registry) is None


async def test_new_router_waits_for_a_worker(settings: Settings, registry: MemoryRegistry) -> None:
    """A router that finds no worker in the registry waits for one for up to
    ``worker_wait_seconds``, since the registry may just have lost all its members."""
    clock = HeldClock(WORKER_POLL_SECONDS)
    lifecycle = Lifecycle(
        RouterProgram(settings.model_copy(update={"worker_wait_seconds": 3600.0}), clock), 5
    )
    async with worker() as (_, ref, _):
        living = asyncio.create_task(lifecycle.run())
        await clock.asleep.wait()
        assert not lifecycle.has_served
        await registry.announce(
            member("w", Role.DECODE, framed_address=ref.framed_address, model=settings.model_name),
            60,
        )
        clock.over.set()
        await wait_until_ready(registry)
        lifecycle.request_stop()
        await living


async def test_new_router_starts_without_workers_after_its_wait(
    settings: Settings, registry: MemoryRegistry
) -> None:
    program = RouterProgram(settings.model_copy(update={"worker_wait_seconds": 0.01}))
    lifecycle = Lifecycle(program, 5)
    living = asyncio.create_task(lifecycle.run())
    await wait_until_ready(registry)
    assert await httpx_once(f"http://{program.address}/ready") == 503
    lifecycle.request_stop()
    await living


@pytest.mark.parametrize(("ttl_seconds", "status"), [(0.0, 404), (60.0, 503)])
async def test_responses_are_stored_in_redis_unless_they_expire_at_once(
    settings: Settings, registry: MemoryRegistry, ttl_seconds: float, status: int
) -> None:
    """The Redis in the settings can't be reached, so a router that stores responses answers 503. A
    router that stores none answers 404."""
    update = {"worker_wait_seconds": 0.01, "response_ttl_seconds": ttl_seconds}
    program = RouterProgram(settings.model_copy(update=update))
    lifecycle = Lifecycle(program, 5)
    living = asyncio.create_task(lifecycle.run())
    await wait_until_ready(registry)
    assert await httpx_once(f"http://{program.address}/v1/responses/resp_1") == status
    lifecycle.request_stop()
    await living


class HeldClock(SystemClock):
    """A clock whose sleeps of ``held_seconds`` last until the test sets ``over``."""

    def __init__(self, held_seconds: float) -> None:
        self._held_seconds = held_seconds
        self.asleep, self.over = asyncio.Event(), asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds == self._held_seconds:
            self.asleep.set()
            await self.over.wait()
        else:
            await super().sleep(seconds)


async def test_draining_router_accepts_requests_during_the_grace_period(
    settings: Settings, registry: MemoryRegistry
) -> None:
    """A request that arrives before the end of the grace period is answered, even if its answer
    takes longer. After the grace period, no new connection is accepted, an idle connection is
    closed without an error response, and a connection with a request in progress is closed after
    its response."""
    clock = HeldClock(77.0)
    program = RouterProgram(settings.model_copy(update={"endpoint_grace_seconds": 77.0}), clock)
    lifecycle = Lifecycle(program, 100)
    async with worker() as (core, ref, _), httpx.AsyncClient() as client:
        await registry.announce(
            member("w", Role.DECODE, framed_address=ref.framed_address, model=settings.model_name),
            60,
        )
        living = asyncio.create_task(lifecycle.run())
        await wait_until_ready(registry)
        url = f"http://{program.address}"
        assert (await client.get(url + "/health")).status_code == 200  # the client stays connected
        lifecycle.request_stop()
        await clock.asleep.wait()
        assert await httpx_once(url + "/ready") == 503
        body = {"prompt": "hello", "max_tokens": 2}
        request_task = asyncio.create_task(httpx_post(url + "/v1/completions", body))
        await core.wait(lambda: core.submitted)
        clock.over.set()
        while program._listeners is not None and program._listeners._shared_listener is not None:
            await asyncio.sleep(0.01)
        with pytest.raises(httpx.ConnectError):
            await httpx_once(url + "/health")
        assert not living.done()
        [(spec, _task, _source)] = core.submitted
        end = replace(output(spec.request_id, 104, 105), finish_reason=FinishReason.LENGTH)
        core.streams[0].put(end)
        answer = await request_task
        assert answer.json()["choices"][0]["text"] == "hi"
        assert answer.headers["connection"] == "close"
        await living
    assert lifecycle.state is ProgramState.STOPPED


async def test_port_in_use_is_reported(settings: Settings, registry: MemoryRegistry) -> None:
    first = RouterProgram(settings)
    await first.start()
    port = int(first.address.rpartition(":")[2])
    second = RouterProgram(settings.model_copy(update={"port": port}))
    with pytest.raises(Unavailable, match=f"can't listen on 127.0.0.1:{port}"):
        await second.start()
    await second.stop()
    await first.stop()


async def test_two_routers_can_share_a_port(settings: Settings, registry: MemoryRegistry) -> None:
    """Each router has the records of its own requests, and queries the other router for the records
    of all other requests. After one router has stopped, the other one accepts all new
    connections."""
    port = free_port()
    shared = settings.model_copy(update={"port": port, "reuse_port": True, "admin_key": "root"})
    names = ("router-0", "router-1")
    programs = [RouterProgram(shared.model_copy(update={"id": name})) for name in names]
    lives = [Lifecycle(program, 5) for program in programs]
    url, admin = f"http://127.0.0.1:{port}", {"authorization": "Bearer root"}
    async with worker() as (core, ref, _), httpx.AsyncClient() as client:
        await registry.announce(
            member("w", Role.DECODE, framed_address=ref.framed_address, model=settings.model_name),
            60,
        )
        living = [asyncio.create_task(life.run()) for life in lives]
        while {life.state for life in lives} != {ProgramState.SERVING}:
            await asyncio.sleep(0.01)
        for program in programs:
            while program._cluster.num_routers < 2:
                await asyncio.sleep(0.01)
                await program._cluster.refresh()
        first, second = (f"http://{program.address}" for program in programs)
        assert len({url, first, second}) == 3
        request_task = asyncio.create_task(
            client.post(first + "/v1/completions", json={"prompt": "x", "max_tokens": 1})
        )
        await core.wait(lambda: core.submitted)
        end = replace(
            output(core.submitted[0][0].request_id, 104), finish_reason=FinishReason.LENGTH
        )
        core.streams[0].put(end)
        path = f"/admin/requests/{(await request_task).headers['x-baton-request-id']}"
        answers = [
            (await client.get(each + path, headers=admin)).json() for each in (first, second)
        ]
        assert answers[0] == answers[1] and answers[0]["decode"]["id"] == "w"
        assert (await client.get(second + path)).status_code == 401
        nobody = await client.get(second + "/admin/requests/x", headers=admin)
        assert nobody.status_code == 404
        lives[0].request_stop()
        await living[0]
        for _ in range(8):
            assert (await httpx_once(url + "/health")) == 200
        lives[1].request_stop()
        await living[1]


async def httpx_once(url: str) -> int:
    """Send a GET request over its own connection; return the status."""
    async with httpx.AsyncClient() as client:
        return (await client.get(url)).status_code


async def httpx_post(url: str, body: dict[str, object]) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(url, json=body)


async def test_router_serves_tls(
    settings: Settings, registry: MemoryRegistry, tmp_path: Path
) -> None:
    files = {"tls_certificate": tmp_path / "router.pem", "tls_key": tmp_path / "router.key"}
    files["tls_certificate"].write_text(certificates.ONE_CERTIFICATE)
    files["tls_key"].write_text(certificates.ONE_KEY)
    paths = {name: str(path) for name, path in files.items()}
    program = RouterProgram(settings.model_copy(update=paths))
    lifecycle = Lifecycle(program, 5)
    living = asyncio.create_task(lifecycle.run())
    await wait_until_ready(registry)
    tls = pinned_tls_context(paths["tls_certificate"])
    assert tls is not None
    async with httpx.AsyncClient(verify=tls) as client:
        assert (await client.get(f"https://{program.address}/health")).status_code == 200
    host, _, port = program.address.partition(":")
    answers = [
        await asyncio.to_thread(router_obstacle, host, int(port), certificate)
        for certificate in (paths["tls_certificate"], None)
    ]
    no_worker, no_plain_http = answers
    assert no_worker == "a router is not ready: no decode worker is ready"
    assert no_plain_http.startswith("a router does not respond: ")
    lifecycle.request_stop()
    await living


def test_open_file_limit_is_raised_to_its_maximum(settings: Settings) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = connection_limits(settings)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    assert limits.max_connections == min(16_384, raise_open_file_limit() - RESERVED_OPEN_FILES)


def test_tenant_salts_differ_and_are_stable() -> None:
    """The salt is compared with a committed test vector: if it changed, no cached block would be
    found."""
    salt = tenant_salt("secret", TenantId("alice"))
    assert salt.hex() == "ef017cbe9757c80cb5b7a26aba8848a4"
    assert salt != tenant_salt("secret", TenantId("bob"))
    assert salt != tenant_salt("other", TenantId("alice"))
