"""Starts the routers to compare, with mock workers: Baton's router, and released versions of
others.

The other routers are in a separate virtual environment (``pip install sglang-router`` and ``pip
install ai-dynamo-runtime==1.6.1 packaging pyyaml filelock msgspec && pip install --no-deps
ai-dynamo==1.6.1``), whose interpreter is an option of the benchmark.
"""

import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.config import DEMO_MODEL
from baton.network.free_port import free_port
from testkit.local_cluster import local_cluster
from testkit.machine import SYSTEM_CLOCK, pause

NUM_WORKERS = 4
START_SECONDS = 90.0
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Running:
    """A running router. ``router`` is the id of the process to which clients connect. ``beside``
    has the ids of other processes that take part in routing."""

    name: str
    port: int
    router: int
    beside: tuple[int, ...] = ()


@contextmanager
def direct(gap_seconds: float) -> Iterator[Running]:
    """Run a worker without a router, to measure the cost of the client and a worker alone."""
    port = free_port()
    with _process(_sse_worker(port, gap_seconds)) as pid:
        _wait_for(port, "/health")
        yield Running("no router", port, pid)


@contextmanager
def baton(gap_seconds: float) -> Iterator[Running]:
    """Run Baton's router and conductor with mock workers, half of which are prefill workers."""
    settings = {
        "mock": "true",
        "mock_step_seconds": gap_seconds,
        "mock_prefill_tokens_per_second": 0,
        "max_concurrent_requests": 4096,
        "admission": "false",
        "local_prefill": "false",  # each request goes to a prefill and a decode worker
    }
    half = NUM_WORKERS // 2
    with local_cluster(prefill=half, decode=half, settings=settings) as cluster:
        pids = {entry["role"]: entry["pid"] for entry in cluster.status()["processes"]}
        port = int(cluster.url.rsplit(":", 1)[1])
        yield Running("baton", port, pids["router"], (pids["conductor"],))


@contextmanager
def sglang_router(python: Path, gap_seconds: float) -> Iterator[Running]:
    port, metrics_port = free_port(), free_port()
    workers = [free_port() for _ in range(NUM_WORKERS)]
    urls = [f"http://127.0.0.1:{worker}" for worker in workers]
    command = [
        str(python.parent / "sglang-router"), "launch", "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(metrics_port), "--policy", "cache_aware", "--log-level", "warn",
        "--worker-urls", *urls,
    ]  # fmt: skip
    with ExitStack() as stack:
        for worker in workers:
            stack.enter_context(_process(_sse_worker(worker, gap_seconds)))
            _wait_for(worker, "/health")
        pid = stack.enter_context(_process(command))
        _wait_for(port, "/v1/models")
        yield Running("sglang-router", port, pid)


@contextmanager
def dynamo(python: Path, gap_seconds: float) -> Iterator[Running]:
    """Run Dynamo's frontend and mocker. The mocker has no setting for the inter-token latency, only
    a speed-up ratio. If ``gap_seconds`` is above 0, the ratio is 1, whatever the gap: a step takes
    about 6 ms. If ``gap_seconds`` is 0, the ratio is a million."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="dynamo-") as folder, ExitStack() as stack:
        environment = {
            **os.environ,
            "DYN_FILE_KV": folder,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_REQUEST_PLANE": "tcp",
        }
        mocker = [
            str(python), "-m", "dynamo.mocker", "--model-path", str(DEMO_MODEL), "--model-name",
            "demo", "--num-workers", str(NUM_WORKERS), "--block-size", "16", "--speedup-ratio",
            "1" if gap_seconds else "1000000",
        ]  # fmt: skip
        frontend = [
            str(python), "-m", "dynamo.frontend", "--router-mode", "kv", "--http-host",
            "127.0.0.1", "--http-port", str(port),
        ]  # fmt: skip
        stack.enter_context(_process(mocker, environment))
        pid = stack.enter_context(_process(frontend, environment))
        _wait_for(port, "/v1/models", b'"demo"')
        yield Running("dynamo", port, pid)


def _sse_worker(port: int, gap_seconds: float) -> list[str]:
    module = "benchmarks.peers.sse_worker"
    return [sys.executable, "-m", module, "--port", str(port), "--gap-seconds", str(gap_seconds)]


@contextmanager
def _process(command: Sequence[str], environment: dict[str, str] | None = None) -> Iterator[int]:
    """Run a process while the block lasts; yield its pid."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, path: str, expected: bytes = b"") -> None:
    """Wait until the server responds. Raises RuntimeError if it does not."""
    deadline = SYSTEM_CLOCK() + START_SECONDS
    while SYSTEM_CLOCK() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
                if expected in response.read():
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        pause(0.2)
    raise RuntimeError(f"nothing responds on port {port}")
