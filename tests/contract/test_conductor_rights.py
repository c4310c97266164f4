"""The chart's Role of the conductor: all that its program asks of an API server, and no more."""

from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

pytest.importorskip("kubernetes")

from kubernetes import client

from baton.clock import SystemClock
from baton.config import load_settings
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Unauthorized
from baton.pools.kubernetes.api import KubernetesApi
from baton.pools.kubernetes.client import KubernetesClient
from baton.pools.kubernetes.lease import KubernetesLease
from baton.pools.kubernetes.pod_watch import PodWatch
from baton.pools.kubernetes.pools import KubernetesPools
from baton.pools.leader_election import LeaderElection
from tests.contract.test_kubernetes_pools import FakeReach, QuickClock
from tests.helm.chart import NAMESPACE as HOME
from tests.helm.chart import Release, render, setting
from tests.kube.accounts import unused
from tests.kube.api import Api
from tests.kube.kinds import DEPLOYMENT, NAMESPACE, POD, ROLE, ROLE_BINDING, SERVICE_ACCOUNT, Object
from tests.kube.server import KubeServer

SECONDS = 20.0
FOLLOWS = setting(conductor__autoscale__mode="on", replicasManagedBy="external")


class Quiet(FakeReach):
    """Whoever it is told of."""

    def _name(self, worker_id: WorkerId) -> str:
        return worker_id


class House:
    """A conductor's program with the rights that its Role gives, as the chart renders both."""

    def __init__(self, server: KubeServer, folder: Path, values: Object) -> None:
        self.server, release = server, render(values)
        self.role = _only(release, "Role")
        self.deployments = [
            each for each in release.all("Deployment")
            if each["metadata"]["labels"]["baton.dev/role"] in ("prefill", "decode")
        ]  # fmt: skip
        self.settings = load_settings(**_environment(release))
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
        self.pools = KubernetesPools(api, Quiet(), QuickClock())

    def _create(self, release: Release) -> None:
        """What its program sees, two pods of each pool among it."""
        api = self.server.api
        api.create(NAMESPACE, {"metadata": {"name": HOME}})
        for kind in (SERVICE_ACCOUNT, ROLE, ROLE_BINDING):
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

    def unused(self) -> list[str]:
        assert self.server.accounts.refused == []
        return unused(self.role["rules"], self.server.accounts.calls)


def _only(release: Release, kind: str) -> Object:
    [found] = [each for each in release.all(kind) if "conductor" in each["metadata"]["name"]]
    return found


def _at_home(each: Object) -> Object:
    return {**each, "metadata": {**each["metadata"], "namespace": HOME}}


def _environment(release: Release) -> dict[str, Any]:
    """What the chart tells conductors of Kubernetes."""
    [conductor] = [
        each for each in release.all("Deployment")
        if each["metadata"]["labels"]["baton.dev/role"] == "conductor"
    ]  # fmt: skip
    [container] = conductor["spec"]["template"]["spec"]["containers"]
    told = {each["name"]: each.get("value") for each in container["env"]}
    names = {name.removeprefix("BATON_").lower(): value for name, value in told.items()}
    return {name: value for name, value in names.items() if name.startswith("kubernetes_")}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubeServer]:
    made = KubeServer(Api(SystemClock()))
    with made.running(tmp_path):
        yield made


async def test_all_that_a_conductor_does_and_no_more(server: KubeServer, tmp_path: Path) -> None:
    house = House(server, tmp_path, FOLLOWS)
    heard: Queue[object] = Queue()
    watch = PodWatch(house.client, house.cluster, heard.put)
    watch.start()
    assert await house.pools.sizes() == {Role.PREFILL: 2, Role.DECODE: 2}
    await house.pools.scale({Role.PREFILL: 3, Role.DECODE: 1})
    await house.pools.mend()
    name = house.settings.kubernetes_lease
    assert name is not None
    election = LeaderElection(
        KubernetesLease(house.client, name, SystemClock()), "me", SystemClock()
    )
    await election.look()
    await election.look()
    await election.resign()
    prefill = next(each for each in house.deployments if "prefill" in each["metadata"]["name"])
    house.pod(prefill, "another")
    await house.pools.remove(WorkerId("another"))  # nobody goes by itself here: it is deleted
    assert heard.get(timeout=SECONDS)
    watch.stop()
    house.client.close()
    assert house.unused() == []


async def test_who_may_only_look(server: KubeServer, tmp_path: Path) -> None:
    """Without the right, no worker is drained for a size that can't be written."""
    house = House(server, tmp_path, setting(rbac__resize=False))
    heard: Queue[object] = Queue()
    watch = PodWatch(house.client, house.cluster, heard.put)
    watch.start()
    server.api.delete(POD, HOME, house.deployments[0]["metadata"]["name"] + "-0", {})
    assert heard.get(timeout=SECONDS)
    watch.stop()
    with pytest.raises(Unauthorized, match="not allowed to get deployments/scale"):
        await house.pools.scale({Role.DECODE: 1})
    house.client.close()
    assert unused(house.role["rules"], server.accounts.calls) == []
