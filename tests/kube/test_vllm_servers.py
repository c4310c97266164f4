"""Tests a release whose pods have a vLLM server of their own (``values-vllm-stock.yaml``)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from testkit.streams import make_request_bodies, record_answers, traffic
from tests.helm.chart import CHART
from tests.kube.cluster import cluster
from tests.kube.node.images import REPOSITORY
from tests.kube.node.network import missing_requirement
from tests.kube.patches import apply_merge_patch
from tests.kube.release_journey import TIMEOUT_SECONDS, Release

pytest.importorskip("helm_python")

OVERRIDES = {
    "conductor": {"replicas": 1},
    "model": {
        "source": "hostPath",
        "path": "demo",
        "pvc": None,
        "hostPath": {"path": str(REPOSITORY / "baton/models")},
    },
    "pools": {"mixed": {"replicas": 1, "vllmServer": {"args": ["--token-seconds=0.02"]}}},
}


def stock_values() -> dict[str, Any]:
    values = yaml.safe_load((CHART / "values-vllm-stock.yaml").read_text())
    return apply_merge_patch(values, OVERRIDES)


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    if why := missing_requirement():
        pytest.skip(why)
    with cluster() as kube:
        release = Release(kube, "default", "baton")
        release.helm.install(release.name, stock_values(), wait=True, seconds=TIMEOUT_SECONDS)
        release.wait_for_sizes({"mixed": 1})
        yield release


def server_logs(release: Release) -> list[str]:
    """Return the logs of all vLLM containers, those of deleted pods included."""
    folder: Path = release.kube.folder
    return [path.read_text() for path in folder.glob("**/pods/*/vllm.log")]


@pytest.mark.timeout(240)
def test_servers_serve_and_outlive_their_workers(release: Release) -> None:
    """The answers are the server's. While answers stream, the pool grows, a pod is deleted, and the
    pool shrinks: no answer is lost or differs, and each server gets SIGTERM when no request runs
    there any more."""
    assert release.test().startswith("demo: ")
    questions = record_answers(release.url, make_request_bodies(6, 1, 20, 40), 2)
    with traffic(release.url, questions, 4) as answers:
        release.scale({"mixed": 2})
        victim = min(release.workers("mixed"))
        with release.kube.client() as opened:
            client.CoreV1Api(opened).delete_namespaced_pod(victim, release.namespace)
        release.kube.wait(
            lambda: victim not in str(release.pods("mixed")), TIMEOUT_SECONDS, "the pod's end"
        )
        release.wait_for_sizes({"mixed": 2})
        release.scale({"mixed": 1})
    assert answers and all(answer.is_right for answer in answers), [a.error for a in answers]
    assert release.restarts() == {}
    ends = [log.splitlines()[-1] for log in server_logs(release) if "SIGTERM" in log]
    assert ends == ["vllm got SIGTERM with 0 running requests"] * 2


@pytest.mark.timeout(240)
def test_the_worker_starts_after_its_server(release: Release) -> None:
    [pod] = release.pods("mixed")
    [server] = pod["status"]["initContainerStatuses"]
    [worker] = pod["status"]["containerStatuses"]
    assert server["started"] and server["ready"]
    assert server["state"]["running"]["startedAt"] <= worker["state"]["running"]["startedAt"]
    log = release.kube.kubelet.log(release.namespace, pod["metadata"]["name"], "baton")
    events = [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]
    assert "waiting_for_server" not in events
