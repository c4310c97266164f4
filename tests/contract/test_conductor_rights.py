"""Tests that the conductor's RBAC Role in the chart grants exactly what the conductor requests from
the API."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import yaml

pytest.importorskip("kubernetes")

from kubernetes import client

from baton.clock import SystemClock
from baton.config import load_settings
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Unauthorized
from baton.pools.kubernetes.api import KubernetesApi
from baton.pools.kubernetes.client import KubernetesClient
from baton.pools.kubernetes.initial_sizes import InitialSizes
from baton.pools.kubernetes.lease import KubernetesLease
from baton.pools.kubernetes.pod_watch import PodWatch
from baton.pools.kubernetes.pools import KubernetesPools
from baton.pools.leader_election import LeaderElection
from tests.contract.kubernetes_pools.rig import FakeWorkerAdmin, QuickClock
from tests.contract.pod_watches import end_watch
from tests.helm.chart import NAMESPACE as HOME
from tests.helm.chart import Release, make_values, render
from tests.kube.accounts import unused_permissions
from tests.kube.api import Api
from tests.kube.kinds import (
    DEPLOYMENT,
    LEASE,
    NAMESPACE,
    POD,
    ROLE,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    Object,
)
from tests.kube.server import KubeServer

SECONDS = 20.0
AUTOSCALED = make_values(conductor__autoscale__mode="on", pools__decode__replicas=2)


class AnyWorkerReach(FakeWorkerAdmin):
    """A stand-in for the component that drains and converts workers; any worker id is valid."""

    def _name(self, worker_id: WorkerId) -> str:
        return worker_id


class ConductorUnderRole:
    """The conductor's pools backend, with the settings that the chart renders, and with the
    permissions of the chart's Role and no others."""

    def __init__(self, server: KubeServer, folder: Path, values: Object) -> None:
        self.server, release = server, render(values)
        self.role = _only(release, "Role")
        self.deployments = [
            each for each in release.all("Deployment")
            if each["metadata"]["labels"]["baton.dev/role"] in ("prefill", "decode")
        ]  # fmt: skip
        self.router = release.one("Deployment", "demo-baton-router")
        self.settings = load_settings(**_environment(release))
        file = release.one("ConfigMap", "demo-baton-config")["data"]["baton.yaml"]
        self.initial_replicas = yaml.safe_load(file).get("kubernetes_initial_replicas")
        self._create(release)
        binding = _only(release, "RoleBinding")
        token = server.accounts.token(HOME, binding["subjects"][0]["name"])
        configuration = client.Configuration(host=server.url)
        configuration.ssl_ca_cert = str(folder / "ca.crt")
        configuration.tls_server_name = "localhost"
        configuration.api_key = {"authorization": f"Bearer {token}"}
        self.client = KubernetesClient(configuration, HOME, call_seconds=5.0)
        cluster = self.deployments[0]["metadata"]["labels"]["baton.dev/cluster"]
        self.cluster = str(cluster)
        api = KubernetesApi(self.client, self.cluster, self.settings.kubernetes_pools or None)
        self.pools = KubernetesPools(api, AnyWorkerReach(), QuickClock())

    def _create(self, release: Release) -> None:
        """Create the objects that the conductor manages, with two pods in each pool."""
        api = self.server.api
        api.create(NAMESPACE, {"metadata": {"name": HOME}})
        api.create(DEPLOYMENT, _at_home(self.router))
        for kind in (SERVICE_ACCOUNT, ROLE, ROLE_BINDING, LEASE):
            for each in release.all(kind.kind):
                api.create(kind, _at_home(each))
        for each in self.deployments:
            each["spec"]["replicas"] = 2
            api.create(DEPLOYMENT, _at_home(each))
            for number in range(2):
                self.pod(each, f"{each['metadata']['name']}-{number}")

    def pod(self, deployment: Object, name: str) -> None:
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        self.server.api.create(
            POD,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": HOME, "labels": labels},
                "spec": {"nodeName": "n1", "containers": [{"name": "baton", "image": "b:1"}]},
            },
        )

    def size(self, name: str) -> int:
        found = self.server.api.store.get(DEPLOYMENT, HOME, f"demo-baton-{name}")
        return int(found["spec"]["replicas"])

    def unused_permissions(self) -> list[str]:
        assert self.server.accounts.refused == []
        return unused_permissions(self.role["rules"], self.server.accounts.calls)


