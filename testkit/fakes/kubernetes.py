"""A small Kubernetes API server with controllers, in the test's own process.

It serves the real resource paths of Deployments, StatefulSets, their scale, and pods. Like the real
ReplicaSet controller, its controller first deletes pods that are not scheduled, then those that are
not ready, those with a lower deletion cost, and newer ones.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

COST = "controller.kubernetes.io/pod-deletion-cost"
PATH = re.compile(
    r"/(?:api/v1|apis/apps/v1)/namespaces/(?P<namespace>[^/]+)/(?P<kind>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>scale))?$"
)
KINDS = {"deployments": "Deployment", "statefulsets": "StatefulSet"}


def labels_of(role: str, cluster: str = "test", pool: str = "") -> dict[str, str]:
    return {
        "app.kubernetes.io/part-of": "baton",
        "baton.dev/cluster": cluster,
        "baton.dev/role": role,
    } | ({"baton.dev/pool": pool} if pool else {})


def matches(selector: str, labels: dict[str, str]) -> bool:
    """Return whether ``labels`` match the selector. It may contain the two operators that our
    client uses: equality and ``in``."""
    for term in re.findall(r"[^,(]+(?:\([^)]*\))?", selector):
        found = re.fullmatch(r"\s*(\S+) in \(([^)]*)\)", term)
        if found:
            if labels.get(found[1]) not in found[2].split(","):
                return False
        elif labels.get(term.partition("=")[0]) != term.partition("=")[2]:
            return False
    return True


@dataclass
class FakePod:
    name: str
    role: str
    number: int
    ready: bool = True
    phase: str = "Running"
    node: str = "n1"
    is_being_deleted: bool = False
    annotations: dict[str, str] = field(default_factory=dict)
    waiting: str = ""
    restarts: int = 0
    termination_message: str = ""
    pool: str = ""

    @property
    def rank(self) -> tuple[bool, bool, bool, int, int]:
        """The pod's sort key: the controller deletes the pod with the lowest rank first."""
        cost = int(self.annotations.get(COST, 0))
        return bool(self.node), self.phase != "Pending", self.ready, cost, -self.number

    def as_json(self) -> dict[str, Any]:
        state = {"waiting": {"reason": self.waiting}} if self.waiting else {"running": {}}
        metadata: dict[str, Any] = {
            "name": self.name,
            "uid": f"uid-{self.number}",
            "labels": labels_of(self.role, pool=self.pool),
            "annotations": dict(self.annotations),
            "creationTimestamp": f"2026-01-01T00:{self.number // 60:02}:{self.number % 60:02}Z",
        }
        if self.is_being_deleted:
            metadata["deletionTimestamp"] = "2026-01-01T02:00:00Z"
        return {
            "metadata": metadata,
            "spec": {"containers": [{"name": "worker"}], "nodeName": self.node or None},
            "status": {
                "phase": self.phase,
                "conditions": [
                    {"type": "Ready", "status": "True" if self.ready else "False"},
                    {"type": "PodScheduled", "status": "True" if self.node else "False",
                     "reason": "" if self.node else "Unschedulable",
                     "message": "" if self.node else "0/3 nodes have a GPU"},
                ],
                "containerStatuses": [
                    {"name": "worker", "image": "baton", "imageID": "", "ready": self.ready,
                     "restartCount": self.restarts, "state": state,
                     "lastState": {
                         "terminated": {"exitCode": 2, "message": self.termination_message}
                     }
                     if self.termination_message else {}}
                ],
            },
        }  # fmt: skip


@dataclass
class FakePool:
    kind: str
    name: str
    role: str
    replicas: int
    version: int = 1
    cluster: str = "test"
    pool: str = ""

    def as_json(self) -> dict[str, Any]:
        labels = labels_of(self.role, self.cluster, self.pool)
        return {
            "metadata": {"name": self.name, "labels": labels, "resourceVersion": str(self.version)},
            "spec": {
                "replicas": self.replicas,
                "serviceName": self.name,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {"containers": [{"name": "worker"}]},
                },
            },
        }


