"""Tests ``baton status``, ``scale`` and ``drain`` with ``--on kubernetes``: their output and exit
codes, for users with different permissions, with and without Redis.

Time passes only when a command waits. Then the controllers run, and deleted pods come closer to
their end."""

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("kubernetes")
pytest.importorskip("helm_python")

from baton.clock import ManualClock
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.pending_settings import PendingSettings
from baton.core.states import Role, WorkerState
from baton.pools.kubernetes import open as open_module
from baton.pools.kubernetes.pod import DELETION_COST
from baton.pools.worker_admin import DrainReport
from baton.registry.memory import MemoryRegistry
from command_line import kubernetes, kubernetes_status
from command_line.main import main
from tests.helm.chart import NAMESPACE as HOME
from tests.helm.chart import make_values, render
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
PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
WORKLOADS = {"apiGroups": ["apps"], "resources": ["deployments", "statefulsets"], "verbs": ["list"]}
READ_SCALE = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["get"]}
PATCH_PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}


class SteppingClock(ManualClock):
    """A clock on which sleeping takes no time, but calls ``step``."""

    def __init__(self, kube: "Kube") -> None:
        super().__init__(1_000_000.0)
        self._kube = kube

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        self._kube.step()


class Kube:
    """A cluster with the chart's pools: two prefill workers and three decode workers, which need
    ``num_waits_to_stop`` waits to stop."""

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
        """Create the chart's pools, and the conductors' account with its Role."""
        release = render(values)
        self.api.create(NAMESPACE, {"metadata": {"name": HOME}})
        for kind in (SERVICE_ACCOUNT, ROLE, ROLE_BINDING):
            for each in release.all(kind.kind):
                self.api.create(kind, _at_home(each))
        for name, replicas in (("prefill", 2), ("decode", 3)):
            deployment = release.one("Deployment", f"{CLUSTER}-{name}")
            deployment["spec"]["replicas"] = replicas
            # Its volumes and secrets are those of the chart's other objects.
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
        """Write a kubeconfig, which the commands use from now on."""
        path = self.folder / "kubeconfig"
        config = yaml.safe_load(path.read_text())
        config["current-context"] = config["contexts"][0]["name"] = context
        config["contexts"][0]["context"]["namespace"] = namespace
        config["users"][0]["user"]["token"] = token
        path.write_text(yaml.safe_dump(config))
        location = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
        self.monkeypatch.setattr(location, str(path))

    def log_in_with(self, *rules: Object) -> None:
        """Log in as a user with a Role of these rules alone."""
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
        """Use the conductors' account and settings."""
        self.log_in("conductor", self.server.accounts.token(HOME, f"{CLUSTER}-conductor"))
        pools = ",".join(f"{name}={name}/{CLUSTER}-{name}" for name in ("prefill", "decode"))
        for name, value in {"POOLS": pools, "NAMESPACE": HOME}.items():
            self.monkeypatch.setenv(f"BATON_KUBERNETES_{name}", value)

    def connect_registry(self) -> MemoryRegistry:
        """Set redis_url. The registry has no members yet."""
        registry = MemoryRegistry(self.clock)
        self.monkeypatch.setenv("BATON_REDIS_URL", "redis://127.0.0.1:1/0")
        self.monkeypatch.setattr(open_module, "RedisRegistry", lambda *_: registry)
        return registry

    def connect_redis(self) -> "Workers":
        """Set redis_url. The workers are those of all pods."""
        workers = Workers(self)
        self.monkeypatch.setenv("BATON_REDIS_URL", "redis://127.0.0.1:1/0")
        self.monkeypatch.setattr(open_module, "RegistryWorkerAdmin", lambda *_: workers)
        return workers


class Workers:
    """The workers, as they are reached by their addresses in Redis. A worker that drains ends one
    request per look at it. ``requests`` is by pod, ``drained`` are the names of pods."""

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
        raise AssertionError("no drain of these tests is taken back")


