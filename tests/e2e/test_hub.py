"""Tests a cluster with a model of the Hugging Face hub: all its processes keep one commit, and need
no hub once the model is in the cache."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from command_line.status import fetch_members
from orchestrator.cluster_state import ClusterFolder
from testkit.fakes.hub import MODEL_ID, fake_hub
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import pause
from testkit.model_zoo import make_model

pytestmark = pytest.mark.timeout(300)


def answer(cluster: LocalCluster) -> list[int]:
    fields = {"model": MODEL_ID, "temperature": 0, "ignore_eos": True}
    return cluster.complete(range(5, 45), 16, **fields)


def restart_decode_worker(cluster: LocalCluster) -> None:
    """Kill the decode worker, and return once it serves again."""
    (worker,) = cluster.processes("decode")
    os.kill(worker["pid"], signal.SIGKILL)
    while (worker["restarts"], worker["state"]) != (1, "serving"):  # the timeout bounds this
        pause(0.1)
        (worker,) = cluster.processes("decode")
    cluster.wait_until_ready()


def num_digests(cluster: LocalCluster) -> int:
    state = ClusterFolder(cluster.home, "default").read_running()
    members = asyncio.run(fetch_members(state)).values()
    return len({each.model_digest for each in members if each.model_digest})


def test_branch_that_moves_and_a_hub_that_falls_silent_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        pinned = {"tiny": f"{MODEL_ID}@{hub.push(make_model(tmp_path / 'first', 'qwen3'))}"}
        with local_cluster(Path(MODEL_ID)) as cluster:
            assert cluster.status()["models"] == pinned
            expected = answer(cluster)
            hub.push(make_model(tmp_path / "second", "qwen3", seed=2))
            hub.behaviour = "is silent"
            hub.requests.clear()
            restart_decode_worker(cluster)
            assert num_digests(cluster) == 1
            assert answer(cluster) == expected
            assert hub.requests == []
        named = {"models": f"named={MODEL_ID}"}
        with local_cluster(prefill=0, decode=0, mixed=1, settings=named) as cluster:
            assert hub.requests != []
            assert cluster.status()["models"] == {"named": pinned["tiny"]}
            assert answer(cluster) == expected
