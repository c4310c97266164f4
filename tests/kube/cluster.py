"""A whole cluster on this machine: API server, controllers and nodes.

with cluster() as kube:
    kube.helm().install(chart, "baton")
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kubernetes import client, config

from baton.clock import Clock, SystemClock
from tests.kube.api import Api
from tests.kube.controllers.manager import Controllers
from tests.kube.instant import add_node
from tests.kube.kinds import NODE, POD, SERVICE, Object
from tests.kube.node.images import Images
from tests.kube.node.kubelet import Kubelet
from tests.kube.node.network import network
from tests.kube.node.pod import Node
from tests.kube.pods import is_being_deleted
from tests.kube.server import KubeServer
from tests.kube.subresources import is_ready

NODES = ("node-1", "node-2", "node-3")
LOOK_SECONDS = 0.05
FOLDER = "baton-kube-"


@dataclass
class Cluster:
    """A running cluster. ``folder`` holds ``kubeconfig`` and the pods' logs."""

    api: Api
    server: KubeServer
    controllers: Controllers
    kubelet: Kubelet
    folder: Path
    bridge: str

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    def helm(self, namespace: str = "default") -> Any:
        """Return a Helm 4 client, as a ``helm_python.Config``."""
        from helm_python import Config

        path = self.kubeconfig
        return Config(kubeconfig_path=path, namespace=namespace, qps=500, burst_limit=500)

    def client(self) -> client.ApiClient:
        """Return an API client with the administrator's credentials."""
        configuration = client.Configuration()
        config.load_kube_config(str(self.kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        return client.ApiClient(configuration)

    def pods(self, selector: Callable[[Object], bool] = lambda pod: True) -> list[Object]:
        return [pod for pod in self.api.store.all(POD) if selector(pod)]

    def ready(self, labels: Mapping[str, str]) -> list[str]:
        """Return the names of the pods with these labels that are ready and not being deleted."""

        def serves(pod: Object) -> bool:
            own = pod["metadata"].get("labels") or {}
            mine = all(own.get(name) == value for name, value in labels.items())
            return mine and is_ready(pod) and not is_being_deleted(pod)

        return [pod["metadata"]["name"] for pod in self.pods(serves)]

    def url(self, service: str, namespace: str = "default") -> str:
        """Return the URL of a service's first port, which every process on this machine can
        reach."""
        spec = self.api.store.get(SERVICE, namespace, service)["spec"]
        return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    def wait(self, until: Callable[[], object], seconds: float, what: str) -> None:
        """Wait until ``until`` returns a true value. Raises TimeoutError after ``seconds``, with
        the state of all pods and ``what``, a description of what was awaited."""
        clock = self.api.clock
        end = clock.monotonic() + seconds
        while not until():
            if clock.monotonic() > end:
                raise TimeoutError(f"waited more than {seconds:g} s for {what}:\n{self.describe()}")
            self.api.store.changes(self.api.store.version, LOOK_SECONDS)

    def describe(self) -> str:
        """Describe all pods, one line each."""
        return "\n".join(_line(pod) for pod in self.pods())

    def cordon(self, node: str, on: bool = True) -> None:
        found = self.api.store.get(NODE, "", node)
        found["spec"]["unschedulable"] = on
        self.api.update(NODE, found)


def _line(pod: Object) -> str:
    status = pod.get("status") or {}
    containers = ", ".join(
        f"{each['name']} {next(iter(each['state']))} restarts {each['restartCount']}"
        for each in status.get("containerStatuses") or []
    )
    leaving = ", leaving" if is_being_deleted(pod) else ""
    return (
        f"{pod['metadata']['name']}: {status.get('phase', 'Pending')}, "
        f"ready {is_ready(pod)}{leaving} [{containers}]"
    )


@contextmanager
def cluster(
    clock: Clock | None = None,
    nodes: Sequence[str] = NODES,
    folder: Path | None = None,
    resources: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Cluster]:
    """Run a cluster. ``resources`` are added to the standard resources of each node. No process,
    mount or network interface is left behind, even if this process is killed."""
    _sweep()
    prefix = f"{FOLDER}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix) as own, network() as net:
        place = folder or Path(own)
        place.mkdir(parents=True, exist_ok=True)
        api = Api(clock or SystemClock(), net.service_subnet)
        for name in nodes:
            add_node(api, name, resources)
        controllers = Controllers(api)
        server = KubeServer(api)
        with server.running(place, net.gateway), controllers.running():
            node = Node(
                api, net, Images.at(place / "bin"), place, server.port,
                (place / "ca.crt").read_bytes(), server.accounts.token,
            )  # fmt: skip
            with Kubelet(node).running() as kubelet:
                server.containers = kubelet
                yield Cluster(api, server, controllers, kubelet, place, net.bridge)


def _sweep() -> None:
    """Remove the folders of clusters whose processes were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*-*"):
        owner = folder.name.removeprefix(FOLDER).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)