def _at_home(each: Object) -> Object:
    return {**each, "metadata": {**each["metadata"], "namespace": HOME}}


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kube]:
    kube = Kube(tmp_path, monkeypatch)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(kubernetes, "SystemClock", lambda: kube.clock)
    monkeypatch.setattr(kubernetes_status, "SystemClock", lambda: kube.clock)
    monkeypatch.setenv("BATON_CLUSTER", CLUSTER)
    with kube.server.running(tmp_path):
        kube.log_in("laptop")
        yield kube


@pytest.fixture
def kube(empty: Kube) -> Kube:
    empty.install({})
    return empty


class Baton:
    """Runs commands. ``location`` is the first line that they print."""

    def __init__(self, kube: Kube, capsys: pytest.CaptureFixture[str]) -> None:
        self.kube, self._capsys = kube, capsys

    def __call__(self, *words: str) -> tuple[int, list[str], list[str]]:
        """Return the exit code, and the lines on stdout and stderr."""
        self.kube.monkeypatch.setattr(sys, "argv", ["baton", *words, "--on", "kubernetes"])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), out.splitlines(), err.splitlines()

    def location(self, context: str = "laptop", cluster: str = CLUSTER) -> str:
        return f"context {context} ({self.kube.server.url}), namespace {HOME}, cluster {cluster}"


@pytest.fixture
def baton(empty: Kube, capsys: pytest.CaptureFixture[str]) -> Baton:
    return Baton(empty, capsys)


# -- status --------------------------------------------------------------------------------


def test_status_names_what_it_looks_at(kube: Kube, baton: Baton) -> None:
    code, out, err = baton("status")
    assert (code, err) == (0, [])
    assert out[:2] == [baton.location(), "decode=3 prefill=2"]
    rows = [line.split() for line in out[3:]]
    assert sorted(rows) == sorted(
        [name, pool, "serving", "n1"] for pool in ("prefill", "decode") for name in kube.names(pool)
    )


def test_status_json_has_the_location_beside_the_documented_keys(kube: Kube, baton: Baton) -> None:
    code, out, _ = baton("status", "--json")
    report = json.loads("".join(out))
    assert code == 0
    assert {key: report[key] for key in ("ready", "url", "pools", "not_allowed")} == {
        "ready": True,
        "url": "",
        "pools": {
            "decode": {"role": "decode", "replicas": 3},
            "prefill": {"role": "prefill", "replicas": 2},
        },
        "not_allowed": [],
    }
    assert {key: report[key] for key in ("context", "server", "namespace", "cluster")} == {
        "context": "laptop", "server": kube.server.url, "namespace": HOME, "cluster": CLUSTER,
    }  # fmt: skip
    first = report["processes"][0]
    assert {"id", "role", "pid", "state", "address"} <= first.keys()
    assert first["id"] == report["workers"][0]["id"]


def test_status_is_not_ready_while_a_worker_is_missing(kube: Kube, baton: Baton) -> None:
    instant.set_ready(kube.api, kube.pods("decode")[0], False)
    assert json.loads("".join(baton("status", "--json")[1]))["ready"] is False


def announce(registry: MemoryRegistry, name: str, role: Role, pending: PendingSettings) -> None:
    member = Member(
        WorkerId(name), role, "10.0.0.1:1", Incarnation(1), WorkerState.READY,
        pending_settings=pending,
    )  # fmt: skip
    asyncio.run(registry.announce(member, 60.0))


