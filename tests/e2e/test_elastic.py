"""Tests that a cluster whose workers are Ray actors serves, grows, shrinks, and leaves no process
behind."""

import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Iterator

import psutil
import pytest

from testkit.local_cluster import LocalCluster, local_cluster
from tests.e2e.sockets import MEMORY_SOCKET, sockets_by_process

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
PROMPT = list(range(10, 90))
FOLDER = re.compile(re.escape(tempfile.gettempdir()) + r"/baton-ray-\w+")
FIELDS = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def over_ray() -> Iterator[LocalCluster]:
    with local_cluster(settings={"on": "ray"}) as running:
        yield running


def states(cluster: LocalCluster, role: str) -> dict[str, str]:
    return {entry["id"]: entry["state"] for entry in cluster.processes(role)}


def test_a_ray_cluster_serves_scales_drains_and_stops(over_ray: LocalCluster) -> None:
    cluster = over_ray
    state = json.loads((cluster.home / "clusters/default/state.json").read_text())
    supervisor = psutil.Process(state["supervisor_pid"])
    assert states(cluster, "prefill") == {"prefill-0": "serving"}
    names = sockets_by_process(cluster)
    assert names["supervisor"] == {"control", "ray"}
    assert names["ray: raylet"] == {"ray", "ray_local"}
    assert names["prefill-0"] == {"grpc", "framed", "kv", MEMORY_SOCKET}
    tokens = cluster.complete(PROMPT, 16, **FIELDS)
    assert len(tokens) == 16

    scaled = cluster.baton("scale", "decode=2")
    assert scaled.stdout.splitlines()[-1] == "decode 1 → 2: done"
    assert states(cluster, "decode") == {"decode-0": "serving", "decode-1": "serving"}
    assert cluster.complete(PROMPT, 16, **FIELDS) == tokens

    drained = cluster.baton("drain", "decode-0")
    assert drained.stdout.splitlines()[-1] == "decode-0 is gone"
    assert states(cluster, "decode") == {"decode-1": "serving"}
    assert cluster.complete(PROMPT, 16, **FIELDS) == tokens
    assert cluster.baton("check").returncode == 0

    processes = supervisor.children(recursive=True)
    cluster.baton("down")
    _, alive = psutil.wait_procs([supervisor, *processes], timeout=30)
    assert alive == []


def test_ray_ends_with_a_killed_supervisor(over_ray: LocalCluster) -> None:
    state = json.loads((over_ray.home / "clusters/default/state.json").read_text())
    supervisor = psutil.Process(state["supervisor_pid"])
    processes = supervisor.children(recursive=True)
    # Ray's own agents take a minute to exit, and Ray's folder remains: the test removes both.
    agents = [process for process in processes if "Agent" in process.name()]
    command_lines = [str(process.cmdline()) for process in processes]
    folders = {match[0] for line in command_lines for match in FOLDER.finditer(line)}
    try:
        supervisor.kill()
        others = [process for process in processes if process not in agents]
        _, alive = psutil.wait_procs([supervisor, *others], timeout=60)
        assert alive == []
    finally:
        for agent in agents:
            agent.kill()
        for folder in folders:
            shutil.rmtree(folder)
