"""Provides Kubernetes pools on a small API server, with a worker admin that records its
commands."""

from collections.abc import Callable, Mapping, Sequence

from kubernetes import client

from baton.clock import ManualClock
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Unavailable
from baton.pools.kubernetes.api import KubernetesApi
from baton.pools.kubernetes.client import KubernetesClient
from baton.pools.kubernetes.pod_drainer import LeavingPod
from baton.pools.kubernetes.pools import KubernetesPools
from baton.pools.worker_admin import DrainReport
from testkit.fakes.kubernetes import FakeKubernetes

PREFILL, DECODE = Role.PREFILL, Role.DECODE


class QuickClock(ManualClock):
    """A clock whose ``sleep`` advances the time and returns immediately."""

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)


class FakeWorkerAdmin:
    """Records the workers that are told to drain (``drained``) and, later, to end the drain and
    serve again (``returned``). Workers in ``silent`` don't respond; if "registry" is in it, their
    loads can't be read."""

    def __init__(self) -> None:
        self.drained: list[str] = []
        self.load: dict[WorkerId, float] = {}
        self.silent: set[str] = set()
        self.busy: dict[str, int] = {}
        """How many more times a worker is not drained; also the number of its requests."""
        self.returned: list[str] = []

    def set_loads(self, **loads: float) -> None:
        """Set the loads of prefill workers: ``n0=9.0`` sets the load of worker 0 to 9.0. Workers
        that are not named report no load, which counts as 0."""
        numbers = {int(name[1:]): load for name, load in loads.items()}
        self.load = {WorkerId(f"baton-prefill-{n}.uid-{n}"): load for n, load in numbers.items()}

    async def loads(self) -> Mapping[WorkerId, float]:
        if "registry" in self.silent:
            raise Unavailable("the registry can't be reached")
        return self.load

    async def drain(self, worker_id: WorkerId) -> None:
        name = self._name(worker_id)
        if name in self.silent:
            raise Unavailable("the worker is dead")
        self.drained.append(name)

    async def drain_report(self, worker_id: WorkerId) -> DrainReport:
        name = self._name(worker_id)
        left = self.busy.get(name, 0)
        self.busy[name] = max(left - 1, 0)
        return DrainReport(left == 0, left)

    async def end_drain(self, worker_id: WorkerId) -> None:
        name = self._name(worker_id)
        if name in self.silent:
            raise Unavailable("the worker is dead")
        self.returned.append(name)

    def _name(self, worker_id: WorkerId) -> str:
        """Return the pod's name from a worker id, which consists of the pod's name and UID."""
        name, _, uid = worker_id.rpartition(".")
        assert uid == f"uid-{name.rpartition('-')[2]}", worker_id
        return name


class Rig:
    def __init__(self, fake: FakeKubernetes) -> None:
        self.fake = fake
        self.reach = FakeWorkerAdmin()
        self.notes: list[str] = []
        self.progress: list[list[tuple[str, int | None]]] = []
        self.on_look: Callable[[], object] = lambda: None
        self.clock = QuickClock()
        self.pools = self.open()

    def open(
        self, places: Mapping[str, str] | None = None, chosen: Mapping[Role, str] | None = None
    ) -> KubernetesPools:
        api = api_of(self.fake.url, places)
        return KubernetesPools(
            api, self.reach, self.clock, self.notes.append, 30.0, chosen, self._record
        )

    def _record(self, leaving: Sequence[LeavingPod]) -> None:
        self.progress.append([(each.pod.name, each.num_requests) for each in leaving])
        self.on_look()

    def changes(self) -> list[tuple[str, str]]:
        unchanging = ("list", "get", "dry-run update")
        return [call for call in self.fake.calls if call[0] not in unchanging]


def api_of(url: str, places: Mapping[str, str] | None = None) -> KubernetesApi:
    kubernetes = KubernetesClient(client.Configuration(host=url), "models", call_seconds=0.5)
    return KubernetesApi(kubernetes, "test", places)