def test_status_shows_what_each_program_has_not_applied(kube: Kube, baton: Baton) -> None:
    registry = kube.connect_registry()
    stale = PendingSettings(restart_needed=("max_sequences", "model"))
    rejected = PendingSettings(rejected="config file /etc/baton/baton.yaml: is empty")
    announce(registry, "baton-conductor-1.uid", Role.CONDUCTOR, rejected)
    announce(registry, "baton-decode-1.uid", Role.DECODE, stale)
    announce(registry, "baton-decode-2.uid", Role.DECODE, stale)
    announce(registry, "baton-router-1.uid", Role.ROUTER, PendingSettings())
    code, out, err = baton("status")
    assert (code, err) == (0, [])
    assert " ".join(out[-3:]).endswith(
        "settings of baton-conductor-1: "
        "config file rejected: config file /etc/baton/baton.yaml: is empty "
        "settings of baton-decode-1, baton-decode-2: restart needed: max_sequences, model"
    )
    assert json.loads("".join(baton("status", "--json")[1]))["pending_settings"] == {
        "baton-conductor-1": {"restart_needed": [], "rejected": rejected.rejected},
        "baton-decode-1": {"restart_needed": ["max_sequences", "model"], "rejected": ""},
        "baton-decode-2": {"restart_needed": ["max_sequences", "model"], "rejected": ""},
    }


def test_status_without_an_answer_of_redis_shows_the_pods(kube: Kube, baton: Baton) -> None:
    assert json.loads("".join(baton("status", "--json")[1]))["pending_settings"] is None
    kube.monkeypatch.setenv("BATON_REDIS_URL", "redis://127.0.0.1:1/0")
    code, out, err = baton("status")
    assert (code, len(out)) == (0, 3 + 5)
    [note] = err
    assert note.startswith("baton: not shown: which settings wait for a restart: ")


@pytest.mark.parametrize(
    "command", [["status"], ["status", "--json"], ["scale", "decode=2"], ["drain", "x"]]
)
def test_a_cluster_that_does_not_exist_is_an_error_that_names_those_that_do(
    kube: Kube, baton: Baton, command: list[str]
) -> None:
    code, _, err = baton(*command, "--name", "prod")
    assert code == 1
    assert err == [
        f"baton: context laptop ({kube.server.url}), namespace {HOME}: there is no cluster 'prod' "
        f"(--name); the clusters there are {CLUSTER}"
    ]


@pytest.mark.parametrize("command", [["status"], ["scale", "decode=2"], ["drain", "x"]])
def test_a_namespace_that_does_not_exist_is_an_error(
    kube: Kube, baton: Baton, command: list[str]
) -> None:
    code, _, err = baton(*command, "--namespace", "nowhere")
    assert code == 1
    assert err == [
        f"baton: context laptop ({kube.server.url}), namespace nowhere: there is no such namespace"
    ]


def test_an_empty_namespace_is_an_error(kube: Kube, baton: Baton) -> None:
    code, _, err = baton("status", "--namespace", "default")
    assert code == 1
    assert err[0].endswith(
        f"namespace default: there is no cluster '{CLUSTER}' (--name); this user sees none there"
    )


# -- permissions ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["off", "dry_run"])
def test_status_shows_a_conductor_without_the_right_to_resize_what_it_may_see(
    empty: Kube, baton: Baton, mode: str
) -> None:
    """The Role permits to read sizes only if the autoscaler needs them."""
    owner = "external" if mode == "dry_run" else "chart"
    empty.install(
        make_values(rbac__resize=False, conductor__autoscale__mode=mode, replicasManagedBy=owner)
    )
    empty.log_in_as_conductor()
    code, out, err = baton("status")
    assert code == 0
    assert out[0] == baton.location("conductor")
    assert len(out) == 3 + 5
    if mode == "dry_run":
        assert (out[1], err) == ("prefill=2 decode=3", [])
        return
    assert sorted(out[1].split()) == ["decode=?", "prefill=?"]
    assert err == [
        "baton: not shown, because RBAC does not allow it: get deployments/scale; the chart's "
        "value rbac.resize=true gives it to the conductors' Role"
    ]


