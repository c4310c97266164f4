"""Tests workers that start a ``vllm serve`` each. In its place is a program with vLLM's wire forms
and no model."""

import os
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from testkit.fakes.vllm_server import expected_answer
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import pause

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[2]
TOKENS = 150
PROMPTS = [[200 + number, 300, 400, 500] for number in range(8)]


def server_python(folder: Path, program: str) -> Path:
    """Write what ``engine_python`` names: it runs ``program`` in the place of vLLM's command, and
    says that it has vLLM when it is asked."""
    path = folder / "python"
    path.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && exit\nshift 2\n'
        f'cd {ROOT} && PYTHONPATH={ROOT} exec {sys.executable} {program} "$@"\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    python = server_python(tmp_path_factory.mktemp("python"), "-m tests.kube.vllm_program")
    settings: dict[str, object] = {
        "engine": "vllm",
        "engine_python": python,
        "engine_args": "--token-seconds=0.02",
        "admission": "off",
    }
    with local_cluster(prefill=0, decode=0, mixed=2, settings=settings) as running:
        yield running
    assert servers_of(running) == []


def servers_of(cluster: LocalCluster) -> list[psutil.Process]:
    """Return the servers that run for a cluster's workers: those with its home in their
    environment, in the order of their start."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_server = any(each.startswith("--kv-events-config") for each in words)
            if (
                is_server
                and "baton.system.group_guard" not in words
                and process.environ().get("BATON_HOME") == str(cluster.home)
            ):
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=psutil.Process.create_time)


def num_running(server: psutil.Process) -> int:
    (port,) = [each[7:] for each in server.cmdline() if each.startswith("--port=")]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        found = re.search(r"num_requests_running\{[^}]*\} (\d+)", response.read().decode())
    assert found is not None
    return int(found[1])


def test_each_worker_has_a_server(cluster: LocalCluster) -> None:
    assert len(servers_of(cluster)) == 2
    for prompt in PROMPTS:
        assert cluster.complete(prompt, 5, temperature=0) == expected_answer(prompt, 5)
    arguments = servers_of(cluster)[0].cmdline()
    assert {"--enable-prompt-tokens-details", "--token-seconds=0.02"} <= {*arguments}
    assert not any(each.startswith("--kv-transfer-config") for each in arguments)


def test_a_killed_server_comes_back_and_loses_no_answer(cluster: LocalCluster) -> None:
    first, second = servers_of(cluster)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(cluster.complete, each, TOKENS, temperature=0) for each in PROMPTS]
        while not num_running(first):
            pause(0.01)
        first.send_signal(signal.SIGKILL)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.result(60) == expected_answer(prompt, TOKENS)
    while first in servers_of(cluster) or len(servers_of(cluster)) < 2:
        pause(0.1)
    assert second in servers_of(cluster)
    cluster.wait_until_ready()


def test_a_server_ends_with_its_worker(cluster: LocalCluster) -> None:
    servers = servers_of(cluster)
    worker = cluster.processes("mixed")[0]
    mine = [each for each in psutil.Process(worker["pid"]).children(True) if each in servers]
    os.kill(worker["pid"], signal.SIGKILL)
    while any(each.is_running() for each in mine):
        pause(0.1)
    assert len(mine) == 1
    cluster.wait_until_ready()
    cluster.baton("scale", "mixed=1")
    while len(servers_of(cluster)) > 1:
        pause(0.1)
    assert cluster.complete(PROMPTS[0], 5, temperature=0) == expected_answer(PROMPTS[0], 5)


def test_a_server_that_cannot_start_is_told(tmp_path: Path) -> None:
    python = server_python(tmp_path, "-c 'raise SystemExit(3)'")
    settings: dict[str, object] = {"engine": "vllm", "engine_python": python}
    with pytest.raises(RuntimeError, match="vllm serve has ended with status 3; its log says why"):
        with local_cluster(prefill=0, decode=0, mixed=1, settings=settings):
            pass
