"""Starts unmodified ``vllm serve`` processes of any version of vLLM that is installed."""

import json
import os
import re
import shlex
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from attached_worker.own_server import UCX_TLS_ON_CPU
from attached_worker.vllm_protocol import GRAMMAR_FLAG
from attached_worker.vllm_server import PLUGIN, PLUGIN_FOLDER
from baton.network.free_port import free_port
from testkit.local_cluster import VLLM_PYTHON
from testkit.machine import pause

STOCK_FOLDER = VLLM_PYTHON.parents[2] / ".venv-stock"
"""Has an environment per version of vLLM, which ``make test-vllm`` installs."""

PLUGIN_ARGUMENT = f"--logits-processors={PLUGIN}"
ARGUMENTS = (
    "--dtype=float32", "--enforce-eager", "--max-model-len=1024", "--host=127.0.0.1",
    "--shutdown-timeout=5", "--enable-prompt-tokens-details", PLUGIN_ARGUMENT,
    *shlex.split(GRAMMAR_FLAG),
)  # fmt: skip
TRANSFER = (
    '--kv-transfer-config={"kv_connector":"NixlConnector","kv_role":"kv_both",'
    '"kv_buffer_device":"cpu","kv_load_failure_policy":"recompute"}'
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(PLUGIN_FOLDER),
    "VLLM_NO_USAGE_STATS": "1",
    "UCX_TLS": UCX_TLS_ON_CPU,
    "UCX_NET_DEVICES": "lo",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}
LEASE_SECONDS = 30
"""How long a server lends KV by default."""


def prompt(seed: int, num_tokens: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, 400, size=num_tokens).tolist()
    return tokens


@dataclass(frozen=True)
class Server:
    url: str
    process: "subprocess.Popen[bytes]"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            return bytes(response.read())

    def complete(self, prompt: list[int], **fields: Any) -> list[int]:
        """Have the server complete a prompt. A ``seed`` is given to the logits processor."""
        if "seed" in fields:
            fields["vllm_xargs"] = {"baton_seed": fields.pop("seed")}
        body = {"model": "served", "prompt": prompt, "return_token_ids": True, **fields}
        choice = json.loads(self.ask("/v1/completions", body))["choices"][0]
        return list(choice["token_ids"])

    @property
    def version(self) -> str:
        return str(json.loads(self.ask("/version"))["version"]).partition("+")[0]

    @property
    def is_running(self) -> bool:
        """Whether the server generates tokens of an answer."""
        try:
            metrics = self.ask("/metrics").decode()
        except OSError:  # it is starting
            return False
        running = re.search(r"vllm:num_requests_running\{[^}]*\} (\d+)", metrics)
        return running is not None and int(running[1]) > 0

    def metric(self, name: str) -> float:
        """Return the sum of a metric's values."""
        lines = self.ask("/metrics").decode().splitlines()
        return sum(float(each.split()[-1]) for each in lines if each.startswith(f"{name}{{"))

    @property
    def engine(self) -> psutil.Process:
        """The process of the engine, which the server's own process has started."""
        return next(each for each in self.tree if "EngineCore" in " ".join(each.cmdline()))

    @property
    def engine_tree(self) -> list[psutil.Process]:
        engine = self.engine
        return [engine, *engine.children(recursive=True)]

    @property
    def tree(self) -> list[psutil.Process]:
        """The server's own process and those that it has started; empty if it has ended."""
        try:
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait_until_ready(self) -> None:
        """Wait until the server answers. The test's timeout bounds the wait."""
        while self.process.poll() is None:
            try:
                self.ask("/health")
            except OSError:
                pause(0.2)
            else:
                return
        raise RuntimeError(f"vllm serve has ended with status {self.process.returncode}")

    def kill(self) -> None:
        tree = self.tree if self.process.poll() is None else []
        for each in reversed(tree):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()


def stock_python(version: str) -> Path:
    """Return the Python that has this version of vLLM."""
    python = STOCK_FOLDER / version / "bin" / "python"
    return python if python.is_file() else VLLM_PYTHON


def start_server(
    model: Path,
    log: Path,
    version: str,
    port: int = 0,
    arguments: tuple[str, ...] = ARGUMENTS,
    side_channel_port: int = 0,
) -> Server:
    """Start a server, which is still loading its model. Ports that are 0 are chosen."""
    port = port or free_port()
    command = [str(stock_python(version)), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port or free_port())}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--served-model-name=served", f"--port={port}", *arguments],
            env=os.environ | ENVIRONMENT | side_channel,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Server(f"http://127.0.0.1:{port}", process)


@contextmanager
def vllm_serve(
    model: Path, log: Path, version: str, port: int = 0, arguments: tuple[str, ...] = ARGUMENTS
) -> Iterator[Server]:
    """Start a server, and kill it at the end of the block."""
    server = start_server(model, log, version, port, arguments)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def frozen(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stop processes in the ``with`` block."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
