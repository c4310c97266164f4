"""Tests that nodes run pods as processes with files, names and addresses, and remove all of these
again."""

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.stream import stream

from tests.kube.api import namespace_and_name
from tests.kube.cluster import Cluster, cluster
from tests.kube.kinds import (
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    NAMESPACE,
    POD,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Object,
)
from tests.kube.node.dns import answer
from tests.kube.node.environment import expand_references
from tests.kube.node.images import REPOSITORY
from tests.kube.node.network import missing_requirement
from tests.kube.pods import phase
from tests.kube.subresources import is_ready

SECONDS = 20.0
"""The timeout of each wait, which is enough for a container to start on a busy machine."""


class Bench:
    """Creates and reads objects in its own namespace of the shared cluster."""

    def __init__(self, kube: Cluster, namespace: str) -> None:
        self.kube, self.api, self.namespace = kube, kube.api, namespace
        self.api.create(NAMESPACE, {"metadata": {"name": namespace}})

    def create(self, kind: Kind, name: str, **body: Any) -> Object:
        metadata = {"name": name, "namespace": self.namespace, **body.pop("metadata", {})}
        return self.api.create(kind, {"metadata": metadata, **body})

    def pod(self, name: str = "p", container: Object | None = None, **spec: Any) -> None:
        made = {"name": "c", "image": "toy:1", **program("serve", "8000"), **(container or {})}
        labels = {"labels": {"app": name}}
        spec = {"terminationGracePeriodSeconds": 5, "containers": [made], **spec}
        self.create(POD, name, metadata=labels, spec=spec)

    def get(self, name: str = "p") -> Object:
        return self.api.store.get(POD, self.namespace, name)

    def wait(self, until: Callable[[Object], object], name: str = "p") -> Object:
        self.kube.wait(lambda: until(self.get(name)), SECONDS, f"pod {name}")
        return self.get(name)

    def ask(self, path: str = "/", name: str = "p", port: int = 8000) -> str:
        return fetch(f"http://{self.get(name)['status']['podIP']}:{port}{path}")

    def log(self, name: str = "p") -> str:
        return self.kube.kubelet.log(self.namespace, name, "")

    def gone(self, name: str = "p") -> bool:
        return self.api.store.find(POD, self.namespace, name) is None

    def events(self, reason: str) -> list[str]:
        found = self.api.store.all(EVENT, self.namespace)
        return [event["message"] for event in found if event["reason"] == reason]


