"""Tests how a pool backend such as Kubernetes, which does not run the workers' processes itself,
calls the workers at their addresses in the registry."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.clock import ManualClock
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.worker_load import WorkerLoad
from baton.errors import NotFound, Unavailable
from baton.pools import worker_admin as worker_admin_module
from baton.pools.worker_admin import DrainReport, RegistryWorkerAdmin, UnavailableWorkerAdmin
from testkit.fakes.registry import MemoryRegistry

pytest.importorskip("kubernetes")

from baton.pools.kubernetes.api import KubernetesApi
from baton.pools.kubernetes.client import open_kubernetes_client

KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: here
contexts:
  - {name: here, context: {cluster: c, user: u, namespace: models}}
clusters:
  - {name: c, cluster: {server: "http://127.0.0.1:1"}}
users:
  - {name: u, user: {token: t}}
"""


def member(name: str, role: Role, **load: int) -> Member:
    state = WorkerState.READY
    return Member(WorkerId(name), role, f"{name}:1", Incarnation(1), state, load=WorkerLoad(**load))  # type: ignore[arg-type]


@pytest.fixture
async def registry() -> MemoryRegistry:
    memory_registry = MemoryRegistry(ManualClock())
    await memory_registry.announce(
        member("p", Role.PREFILL, queued_tokens=7, promised_tokens=1), 60.0
    )
    await memory_registry.announce(
        member("d", Role.DECODE, queued_tokens=1, promised_tokens=9), 60.0
    )
    await memory_registry.announce(member("c", Role.CONDUCTOR), 60.0)
    return memory_registry


async def test_load_is_queued_or_reserved_tokens(registry: MemoryRegistry) -> None:
    assert await RegistryWorkerAdmin(registry).loads() == {"p": 7, "d": 9}


async def test_drain_is_sent_to_the_workers_address(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    async def drain(address: str, secret: str | None) -> None:
        calls.append((address, secret))

    monkeypatch.setattr(worker_admin_module, "drain_worker", drain)
    await RegistryWorkerAdmin(registry, "s").drain(WorkerId("d"))
    assert calls == [("d:1", "s")]
    with pytest.raises(NotFound, match="worker x is not in the registry"):
        await RegistryWorkerAdmin(registry, "s").drain(WorkerId("x"))


async def test_inspection_and_end_of_a_drain_are_sent_to_the_workers_address(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To end its drain, the worker is told to convert to the role that it already has."""
    calls = []

    async def inspect(address: str, secret: str | None) -> SimpleNamespace:
        calls.append(("inspect", address))
        return SimpleNamespace(drained=len(calls) > 1, total_requests=2 - len(calls))

    async def convert(address: str, role: Role, secret: str | None) -> None:
        calls.append((role, address))

    monkeypatch.setattr(worker_admin_module, "inspect_worker", inspect)
    monkeypatch.setattr(worker_admin_module, "convert_worker", convert)
    reach = RegistryWorkerAdmin(registry, "s")
    reports = [await reach.drain_report(WorkerId("d")) for _ in range(2)]
    assert reports == [DrainReport(False, 1), DrainReport(True, 0)]
    await reach.end_drain(WorkerId("d"))
    assert calls[-1] == (Role.DECODE, "d:1")
    for ask in (reach.drain_report, reach.end_drain):
        with pytest.raises(NotFound, match="worker x is not in the registry"):
            await ask(WorkerId("x"))


async def test_without_a_registry_calls_fail() -> None:
    nobody = UnavailableWorkerAdmin()
    with pytest.raises(Unavailable, match="without a registry: the setting redis_url is not set"):
        await nobody.loads()
    for ask in (nobody.drain, nobody.drain_report, nobody.end_drain):
        with pytest.raises(Unavailable, match="the setting redis_url is not set"):
            await ask(WorkerId("d"))


@pytest.mark.parametrize(("requested", "namespace"), [(None, "models"), ("other", "other")])
async def test_kubeconfig_gives_server_and_namespace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, requested: str | None, namespace: str
) -> None:
    file = tmp_path / "config"
    file.write_text(KUBECONFIG)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    client = open_kubernetes_client(requested)
    with pytest.raises(Unavailable, match=f"127.0.0.1:1 .*: list pods in namespace {namespace}"):
        await KubernetesApi(client, "test").pods()
    client.close()
