"""A cluster with the pools of Baton's Helm chart, users of the cluster, and the ``baton`` commands
that they run.

Time passes only when a command waits, that is, calls the clock's ``sleep``. Each such call runs the
controllers, and removes the pods that were deleted a certain number of calls ago.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from baton.clock import ManualClock
from baton.core.ids import WorkerId
from baton.pools.kubernetes import open as open_module
from baton.pools.worker_admin import DrainReport
from command_line.main import run_command_line
from testkit.fakes.registry import MemoryRegistry
from tests.helm.chart import NAMESPACE as HOME
from tests.helm.chart import render
from tests.kube import instant
from tests.kube.api import Api
from tests.kube.controllers.manager import Controllers
from tests.kube.kinds import (
    DEPLOYMENT,
    NAMESPACE,
    POD,
    ROLE,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    Object,
)
from tests.kube.pods import is_being_deleted
from tests.kube.server import KubeServer

CLUSTER = "demo-baton"
POOL = "baton.dev/pool"


class SteppingClock(ManualClock):
    """A clock on which sleeping takes no real time, but calls :meth:`Kube.step`."""

    def __init__(self, kube: "Kube") -> None:
        super().__init__(1_000_000.0)
        self._kube = kube

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        self._kube.step()


class Kube:
    """A cluster with the chart's pools: two prefill workers and three decode workers. A deleted pod
    survives ``num_waits_to_stop`` calls of the clock's ``sleep``, and is removed by the next
    one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.clock = SteppingClock(self)
        self.api = Api(self.clock)
        self.controllers = Controllers(self.api)
        self.server = KubeServer(self.api)
        self.num_waits_to_stop = 3
        self._waits: dict[str, int] = {}
        instant.add_node(self.api, "n1")

    def install(self, values: Object) -> None:
        """Create the chart's pools, and the service account of the conductors with its Role."""
        release = render(values)
        self.api.create(NAMESPACE, {"metadata": {"name": HOME}})
        for kind in (SERVICE_ACCOUNT, ROLE, ROLE_BINDING):
            for each in release.all(kind.kind):
                self.api.create(kind, _at_home(each))
        for name, replicas in (("prefill", 2), ("decode", 3)):
            deployment = release.one("Deployment", f"{CLUSTER}-{name}")
            deployment["spec"]["replicas"] = replicas
            # The pod's volumes and secrets are left out, because they refer to missing objects.
            pod = deployment["spec"]["template"]["spec"]
            deployment["spec"]["template"]["spec"] = {
                "containers": [{"name": "baton", "image": "baton:1"}],
                "terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"],
            }
            self.api.create(DEPLOYMENT, _at_home(deployment))
        self.settle()

    def settle(self) -> None:
        self.controllers.settle()
        instant.run_placed_pods(self.api)
        self.controllers.settle()

    def step(self) -> None:
        """Run the controllers, and remove pods that have stopped."""
        self.settle()
        for pod in self.api.store.all(POD):
            name = pod["metadata"]["name"]
            if is_being_deleted(pod):
                self._waits[name] = self._waits.get(name, 0) + 1
                if self._waits[name] > self.num_waits_to_stop:
                    self.api.store.remove(POD, HOME, name)

    def pods(self, pool: str) -> list[Object]:
        return [p for p in self.api.store.all(POD) if p["metadata"]["labels"][POOL] == pool]

    def names(self, pool: str) -> list[str]:
        return sorted(pod["metadata"]["name"] for pod in self.pods(pool))

    def replicas(self, pool: str) -> int:
        deployment = self.api.store.get(DEPLOYMENT, HOME, f"{CLUSTER}-{pool}")
        return int(deployment["spec"]["replicas"])

    # -- users -----------------------------------------------------------------------------

    def log_in(self, context: str, token: str = "admin", namespace: str = HOME) -> None:
        """Write a kubeconfig that the commands use from now on."""
        path = self.folder / "kubeconfig"
        config = yaml.safe_load(path.read_text())
        config["current-context"] = config["contexts"][0]["name"] = context
        config["contexts"][0]["context"]["namespace"] = namespace
        config["users"][0]["user"]["token"] = token
        path.write_text(yaml.safe_dump(config))
        location = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
        self.monkeypatch.setattr(location, str(path))

    def log_in_with(self, *rules: Object) -> None:
        """Log in as a user who has only the permissions in ``rules``."""
        for kind, more in (
            (SERVICE_ACCOUNT, {}),
            (ROLE, {"rules": list(rules)}),
            (
                ROLE_BINDING,
                {
                    "roleRef": {"kind": "Role", "name": "user"},
                    "subjects": [{"kind": "ServiceAccount", "name": "user", "namespace": HOME}],
                },
            ),
        ):
            self.api.create(kind, _at_home({"metadata": {"name": "user"}, **more}))
        self.log_in("user", self.server.accounts.token(HOME, "user"))

    def log_in_as_conductor(self) -> None:
        """Let the commands use the conductors' service account and settings from now on."""
        self.log_in("conductor", self.server.accounts.token(HOME, f"{CLUSTER}-conductor"))
        pools = ",".join(f"{name}={name}/{CLUSTER}-{name}" for name in ("prefill", "decode"))
        for name, value in {"POOLS": pools, "NAMESPACE": HOME}.items():
            self.monkeypatch.setenv(f"BATON_KUBERNETES_{name}", value)

    def connect_registry(self) -> MemoryRegistry:
        """Set redis_url, and let the commands use an empty registry in memory. Return that
        registry."""
        registry = MemoryRegistry(self.clock)
        self.monkeypatch.setenv("BATON_REDIS_URL", "redis://127.0.0.1:1/0")
        self.monkeypatch.setattr(open_module, "RedisRegistry", lambda *_: registry)
        return registry

    def connect_redis(self) -> "Workers":
        """Set redis_url, and let the commands reach a fake worker in each pod. Return the fake
        workers."""
        workers = Workers(self)
        self.monkeypatch.setenv("BATON_REDIS_URL", "redis://127.0.0.1:1/0")
        self.monkeypatch.setattr(open_module, "RegistryWorkerAdmin", lambda *_: workers)
        return workers


