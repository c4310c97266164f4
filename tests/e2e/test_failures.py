"""Tests that a stream continues with its next token, whichever process dies, and that no process
outlives the supervisor."""

import json
import os
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from baton.system.portability import uses_linux
from testkit.local_cluster import LocalCluster, local_cluster

pytestmark = pytest.mark.timeout(300)
PROMPT = list(range(10, 90))
TOKENS = 300
KILL_AFTER = 20
FIELDS = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def fragile() -> Iterator[LocalCluster]:
    with local_cluster(prefill=2, decode=2) as running:
        yield running


def stream_and_kill(cluster: LocalCluster, role: str) -> list[int]:
    """Stream an answer and return its tokens; after ``KILL_AFTER`` tokens, kill the process of
    ``role`` that serves it."""
    body = {
        "prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "return_token_ids": True, **FIELDS,
    }  # fmt: skip
    tokens: list[int] = []
    url = cluster.url + "/v1/completions"
    with httpx.Client(timeout=120) as client, client.stream("POST", url, json=body) as answer:
        request_id = answer.headers["x-baton-request-id"]
        killed = False
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
            if len(tokens) >= KILL_AFTER and not killed:
                killed = True
                os.kill(pid_of(cluster, role, request_id), signal.SIGKILL)
    assert line == "data: [DONE]" or not line
    return tokens


def pid_of(cluster: LocalCluster, role: str, request_id: str) -> int:
    pids = {process["id"]: process["pid"] for process in cluster.status()["processes"]}
    if role in pids:
        return int(pids[role])
    explained = cluster.get(f"/admin/requests/{request_id}")
    return int(pids[explained[role]["id"]])


@pytest.mark.parametrize("role", ["decode", "prefill", "conductor", "kvstore", "redis"])
def test_a_stream_survives_a_killed_process(role: str, fragile: LocalCluster) -> None:
    fragile.wait_until_ready()
    expected = fragile.complete(PROMPT, TOKENS, **FIELDS)
    assert stream_and_kill(fragile, role) == expected
    fragile.wait_until_ready()
    assert fragile.complete(PROMPT, TOKENS, **FIELDS) == expected
    assert fragile.baton("check").returncode == 0
    assert any(p["restarts"] for p in fragile.processes(role))


@pytest.mark.skipif(not uses_linux(), reason="speculation needs the CPU kernels")
def test_a_stream_with_drafts_survives_a_killed_worker(fragile: LocalCluster) -> None:
    """The answer is that of a cluster without speculation. It repeats itself, so tokens are
    drafted."""
    fragile.wait_until_ready()
    expected = fragile.complete(PROMPT, TOKENS, **FIELDS)
    settings: dict[str, object] = {"speculation": "ngram", "ops_port": 0}
    with local_cluster(prefill=1, decode=2, settings=settings) as drafting:
        for role in ("decode", "prefill"):
            drafting.wait_until_ready()
            assert stream_and_kill(drafting, role) == expected
        drafting.wait_until_ready()
        assert drafting.complete(PROMPT, TOKENS, **FIELDS) == expected
        assert sum(drafted_tokens(worker["ops"]) for worker in drafting.processes("decode")) > 0


def drafted_tokens(address: str) -> float:
    """Return a worker's counter of drafted tokens."""
    lines = httpx.get(f"http://{address}/metrics").text.splitlines()
    name = "baton_worker_drafted_tokens_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_ctrl_c_drains_and_leaves_no_process() -> None:
    with local_cluster() as cluster:
        state = json.loads((cluster.home / "clusters/default/state.json").read_text())
        pids = [entry["pid"] for entry in state["processes"]]
        supervisor = psutil.Process(state["supervisor_pid"])
        supervisor.send_signal(signal.SIGINT)
        psutil.wait_procs([supervisor])
        assert [pid for pid in pids if psutil.pid_exists(pid)] == []
        assert cluster.baton("status", check=False).returncode == 1


def test_all_processes_end_with_a_killed_supervisor() -> None:
    with local_cluster() as cluster:
        state = json.loads((cluster.home / "clusters/default/state.json").read_text())
        children = [psutil.Process(entry["pid"]) for entry in state["processes"]]
        os.kill(state["supervisor_pid"], signal.SIGKILL)
        psutil.wait_procs(children)
        assert not any(child.is_running() for child in children)