def _only(release: Release, kind: str) -> Object:
    [found] = [each for each in release.all(kind) if "conductor" in each["metadata"]["name"]]
    return found


def _at_home(each: Object) -> Object:
    return {**each, "metadata": {**each["metadata"], "namespace": HOME}}


def _environment(release: Release) -> dict[str, Any]:
    """Return the Kubernetes settings that the chart passes to conductors in their environment."""
    [conductor] = [
        each for each in release.all("Deployment")
        if each["metadata"]["labels"]["baton.dev/role"] == "conductor"
    ]  # fmt: skip
    [container] = conductor["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    names = {name.removeprefix("BATON_").lower(): value for name, value in variables.items()}
    return {name: value for name, value in names.items() if name.startswith("kubernetes_")}


async def _watch_begun(server: KubeServer) -> None:
    """Wait until the API server has the watch of pods. What is deleted before that is listed."""
    async with asyncio.timeout(SECONDS):
        while all(call.verb != "watch" for call in server.accounts.calls):
            await asyncio.sleep(0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubeServer]:
    server = KubeServer(Api(SystemClock()))
    with server.running(tmp_path):
        yield server


async def test_the_role_grants_all_that_a_conductor_needs_and_no_more(
    server: KubeServer, tmp_path: Path
) -> None:
    conductor = ConductorUnderRole(server, tmp_path, AUTOSCALED)
    deletions: Queue[object] = Queue()
    watch = PodWatch(conductor.client, conductor.cluster, deletions.put)
    watch.start()
    await _watch_begun(server)
    assert await conductor.pools.sizes() == {Role.PREFILL: 2, Role.DECODE: 2}
    await conductor.pools.scale({Role.PREFILL: 3, Role.DECODE: 1})
    await conductor.pools.end_leftover_drains()
    name = conductor.settings.kubernetes_lease
    assert name is not None
    initial = conductor.initial_replicas | {"demo-baton-router": 3}
    sizes = InitialSizes(conductor.client, name, lambda: initial, SystemClock())
    await sizes.apply()
    assert [conductor.size(each) for each in ("prefill", "decode", "router")] == [3, 2, 3]
    election = LeaderElection(
        KubernetesLease(conductor.client, name, SystemClock()), "me", SystemClock()
    )
    await election.check_lease()
    await election.check_lease()
    await election.resign()
    prefill = next(each for each in conductor.deployments if "prefill" in each["metadata"]["name"])
    conductor.pod(prefill, "another")
    # No controller deletes a pod in this test, so the pools backend has to.
    await conductor.pools.remove(WorkerId("another"))
    assert deletions.get(timeout=SECONDS)
    end_watch(watch, server)
    conductor.client.close()
    assert conductor.unused_permissions() == []


async def test_without_the_right_to_resize_a_conductor_only_watches(
    server: KubeServer, tmp_path: Path
) -> None:
    """If the new size can't be written, no worker may be drained for it."""
    conductor = ConductorUnderRole(server, tmp_path, make_values(rbac__resize=False))
    deletions: Queue[object] = Queue()
    watch = PodWatch(conductor.client, conductor.cluster, deletions.put)
    watch.start()
    await _watch_begun(server)
    server.api.delete(POD, HOME, conductor.deployments[0]["metadata"]["name"] + "-0", {})
    assert deletions.get(timeout=SECONDS)
    end_watch(watch, server)
    with pytest.raises(Unauthorized, match="not allowed to get deployments/scale"):
        await conductor.pools.scale({Role.DECODE: 1})
    conductor.client.close()
    assert unused_permissions(conductor.role["rules"], server.accounts.calls) == []