def test_status_shows_a_user_who_may_only_list_pods_these(kube: Kube, baton: Baton) -> None:
    kube.log_in_with(PODS)
    code, out, err = baton("status")
    assert code == 0
    assert sorted(out[1].split()) == ["decode=?", "prefill=?"]
    assert len(out) == 3 + 5
    assert err == [
        "baton: not shown, because RBAC does not allow it: list deployments",
        "baton: not shown, because RBAC does not allow it: list statefulsets",
    ]
    report = json.loads("".join(baton("status", "--json")[1]))
    assert report["pools"]["decode"] == {"role": "decode", "replicas": None}
    assert report["not_allowed"] == ["list deployments", "list statefulsets"]


def test_status_shows_a_user_who_may_not_list_pods_the_sizes(kube: Kube, baton: Baton) -> None:
    kube.log_in_with(WORKLOADS)
    code, out, err = baton("status")
    assert (code, out[1]) == (0, "decode=3 prefill=2")
    assert err == ["baton: not shown, because RBAC does not allow it: list pods"]


def test_status_fails_for_a_user_who_may_see_nothing(kube: Kube, baton: Baton) -> None:
    kube.log_in_with()
    code, _, err = baton("status")
    assert code == 1
    assert err[0].startswith(f"baton: not allowed to list pods in namespace {HOME}")


@pytest.mark.parametrize("resize", ["scale", "drain"])
@pytest.mark.parametrize(
    ("rules", "refused"),
    [
        ([PODS, WORKLOADS], "get deployments/scale"),
        ([PODS, WORKLOADS, READ_SCALE, PATCH_PODS], "update deployments/scale"),
    ],
)
def test_a_user_who_may_not_resize_changes_nothing(
    kube: Kube, baton: Baton, resize: str, rules: list[Any], refused: str
) -> None:
    workers = kube.connect_redis()
    kube.log_in_with(*rules)
    words = ["scale", "decode=2"] if resize == "scale" else ["drain", kube.names("decode")[0]]
    before = kube.api.store.version
    code, out, err = baton(*words)
    assert (code, out) == (1, [baton.location("user")])
    verb, resource = ("update", "deployments/scale") if resize == "scale" else refused.split()
    assert err[0].startswith(
        f"baton: not allowed to {verb} {resource} in namespace {HOME}: give this service account "
        f"or user a Role with the verb '{verb}' on '{resource}' ("
    )
    assert err[0].endswith(
        "; the chart's value rbac.resize=true gives it to the conductors' Role; nothing was changed"
    )
    assert (kube.api.store.version, workers.drained) == (before, [])


def test_a_conductor_without_the_right_to_resize_is_told_the_value(
    empty: Kube, baton: Baton
) -> None:
    empty.install(make_values(rbac__resize=False))
    empty.log_in_as_conductor()
    code, _, err = baton("scale", "decode=2")
    assert code == 1
    assert err[0].startswith("baton: not allowed to get deployments/scale")
    assert "rbac.resize=true" in err[0]


# -- scale and drain -----------------------------------------------------------------------


def test_scale_without_redis_waits_until_the_workers_have_drained_in_their_pods(
    kube: Kube, baton: Baton
) -> None:
    before = kube.names("decode")
    code, out, err = baton("scale", "decode=2")
    [gone] = set(before) - set(kube.names("decode"))
    assert (code, kube.replicas("decode")) == (0, 2)
    assert out == [
        baton.location(),
        f"decode 3 → 2: deleting {gone}, which drains first, 0 s",
        "decode 3 → 2: done",
    ]
    assert err == [
        "baton: the newest workers go first, since the loads are unknown: redis_url is not set",
        f"baton: {gone} drains when Kubernetes deletes it, within 85 s, since it could not be told "
        "before: redis_url is not set",
    ]


def test_scale_with_redis_shows_the_requests_that_are_left(kube: Kube, baton: Baton) -> None:
    workers = kube.connect_redis()
    idle, *busy = kube.names("decode")
    workers.requests = {idle: 2, **dict.fromkeys(busy, 9)}
    code, out, err = baton("scale", "decode=2")
    assert (code, err) == (0, [])
    assert out == [
        baton.location(),
        f"decode 3 → 2: draining {idle}: 2 requests left, 0 s",
        f"decode 3 → 2: draining {idle}: 1 request left, 0 s",
        f"decode 3 → 2: deleting {idle}, 1 s",
        "decode 3 → 2: done",
    ]
    assert (workers.drained, kube.names("decode")) == ([idle], busy)