class Workers:
    """Replaces ``RegistryWorkerAdmin``. There is one fake worker per pod. ``requests`` has the
    number of running requests by pod; each time a worker's drain report is read, one of its
    requests ends. ``drained`` has the names of the pods whose workers were told to drain."""

    def __init__(self, kube: Kube) -> None:
        self.kube = kube
        self.requests: dict[str, int] = {}
        self.drained: list[str] = []

    async def loads(self) -> Mapping[WorkerId, float]:
        pods = [pod["metadata"] for pod in self.kube.api.store.all(POD)]
        return {
            WorkerId(f"{pod['name']}.{pod['uid']}"): float(self.requests.get(pod["name"], 0))
            for pod in pods
        }

    async def drain(self, worker_id: WorkerId) -> None:
        self.drained.append(worker_id.partition(".")[0])

    async def drain_report(self, worker_id: WorkerId) -> DrainReport:
        name = worker_id.partition(".")[0]
        left = self.requests.get(name, 0)
        self.requests[name] = max(left - 1, 0)
        return DrainReport(left == 0, left)

    async def end_drain(self, worker_id: WorkerId) -> None:
        raise AssertionError("a drain was revoked, which this test does not expect")


def _at_home(each: Object) -> Object:
    return {**each, "metadata": {**each["metadata"], "namespace": HOME}}


class Baton:
    """Runs ``baton`` commands. ``location`` returns the line that each command prints first; it
    says on which cluster the command works."""

    def __init__(self, kube: Kube, capsys: pytest.CaptureFixture[str]) -> None:
        self.kube, self._capsys = kube, capsys

    def __call__(self, *words: str) -> tuple[int, list[str], list[str]]:
        """Run ``baton`` with the arguments ``words``. Return the exit code, and the lines on stdout
        and on stderr."""
        self.kube.monkeypatch.setattr(sys, "argv", ["baton", *words, "--on", "kubernetes"])
        with pytest.raises(SystemExit) as ended:
            run_command_line()
        out, err = self._capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), out.splitlines(), err.splitlines()

    def location(self, context: str = "laptop", cluster: str = CLUSTER) -> str:
        return f"context {context} ({self.kube.server.url}), namespace {HOME}, cluster {cluster}"
