"""A cluster on this machine, started and stopped by ``baton up`` and ``baton down``.

Tests, benchmarks and tools use it. Each cluster has its own Baton home, so several can run at the
same time, and it is stopped at the end of its ``with`` block.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.errors import NotFound
from baton.network.free_port import free_port
from orchestrator.cluster_state import ClusterFolder

BATON = [sys.executable, "-m", "baton"]
START_SECONDS = 120.0
VLLM_START_SECONDS = 300.0
"""The timeout of ``baton up`` where workers have vLLM servers, whose start takes long."""

VLLM_PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
REQUEST_SECONDS = 300.0


@dataclass
class LocalCluster:
    """A running cluster. ``baton`` commands that run in ``environment`` use this cluster. Requests
    carry ``api_key``, if it is set. The cluster runs the source in ``tree``, if it is set. Commands
    must end within ``timeout_seconds``."""

    url: str
    home: Path
    environment: dict[str, str] = field(repr=False)
    api_key: str = ""
    tree: Path | None = None
    timeout_seconds: float = START_SECONDS

    def baton(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run ``baton ARGUMENTS`` against this cluster."""
        return subprocess.run(
            [*BATON, *arguments],
            env=self.environment,
            cwd=self.tree,
            capture_output=True,
            text=True,
            check=check,
            timeout=self.timeout_seconds,
        )

    def status(self) -> dict[str, Any]:
        """Return what ``baton status --json`` prints. If the cluster runs this source, no process
        is started for it, and Redis is not asked."""
        if self.tree is None:
            from command_line.status import status_object  # its packages are not on every machine

            try:
                return status_object(ClusterFolder(self.home, "default").read_running())
            except NotFound:
                return status_object(None)
        status: dict[str, Any] = json.loads(self.baton("status", "--json").stdout)
        return status

    def wait_until_ready(self) -> None:
        """Wait until every process serves. Raises CalledProcessError if one has failed for good, or
        after ``timeout_seconds``."""
        self.baton("status", "--wait", f"{self.timeout_seconds:g}")

    def processes(self, role: str) -> list[dict[str, Any]]:
        return [entry for entry in self.status()["processes"] if entry["role"] == role]

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.post_with_headers(path, body)[0]

    def post_with_headers(
        self, path: str, body: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
                headers = {key.lower(): value for key, value in response.headers.items()}
                return json.load(response), headers
        except urllib.error.HTTPError as error:
            raise RuntimeError(
                f"the router returned status {error.code}: {error.read().decode()}"
            ) from error

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=REQUEST_SECONDS) as response:
            body: dict[str, Any] = json.load(response)
        return body

    def complete(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> list[int]:
        """Send a completion request; return the answer's token ids."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "return_token_ids": True}
        choice = self.post("/v1/completions", body | fields)["choices"][0]
        tokens: list[int] = choice["token_ids"]
        return tokens


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """In the ``with`` block, SIGTERM has the effect of Ctrl-C, so that what the block has started
    is stopped, too. Without effect in other threads than the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def local_cluster(
    model: Path | str | None = None,
    prefill: int = 1,
    decode: int = 1,
    settings: dict[str, object] | None = None,
    tree: Path | None = None,
    timeout_seconds: float = START_SECONDS,
    mixed: int = 0,
) -> Iterator[LocalCluster]:
    """Start a cluster, and stop it at the end of the block. ``settings`` are named as in
    ``baton.config.Settings``; of this process's environment, only BATON_PORTABLE is passed on.
    ``tree`` is the source of another version to run instead of this one. ``timeout_seconds`` is the
    time within which each ``baton`` command must end. SIGTERM stops the cluster, too."""
    with _interrupted_by_sigterm(), tempfile.TemporaryDirectory(prefix="baton-") as folder:
        port = free_port()
        environment = {
            **{
                key: value
                for key, value in os.environ.items()
                if not key.startswith("BATON_") or key == "BATON_PORTABLE"
            },
            "BATON_HOME": folder,
            **{f"BATON_{key.upper()}": str(value) for key, value in (settings or {}).items()},
            **({"PYTHONPATH": str(tree)} if tree else {}),
        }
        cluster = LocalCluster(
            f"http://127.0.0.1:{port}", Path(folder), environment, "", tree, timeout_seconds
        )
        counts = ["--port", str(port)] + (["--mixed", str(mixed)] if mixed else [])
        if prefill or decode or not mixed:
            counts += ["--prefill", str(prefill), "--decode", str(decode)]
        named = ["--model", str(model)] if model else []
        try:
            started = cluster.baton("up", "--detach", *counts, *named, check=False)
            if started.returncode != 0:
                raise RuntimeError(f"baton up failed:\n{started.stdout}\n{started.stderr}")
            yield cluster
        finally:
            cluster.baton("down", check=False)