def test_both_pools_are_shown(kube: Kube, baton: Baton) -> None:
    kube.connect_redis()
    code, out, _ = baton("scale", "decode=2", "prefill=3")
    assert code == 0
    assert len(out) == 3
    assert out[1].startswith("decode 3 → 2: deleting ")
    assert out[2] == "decode 3 → 2, prefill 2 → 3: done"


def test_drain_without_redis_waits_until_the_named_pod_is_gone(kube: Kube, baton: Baton) -> None:
    victim, *others = kube.names("decode")
    kube.num_waits_to_stop = 20
    code, out, err = baton("drain", victim)
    assert (code, kube.names("decode")) == (0, others)
    assert out == [
        baton.location(),
        f"deleting {victim}, which drains first, 0 s",
        f"{victim} is gone",
    ]
    assert len(err) == 1
    assert kube.clock.monotonic() >= 1_000_000.0 + 20


def test_a_pod_that_does_not_go_is_reported(kube: Kube, baton: Baton) -> None:
    kube.num_waits_to_stop = 10_000
    victim = kube.names("decode")[0]
    code, _, err = baton("drain", victim)
    assert code == 1
    assert err[-1] == (
        f"baton: {victim} still exists 146 s after its deletion, although its grace period is 85 "
        "s; look at its node, n1"
    )


def test_no_wait_returns_once_the_size_is_written(kube: Kube, baton: Baton) -> None:
    victim = kube.names("decode")[0]
    assert baton("drain", victim, "--no-wait")[:2] == (
        0, [baton.location(), f"{victim} is being deleted"],
    )  # fmt: skip
    assert victim in kube.names("decode")
    assert baton("scale", "prefill=1", "--no-wait")[1][1:] == ["prefill 2 → 1"]


def test_pods_that_others_delete_are_not_awaited(kube: Kube, baton: Baton) -> None:
    other = kube.names("decode")[0]
    kube.api.delete(POD, HOME, other)
    kube.settle()
    kube.num_waits_to_stop = 1
    kube._waits[other] = -100
    code, out, _ = baton("scale", "decode=2")
    assert (code, out[-1]) == (0, "decode 3 → 2: done")
    assert other in kube.names("decode")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["drain", "nobody"], "there is no worker 'nobody'; there are "),
        (["scale", "big=2"], "there is no pool 'big'; there are decode, prefill"),
        (["scale", "decode=0"], "decode=0: a pool must have 1 to 256 workers"),
        (["scale", "decode"], "scale takes POOL=N, as in decode=3, not decode"),
    ],
)
def test_wrong_names_and_sizes_are_wrong_usage(
    kube: Kube, baton: Baton, words: list[str], message: str
) -> None:
    code, _, err = baton(*words)
    assert code == 2
    assert err[0].startswith(f"baton: {message}")


def test_an_interrupt_before_the_size_is_written_takes_the_mark_back(
    kube: Kube, baton: Baton
) -> None:
    workers = kube.connect_redis()
    victim = kube.names("decode")[0]
    workers.requests = {victim: 5}
    returned = []

    async def end_drain(worker_id: WorkerId) -> None:
        returned.append(worker_id.partition(".")[0])

    def interrupt() -> None:
        raise KeyboardInterrupt

    workers.end_drain = end_drain  # type: ignore[method-assign]
    kube.monkeypatch.setattr(kube, "step", interrupt)
    assert baton("drain", victim)[0] == 130
    assert (returned, kube.replicas("decode")) == ([victim], 3)
    assert DELETION_COST not in (
        kube.api.store.get(POD, HOME, victim)["metadata"].get("annotations") or {}
    )