def status_of(pod: Object) -> Object:
    """Return the status of the pod's only container, which is empty before the kubelet has reported
    it."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or [{}]
    found: Object = statuses[0]
    return found


def program(*arguments: str) -> Object:
    return {
        "command": ["python", "-m", "tests.kube.container_program", *arguments],
        "workingDir": str(REPOSITORY),
    }


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=SECONDS) as response:
        text: str = response.read().decode()
    return text


def answers(url: str, count: int) -> set[str]:
    """Make ``count`` connections; return the set of their responses, which is empty if a connection
    is refused."""
    try:
        return {fetch(url) for _ in range(count)}
    except OSError:
        return set()


def probe(path: str, **more: Any) -> Object:
    return {"httpGet": {"path": path, "port": 8000}, "periodSeconds": 1, **more}


@pytest.fixture
def bench(kube: Cluster, request: pytest.FixtureRequest) -> Bench:
    name = request.node.name.partition("[")[0].replace("_", "-")
    return Bench(kube, name[:60].rstrip("-"))


def test_a_container_has_its_environment_files_names_and_user(bench: Bench) -> None:
    bench.create(CONFIG_MAP, "conf", data={"a.txt": "from a config map", "b": "x"})
    bench.create(SECRET, "secret", stringData={"key": "hidden"})
    secret = {"valueFrom": {"secretKeyRef": {"name": "secret", "key": "key"}}}
    field = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    bench.pod(
        container={
            "env": [
                {"name": "SECRET", **secret},
                {"name": "POD", **field},
                {"name": "BODY", "value": "$(POD) $(SECRET) $(NOBODY) $$(POD) $(MAP_b)"},
            ],
            "envFrom": [{"prefix": "MAP_", "configMapRef": {"name": "conf"}}],
            "volumeMounts": [
                {"name": "conf", "mountPath": "/etc/toy"},
                {"name": "scratch", "mountPath": "/scratch"},
            ],
            "readinessProbe": probe("/"),
            "securityContext": {"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
        },
        volumes=[
            {"name": "conf", "configMap": {"name": "conf"}},
            {"name": "scratch", "emptyDir": {}},
        ],
        securityContext={"runAsUser": 10001, "runAsNonRoot": True, "fsGroup": 10001},
    )
    bench.wait(is_ready)
    assert bench.ask() == "p hidden $(NOBODY) $(POD) x"
    assert bench.ask("/etc/toy/a.txt") == "from a config map"
    account = "/var/run/secrets/kubernetes.io/serviceaccount"
    assert bench.ask(f"{account}/namespace") == bench.namespace
    assert "nameserver" in bench.ask("/etc/resolv.conf")
    assert bench.log() == "serving as 10001\n"
    for path, code in (("/scratch/x", 0), ("/etc/x", 1)):
        words, environment = bench.kube.kubelet.exec_command(
            bench.namespace, "p", "", ["sh", "-c", f"echo 1 > {path}"]
        )
        done = subprocess.run(words, env=environment, capture_output=True, check=False)
        assert bool(done.returncode) == bool(code), path
    assert bench.ask("/scratch/x") == "1\n"
    assert not Path("/scratch").exists(), "the mount is not visible on this machine"


def test_a_mounted_config_map_follows_its_changes(bench: Bench) -> None:
    """All files change at once, without a restart. A file that is mounted by a subPath keeps its
    old content."""
    bench.create(CONFIG_MAP, "conf", data={"a": "old a", "b": "old b"})
    bench.pod(
        container={
            "volumeMounts": [
                {"name": "conf", "mountPath": "/etc/toy"},
                {"name": "conf", "mountPath": "/etc/one", "subPath": "a"},
            ],
            "readinessProbe": probe("/"),
        },
        volumes=[{"name": "conf", "configMap": {"name": "conf"}}],
    )
    bench.wait(is_ready)
    assert [bench.ask(path) for path in ("/etc/toy/a", "/etc/toy/b", "/etc/one")] == [
        "old a", "old b", "old a",
    ]  # fmt: skip
    changed = bench.api.store.get(CONFIG_MAP, bench.namespace, "conf")
    bench.api.update(CONFIG_MAP, changed | {"data": {"a": "new a", "c": "new c"}})
    bench.kube.wait(lambda: bench.ask("/etc/toy/a") == "new a", SECONDS, "the new file")
    assert bench.ask("/etc/toy/c") == "new c" and bench.ask("/etc/one") == "old a"
    with pytest.raises(urllib.error.HTTPError):
        bench.ask("/etc/toy/b")
    assert status_of(bench.get())["restartCount"] == 0


def test_services_have_dns_names_and_balance_over_ready_pods(bench: Bench) -> None:
    for name in ("one", "two"):
        env = [{"name": "BODY", "value": name}]
        bench.pod(name, {"env": env, "readinessProbe": probe("/")})
    for name in ("one", "two"):
        pod = bench.get(name)
        pod["metadata"]["labels"]["in"] = "service"
        pod["metadata"].pop("resourceVersion")  # since the kubelet changes the pod, too
        bench.api.update(POD, pod)
    ports = [{"port": 80, "targetPort": 8000}]
    service = bench.create(SERVICE, "both", spec={"selector": {"in": "service"}, "ports": ports})
    head = {"selector": {"in": "service"}, "ports": ports, "clusterIP": "None"}
    bench.create(SERVICE, "head", spec=head)
    for name in ("one", "two"):
        bench.wait(is_ready, name)
    url = f"http://{service['spec']['clusterIP']}"
    bench.kube.wait(lambda: answers(url, 2) == {"one", "two"}, SECONDS, "both pods")

    def lookup(name: str) -> str:
        code = f"import socket; print(sorted(set(socket.gethostbyname_ex({name!r})[2])))"
        words, environment = bench.kube.kubelet.exec_command(
            bench.namespace, "one", "", ["python", "-c", code]
        )
        return subprocess.run(words, env=environment, capture_output=True, text=True).stdout.strip()

    addresses = sorted(bench.get(name)["status"]["podIP"] for name in ("one", "two"))
    assert lookup("both") == str([service["spec"]["clusterIP"]])
    assert lookup(f"head.{bench.namespace}.svc") == str(addresses)
    assert lookup("kubernetes.default.svc") != ""
    bench.api.delete(POD, bench.namespace, "one")
    bench.kube.wait(lambda: bench.gone("one"), SECONDS, "pod one to go")
    bench.kube.wait(lambda: answers(url, 4) == {"two"}, SECONDS, "pod two alone")


def test_a_deleted_pod_gets_sigterm(bench: Bench) -> None:
    bench.pod(container={"readinessProbe": probe("/")})
    bench.wait(is_ready)
    log = bench.kube.folder / "pods" / bench.get()["metadata"]["uid"] / "c.log"
    bench.api.delete(POD, bench.namespace, "p")
    bench.kube.wait(bench.gone, SECONDS, "the pod to go")
    assert log.read_text(encoding="utf-8").endswith("\nSIGTERM\n")


def test_a_pod_that_is_deleted_while_its_program_is_imported_ends_at_once(bench: Bench) -> None:
    """The kernel sends the first process of a container only those signals that it handles, and the
    program itself handles SIGTERM only once it can drain."""
    code = """
