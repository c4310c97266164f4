"""Kill one of two Ray nodes on this machine under traffic, and check that its workers come back.

    python -m tools.ray_nodes [--streams 8] [--seed 1]

A cluster of 2 prefill and 2 decode workers is spread over both nodes, each of which has its own IP
address. The second node is killed (SIGKILL) while answers stream. Every token is compared with the
undisturbed answer. Prints on which node each worker ran before and after, how long it took until
all workers served again, and JSON as the last line. Exits with 1 if an answer failed or differs, or
if a worker did not come back.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from baton.network.free_port import free_port
from testkit.cancellation import are_blocks_free, idle_workers
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import SYSTEM_CLOCK, describe
from testkit.streams import make_request_bodies, record_answers, traffic
from tools.chaos import report

FIRST, SECOND = "127.0.0.1", "127.0.0.2"
BACK_SECONDS = 120.0
NODE_CPUS = 2
RAY = str(Path(sys.executable).with_name("ray"))


def ray(*arguments: str) -> None:
    command = [RAY, *arguments, "--disable-usage-stats"]
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def two_nodes() -> Iterator[str]:
    """Start a Ray cluster of two nodes; yield its address."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="baton-ray-") as folder:
        size = [f"--num-cpus={NODE_CPUS}", f"--object-store-memory={80 * 2**20}"]
        head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
        try:
            ray("start", *head, f"--node-ip-address={FIRST}", *size)
            ray("start", f"--address={FIRST}:{port}", f"--node-ip-address={SECOND}", *size)
            yield f"{FIRST}:{port}"
        finally:
            for process in _ray_processes(folder):
                process.kill()


def kill_second_node() -> None:
    """Kill Ray's process on the second node and all its descendants, as if the machine failed."""
    options = (f"--node_ip_address={SECOND}", f"--node-ip-address={SECOND}")
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if any(option in command for option in options):
            _kill_tree(process)


def _kill_tree(process: psutil.Process) -> None:
    try:
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for each in family:
        try:
            os.kill(each.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _ray_processes(folder: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in argument for argument in process.info["cmdline"] or []):
            found.append(process)
    return found


def nodes(cluster: LocalCluster) -> dict[str, str]:
    """Return the node of each serving worker, by worker id. The supervisor's node is ``here``."""
    entries = [e for role in ("prefill", "decode") for e in cluster.processes(role)]
    return {e["id"]: e["node"] or "here" for e in entries if e["state"] == "serving"}


def _await_all(cluster: LocalCluster, count: int) -> float | None:
    """Return the seconds until ``count`` workers serve again; None on timeout."""
    began, pause = SYSTEM_CLOCK(), threading.Event()
    while SYSTEM_CLOCK() - began < BACK_SECONDS:
        if len(nodes(cluster)) == count:
            return SYSTEM_CLOCK() - began
        pause.wait(0.5)
    return None


def lose_a_node(cluster: LocalCluster, streams: int, seed: int) -> dict[str, Any]:
    questions = record_answers(cluster.url, make_request_bodies(24, seed, 80, 200), streams)
    before, pause = nodes(cluster), threading.Event()
    with traffic(cluster.url, questions, streams) as answers:
        pause.wait(3)
        kill_second_node()
        pause.wait(3)
        seconds = _await_all(cluster, len(before))
    after = nodes(cluster)
    workers = idle_workers(cluster)
    result = report(answers) | {"before": before, "after": after, "back_seconds": seconds}
    on_both = len(set(before.values())) == 2
    free = all(are_blocks_free(worker) for worker in workers)
    all_right = result["right"] == result["accepted"]
    return result | {"ok": on_both and free and all_right and bool(seconds)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    print(describe(), f"seed {options.seed}")
    with two_nodes() as address:
        settings = {"on": "ray", "ray_address": address, "threads": 1}
        with local_cluster(None, 2, 2, settings) as cluster:
            result = lose_a_node(cluster, options.streams, options.seed)
    for name, value in result.items():
        print(f"{name}: {value}")
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