class FakeKubernetes:
    """The API server's state: ``pools`` and ``pods`` by name, ``calls`` as (verb, resource) in
    order, ``writes`` of a scale as (name, replicas). Tests inject faults by these attributes:

    - ``forbidden``: (verb, resource) pairs that are refused with 403.
    - ``hanging``: (verb, resource) pairs whose calls hang until the server closes.
    - ``num_changes_after_read``: how many times a Deployment changes after its scale was read.
    - ``resize_after_read``: the sizes, by name, that pools get after their scale was read.
    - ``deletes_wrong_pod``: the controller deletes the pod that it should delete last.
    - ``controllers_disabled``: the controller does nothing.
    - ``num_lost_responses``: how many writes of a scale take effect but get no response."""

    def __init__(self) -> None:
        self.pools: dict[str, FakePool] = {}
        self.pods: dict[str, FakePod] = {}
        self.calls: list[tuple[str, str]] = []
        self.writes: list[tuple[str, int]] = []
        self.forbidden: set[tuple[str, str]] = set()
        self.hanging: set[tuple[str, str]] = set()
        self.num_changes_after_read = 0
        self.resize_after_read: dict[str, int] = {}
        self.deletes_wrong_pod = False
        self.controllers_disabled = False
        self.num_lost_responses = 0
        self.closed = threading.Event()
        self.lock = threading.Lock()
        self.url = ""
        self._numbers = iter(range(1_000_000))

    def add_pool(
        self, role: str, replicas: int, kind: str = "Deployment", name: str = ""
    ) -> FakePool:
        pool = FakePool(kind, f"baton-{name or role}", role, replicas, pool=name)
        self.pools[pool.name] = pool
        self.reconcile(pool)
        for pod in self.pods.values():
            pod.ready, pod.phase, pod.node = True, "Running", "n1"
        return pool

    def names(self, role: str, leaving: bool = False) -> list[str]:
        found = [
            pod
            for pod in self.pods.values()
            if pod.role == role and pod.is_being_deleted is leaving
        ]
        return sorted(pod.name for pod in found)

    # -- controllers -----------------------------------------------------------------------

    def reconcile(self, pool: FakePool) -> None:
        if self.controllers_disabled:
            return
        mine = [
            pod for pod in self.pods.values()
            if (pod.role, pod.pool) == (pool.role, pool.pool) and not pod.is_being_deleted
        ]  # fmt: skip
        by_rank = sorted(mine, key=lambda pod: pod.rank, reverse=self.deletes_wrong_pod)
        if pool.kind == "StatefulSet":
            by_rank = sorted(mine, key=lambda pod: -pod.number)
        for pod in by_rank[: max(len(mine) - pool.replicas, 0)]:
            pod.is_being_deleted = True
        for _ in range(pool.replicas - len(mine)):
            number = next(self._numbers)
            name = f"{pool.name}-{number}"
            pod = FakePod(name, pool.role, number, False, "Pending", "", pool=pool.pool)
            self.pods[pod.name] = pod

    # -- requests --------------------------------------------------------------------------

    def answer(self, verb: str, url: str, body: Any) -> tuple[int, dict[str, Any]]:
        parsed = urlparse(url)
        found = PATH.match(parsed.path)
        if found is None:
            return status(404, "no such path")
        kind, name, sub = found["kind"], found["name"], found["sub"]
        resource = kind + (f"/{sub}" if sub else "")
        action = "list" if verb == "get" and not name else verb
        is_dry_run = "dryRun" in parse_qs(parsed.query)
        self.calls.append((f"dry-run {action}" if is_dry_run else action, resource))
        if (action, resource) in self.forbidden:
            return status(403, f'User "u" cannot {action} resource "{resource}"')
        if is_dry_run:
            return 200, {}
        selector = parse_qs(parsed.query).get("labelSelector", [""])[0]
        if kind == "pods":
            return self._pod(action, name, selector, body)
        if not name:
            items = [
                pool.as_json()
                for pool in self.pools.values()
                if KINDS[kind] == pool.kind
                and matches(selector, labels_of(pool.role, pool.cluster))
            ]
            return 200, {"kind": f"{KINDS[kind]}List", "apiVersion": "apps/v1", "items": items}
        return self._scale(action, name, body)

    def _scale(self, action: str, name: str, body: Any) -> tuple[int, dict[str, Any]]:
        pool = self.pools.get(name)
        if pool is None:
            return status(404, f'deployments.apps "{name}" not found')
        if action == "update":
            if body["metadata"]["resourceVersion"] != str(pool.version):
                return status(409, "the object has been modified")
            pool.replicas = body["spec"]["replicas"]
            self.writes.append((name, pool.replicas))
            pool.version += 1
            self.reconcile(pool)
        scale = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": name, "resourceVersion": str(pool.version)},
            "spec": {"replicas": pool.replicas},
        }
        if action == "get" and self.num_changes_after_read:
            self.num_changes_after_read -= 1
            pool.version += 1
        if action == "get" and name in self.resize_after_read:
            pool.replicas = self.resize_after_read.pop(name)
            pool.version += 1
        return 200, scale

    def _pod(
        self, action: str, name: str | None, selector: str, body: Any
    ) -> tuple[int, dict[str, Any]]:
        if action == "list":
            items = [
                pod.as_json() for pod in self.pods.values()
                if matches(selector, labels_of(pod.role))
            ]  # fmt: skip
            return 200, {"kind": "PodList", "apiVersion": "v1", "items": items}
        pod = self.pods.get(name or "")
        if pod is None:
            return status(404, f'pods "{name}" not found')
        wanted = body.get("metadata", {}).get("uid") or body.get("preconditions", {}).get("uid")
        if wanted not in (None, f"uid-{pod.number}"):
            return status(409, "the uid in the precondition is another one")
        if action == "patch":
            for key, value in body["metadata"]["annotations"].items():
                pod.annotations.pop(key, None)
                if value is not None:
                    pod.annotations[key] = value
        else:
            assert action == "delete"
            pod.is_being_deleted = True
            for pool in self.pools.values():
                self.reconcile(pool)
        return 200, pod.as_json()


def status(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "apiVersion": "v1", "message": message, "code": code}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # buffer each response, so that it is sent as one packet
    fake: FakeKubernetes

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _handle(self, verb: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        with self.fake.lock:
            code, response = self.fake.answer(verb, self.path, body)
            hangs = self.fake.calls[-1] in self.fake.hanging if self.fake.calls else False
            if code == 200 and self.fake.calls[-1][0] == "update" and self.fake.num_lost_responses:
                self.fake.num_lost_responses -= 1
                hangs = True
        if hangs:
            self.fake.closed.wait()
            self.close_connection = True
            return
        text = json.dumps(response).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self._handle("get")

    def do_PUT(self) -> None:
        self._handle("update")

    def do_PATCH(self) -> None:
        self._handle("patch")

    def do_DELETE(self) -> None:
        self._handle("delete")


@contextmanager
def fake_kubernetes() -> Iterator[FakeKubernetes]:
    fake = FakeKubernetes()
    handler = type("Handler", (_Handler,), {"fake": fake})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        fake.closed.set()
        server.shutdown()
        server.server_close()
        thread.join()