import signal
import baton.__main__
from command_line import main
main.main = lambda: (print("importing", flush=True), signal.pause())
baton.__main__.main()
"""
    bench.pod(container={"command": ["python", "-c", code], "workingDir": str(REPOSITORY)})
    bench.wait(lambda pod: phase(pod) == "Running" and bench.log() == "importing\n")
    bench.api.delete(POD, bench.namespace, "p")
    bench.kube.wait(bench.gone, SECONDS, "the pod to go")
    assert bench.events("Killing") == []


def test_a_pod_that_exceeds_its_grace_period_is_killed(bench: Bench) -> None:
    bench.pod(container={"command": ["sh", "-c", "trap '' TERM; echo up; sleep 100 & wait; wait"]})
    bench.wait(lambda pod: phase(pod) == "Running" and bench.log() == "up\n")
    bench.api.delete(POD, bench.namespace, "p", {"gracePeriodSeconds": 1})
    bench.kube.wait(bench.gone, SECONDS, "the pod to go")
    assert bench.events("Killing") == ["Container c exceeded its grace period"]


def test_a_container_that_ends_is_restarted(bench: Bench) -> None:
    bench.pod(container={"command": ["sh", "-c", "exit 3"]})
    pod = bench.wait(lambda pod: status_of(pod).get("restartCount") == 1)
    assert status_of(pod)["lastState"]["terminated"]["exitCode"] == 3


def test_startup_readiness_and_liveness_probes_take_effect(bench: Bench) -> None:
    serve = " ".join(program("serve", "8000")["command"])
    bench.pod(
        container={
            "command": ["sh", "-c", f"touch /alive; exec {serve}"],
            "startupProbe": probe("/", failureThreshold=20),
            "readinessProbe": probe("/ready"),
            "livenessProbe": probe("/alive", failureThreshold=1),
        }
    )
    bench.wait(lambda pod: status_of(pod).get("started"))
    assert not is_ready(bench.get())
    words, environment = bench.kube.kubelet.exec_command(bench.namespace, "p", "", ["rm", "/alive"])
    subprocess.run(words, env=environment, check=True)
    bench.wait(lambda pod: status_of(pod)["restartCount"] == 1)
    assert any("liveness probe failed" in event for event in bench.events("Killing"))


def test_a_pod_waits_for_a_missing_secret_and_names_it(bench: Bench) -> None:
    secret = {"secretKeyRef": {"name": "later", "key": "key"}}
    env = [{"name": "BODY", "valueFrom": secret}]
    bench.pod(container={"env": env, "readinessProbe": probe("/")})

    def waiting(pod: Object) -> Object:
        state: Object = status_of(pod).get("state") or {}
        return state.get("waiting") or {}

    pod = bench.wait(lambda pod: waiting(pod).get("reason") == "CreateContainerConfigError")
    assert waiting(pod)["message"] == 'secret "later" not found'
    bench.create(SECRET, "later", stringData={"key": "it came"})
    bench.wait(is_ready)
    assert bench.ask() == "it came"


def test_pods_that_are_not_restarted_succeed_or_fail(bench: Bench) -> None:
    bench.pod("good", {"command": ["sh", "-c", "echo done"]}, restartPolicy="Never")
    bench.pod("bad", {"command": ["sh", "-c", "exit 1"]}, restartPolicy="Never")
    slow = {"command": ["sleep", "100"]}
    bench.pod("late", slow, restartPolicy="Never", activeDeadlineSeconds=1,
              terminationGracePeriodSeconds=0)  # fmt: skip
    bench.wait(lambda pod: phase(pod) == "Succeeded", "good")
    bench.wait(lambda pod: phase(pod) == "Failed", "bad")
    late = bench.wait(lambda pod: phase(pod) == "Failed", "late")
    assert late["status"]["reason"] == "DeadlineExceeded"
    assert bench.log("good") == "done\n"


def test_a_root_container_is_refused_with_run_as_non_root(bench: Bench) -> None:
    bench.pod(securityContext={"runAsNonRoot": True})
    bench.kube.wait(lambda: bench.events("Failed"), SECONDS, "the refusal of the pod")
    assert bench.events("Failed") == [
        "Error: container has runAsNonRoot and image will run as root"
    ]


def test_a_volume_of_a_claim_outlives_its_pod(bench: Bench) -> None:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    bench.create(CLAIM, "disk", spec=claim)
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "disk"}}]
    mounts = {"volumeMounts": [{"name": "v", "mountPath": "/disk"}]}
    for name, text in (("one", "a"), ("two", "b")):
        write = {"command": ["sh", "-c", f"echo {text} >> /disk/log; cat /disk/log"], **mounts}
        bench.pod(name, write, restartPolicy="Never", volumes=volumes)
        bench.wait(lambda pod: phase(pod) == "Succeeded", name)
    assert bench.log("two") == "a\nb\n"


def test_kubectl_exec_returns_output_and_exit_code(bench: Bench) -> None:
    bench.pod(container={"readinessProbe": probe("/")})
    bench.wait(is_ready)
    with bench.kube.client() as opened:
        done = stream(
            client.CoreV1Api(opened).connect_get_namespaced_pod_exec, "p", bench.namespace,
            command=["sh", "-c", "echo out; echo error >&2; exit 3"],
            stderr=True, stdout=True, _preload_content=False,
        )  # fmt: skip
        done.run_forever(timeout=SECONDS)
    done.sock.shutdown()  # close() leaves its socket open once the server has closed
    assert (done.read_stdout(), done.read_stderr()) == ("out\n", "error\n")
    assert done.returncode == 3


def test_a_service_account_may_have_no_token(bench: Bench) -> None:
    bench.create(SERVICE_ACCOUNT, "plain", automountServiceAccountToken=False)
    bench.pod(container={"readinessProbe": probe("/")}, serviceAccountName="plain")
    bench.wait(is_ready)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        bench.ask("/var/run/secrets/kubernetes.io/serviceaccount/token")


def test_a_cluster_leaves_no_process_interface_or_folder(kube: Cluster) -> None:
    """The containers would run forever if the cluster didn't stop them."""
    with cluster(nodes=["n"]) as other:
        spec = {"containers": [{"name": "c", "image": "x:1", "command": ["sleep", "314159"]}]}
        template = {"metadata": {"labels": {"a": "b"}}, "spec": spec}
        other.api.create(
            DEPLOYMENT,
            {
                "metadata": {"name": "d", "namespace": "default"},
                "spec": {
                    "replicas": 2,
                    "selector": {"matchLabels": {"a": "b"}},
                    "template": template,
                },
            },
        )
        other.wait(lambda: len(other.ready({"a": "b"})) == 2, SECONDS, "two ready pods")
        places = [namespace_and_name(pod) for pod in other.pods()]
        runners = [other.kubelet.runner(*place) for place in places]
        pids = [each.exec_command("", [])[0][1].partition("=")[2] for each in runners]
        bridge = other.bridge
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        assert Path(f"/sys/class/net/{bridge}").exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not Path(f"/sys/class/net/{bridge}").exists()
    assert not other.folder.exists()


def test_containers_end_with_a_killed_cluster() -> None:
    if why := missing_requirement():
        pytest.skip(why)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kube.killed_cluster"], cwd=REPOSITORY, stdout=subprocess.PIPE,
        stdin=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists():
            return
        subprocess.run(["sleep", "0.01"], check=True)
    raise AssertionError(f"the container with process id {pid} outlived its cluster")


# -- pure functions ----------------------------------------------------------------------------


def test_references_in_commands_and_values_are_expanded() -> None:
    known = {"A": "1", "B": "$(A)"}
    assert expand_references("$(A)-$(B)-$(C)-$$(A)-$A", known) == "1-$(A)-$(C)-$(A)-$A"


def test_dns_queries_are_answered() -> None:
    question = b"\x12\x34\x01\x00\0\x01\0\0\0\0\0\0" + b"\x01a\x01b\0" + b"\0\x01\0\x01"
    reply = answer(question, {"a.b": ["10.0.0.7"]}.get)
    assert reply[:8] == b"\x12\x34\x85\x80\0\x01\0\x01"
    assert reply.endswith(b"\0\x04\x0a\0\0\x07")
    nothing = answer(question, {}.get)
    assert nothing[3] & 0x0F == 3 and nothing[6:8] == b"\0\0"
