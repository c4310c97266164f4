"""Tests releases whose pods have a vLLM server of their own (``values-vllm.yaml``)."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from testkit.streams import make_request_bodies, record_answers, traffic
from tests.helm.chart import CHART
from tests.kube.cluster import Cluster, cluster
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
    "poolDefaults": {"replicas": 1, "vllmServer": {"args": ["--token-seconds=0.02"]}},
}
MIXED = {"pools": {"mixed": {"replicas": None, "vllmServer": {"args": None}}}}
SPLIT = {
    "pools": {
        "mixed": {"enabled": False},
        "prefill": {"enabled": True, "vllmServer": {"enabled": True}},
        "decode": {"enabled": True, "vllmServer": {"enabled": True}},
    },
    "settings": {"admission": False, "local_prefill": False},
}


def stock_values(pools: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "values-vllm.yaml").read_text())
    for patch in (OVERRIDES, pools):
        values = apply_merge_patch(values, patch)
    return values


@pytest.fixture(scope="module")
def kube() -> Iterator[Cluster]:
    if why := missing_requirement():
        pytest.skip(why)
    with cluster() as kube:
        yield kube


def install(kube: Cluster, name: str, values: dict[str, Any], *pools: str) -> Release:
    release = Release(kube, "default", name)
    release.helm.install(name, stock_values(values), wait=True, seconds=TIMEOUT_SECONDS)
    release.wait_for_sizes(dict.fromkeys(pools, 1))
    return release


@pytest.fixture(scope="module")
def release(kube: Cluster) -> Release:
    return install(kube, "baton", MIXED, "mixed")


@pytest.fixture
def split_release(kube: Cluster) -> Iterator[Release]:
    """Pools of servers that compute prompts, and of servers that generate answers."""
    release = install(kube, "split-baton", SPLIT, "prefill", "decode")
    yield release
    release.helm.uninstall(release.name, seconds=TIMEOUT_SECONDS)


def server_logs(release: Release) -> list[str]:
    """Return the logs of all vLLM containers, those of deleted pods included."""
    folder: Path = release.kube.folder
    return [path.read_text() for path in folder.glob("**/pods/*/vllm.log")]


def ends(release: Release) -> list[str]:
    return [log.splitlines()[-1] for log in server_logs(release) if "SIGTERM" in log]


def kv_reads(release: Release) -> list[tuple[str, int]]:
    """Return the address of the reader, and the number of tokens, of each KV transfer."""
    found = re.findall(r"^(\S+) read (\d+) tokens$", "".join(server_logs(release)), re.MULTILINE)
    return [(address, int(count)) for address, count in found]


def worker_log(release: Release, pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events in the log of a pod's Baton container."""
    log = release.kube.kubelet.log(release.namespace, pod["metadata"]["name"], "baton")
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


@pytest.mark.timeout(240)
def test_servers_serve_and_outlive_their_workers(release: Release) -> None:
    """The answers are the server's. While answers stream, the pool grows, a pod is deleted, and the
    pool shrinks: no answer is lost or differs, and each server gets SIGTERM when no request runs
    there any more."""
    release.test()
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
    assert ends(release) == ["vllm got SIGTERM with 0 running requests"] * 2


@pytest.mark.timeout(240)
def test_the_worker_starts_after_its_server(release: Release) -> None:
    [pod] = release.pods("mixed")
    [server] = pod["status"]["initContainerStatuses"]
    [worker] = pod["status"]["containerStatuses"]
    assert server["started"] and server["ready"]
    assert server["state"]["running"]["startedAt"] <= worker["state"]["running"]["startedAt"]
    assert not [each for each in worker_log(release, pod) if each["event"] == "waiting_for_server"]


@pytest.mark.timeout(240)
def test_the_worker_knows_what_its_server_has_cached(release: Release) -> None:
    """It reads the server's KV events over sockets in a volume that both containers mount."""
    [pod] = release.pods("mixed")

    def is_known() -> bool:
        events = [each for each in worker_log(release, pod) if "cached_blocks" in each["event"]]
        return bool(events) and events[-1].get("complete") is True

    record_answers(release.url, make_request_bodies(1, 3, 20, 40), 1)
    release.kube.wait(is_known, TIMEOUT_SECONDS, "the worker's knowledge of the server's cache")


@pytest.mark.timeout(240)
def test_prefill_and_decode_servers_exchange_kv(split_release: Release) -> None:
    """Each decode server reads the KV of prompts from the prefill server at its pod's address.
    While answers stream, the decode pool grows and shrinks: no answer is lost or differs."""
    release = split_release
    bodies = make_request_bodies(6, 2, 20, 40)
    questions = record_answers(release.url, bodies, 2)
    [pod] = release.pods("decode")
    expected = [(pod["status"]["podIP"], len(body["prompt"])) for body in bodies]
    assert sorted(kv_reads(release)) == sorted(expected)
    with traffic(release.url, questions, 4) as answers:
        release.scale({"decode": 2})
        release.kube.wait(
            lambda: len({reader for reader, _ in kv_reads(release)}) == 2,
            TIMEOUT_SECONDS,
            "a KV transfer to the second decode server",
        )
        release.scale({"decode": 1})
    assert answers and all(answer.is_right for answer in answers), [a.error for a in answers]
    assert release.restarts() == {}
    assert set(ends(release)) == {"vllm got SIGTERM with 0 running requests"}
