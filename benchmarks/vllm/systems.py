"""The systems that are compared, each behind one function that streams a completion."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil

from baton.network.free_port import free_port
from testkit.local_cluster import (
    VLLM_START_SECONDS,
    LocalCluster,
    local_cluster,
)
from testkit.machine import pause

POOL_BYTES = 2**30
"""Size of each worker's KV pool."""

MAX_MODEL_TOKENS = 8192
MAX_BATCHED_TOKENS = 512
MAX_SEQUENCES = 64

Prompt = Sequence[int]
Stream = Callable[[Prompt, int], AsyncIterator[int]]
"""Streams a greedy completion with the given number of tokens; yields the number of tokens of each
event."""


@dataclass(frozen=True, slots=True)
class System:
    """A running system. ``parts`` returns, by the name of each of its programs, the program's
    process and its child processes. ``kill_decode`` kills the worker that generates the answers
    (SIGKILL)."""

    stream: Stream
    parts: Callable[[], dict[str, list[psutil.Process]]]
    kill_decode: Callable[[], None]


def baton_cluster(
    model: Path, threads: int = 1, mixed: int = 0
) -> AbstractContextManager[LocalCluster]:
    """Return a Baton cluster of one prefill and one decode worker or of ``mixed`` mixed workers,
    with ``threads`` threads per worker (0: one per core)."""
    settings: dict[str, object] = {
        "threads": threads, "pool_bytes": POOL_BYTES, "max_batched_tokens": MAX_BATCHED_TOKENS,
        "max_sequences": MAX_SEQUENCES, "max_model_tokens": MAX_MODEL_TOKENS, "dtype": "bfloat16",
    }  # fmt: skip
    pair = 0 if mixed else 1
    return local_cluster(model, pair, pair, settings, mixed=mixed)


@contextmanager
def baton(model: Path, threads: int = 1, mixed: int = 0) -> Iterator[System]:
    """Run :func:`baton_cluster`, and yield it as a system."""
    with baton_cluster(model, threads, mixed) as cluster:

        def parts() -> dict[str, list[psutil.Process]]:
            return {
                entry["id"]: with_children(entry["pid"]) for entry in cluster.status()["processes"]
            }

        def kill_decode() -> None:
            os.kill(cluster.processes("mixed" if mixed else "decode")[0]["pid"], signal.SIGKILL)

        yield System(completions(cluster.url, model.name), parts, kill_decode)


@contextmanager
def vllm_alone(model: Path, python: Path, *, compiled: bool = False) -> Iterator[System]:
    """Run one vLLM server on all cores."""
    with vllm_server(model, python, os.cpu_count() or 1, compiled=compiled) as server:
        yield System(
            completions(server.url, model.name), lambda: {"server": server.processes}, server.kill
        )


@contextmanager
def vllm_pair(model: Path, python: Path) -> Iterator[list["VllmServer"]]:
    """Run two servers of vLLM with its NixlConnector, one core each."""
    transfer = {
        "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
    }  # fmt: skip
    arguments = ("--kv-transfer-config", json.dumps(transfer), "--enable-prompt-tokens-details")
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                vllm_server(
                    model, python, 1,
                    {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "UCX_TLS": "all"},
                    arguments,
                )
            )
            for _ in range(2)
        ]  # fmt: skip


@contextmanager
def vllm_disaggregated(model: Path, python: Path) -> Iterator[System]:
    """Run :func:`vllm_pair` as a prefill and a decode server. The client sends the two requests
    that a proxy would send, so no proxy costs time."""
    with vllm_pair(model, python) as servers:
        stream = disaggregated_completions(servers[0].url, servers[1].url, model.name)
        yield System(
            stream,
            lambda: {"prefill": servers[0].processes, "decode": servers[1].processes},
            servers[1].kill,
        )


@contextmanager
def baton_attached(model: Path, python: Path) -> Iterator[System]:
    """Run :func:`vllm_pair` behind a Baton cluster of one prefill and one decode worker."""
    with vllm_pair(model, python) as (prefill, decode):
        settings: dict[str, object] = {
            "attach": f"prefill={prefill.url},decode={decode.url}",
            "admission": "off",  # vLLM refuses nothing either
        }
        with local_cluster(model, 1, 1, settings, timeout_seconds=VLLM_START_SECONDS) as cluster:

            def parts() -> dict[str, list[psutil.Process]]:
                own = {
                    entry["id"]: with_children(entry["pid"])
                    for entry in cluster.status()["processes"]
                }
                servers = prefill.processes + decode.processes
                return own | {"servers": servers}

            yield System(completions(cluster.url, model.name), parts, decode.kill)


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A running vLLM server."""

    url: str
    process: subprocess.Popen[bytes]

    @property
    def processes(self) -> list[psutil.Process]:
        return with_children(self.process.pid)

    def kill(self) -> None:
        """Kill the server with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def with_children(pid: int) -> list[psutil.Process]:
    """Return a process and all that come from it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@contextmanager
def vllm_server(
    model: Path,
    python: Path,
    threads: int,
    environment: Mapping[str, str] = MappingProxyType({}),
    more: Sequence[str] = (),
    *,
    compiled: bool = False,
) -> Iterator[VllmServer]:
    """Run a vLLM server with ``threads`` threads on the CPU. ``compiled`` lets it compile the
    model, which takes it a minute at its start."""
    port = free_port()
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", model.name, "--port", str(port), "--host", "127.0.0.1",
        "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_TOKENS),
        "--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), "--max-num-seqs", str(MAX_SEQUENCES),
        "--kv-cache-memory-bytes", str(POOL_BYTES), *more,
        *([] if compiled else ["--enforce-eager"]),
    ]  # fmt: skip
    variables = {
        **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "WARNING", **environment,
    }  # fmt: skip
    with subprocess.Popen(
        command, env=variables, stdout=sys.stderr, stderr=sys.stderr, start_new_session=True
    ) as process:
        server = VllmServer(f"http://127.0.0.1:{port}", process)
        try:
            wait_until_ready(process, f"{server.url}/health")
            yield server
        finally:
            server.kill()


def wait_until_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    """Wait until a program that was started responds at ``url``. Raises RuntimeError if it ends, or
    does not respond within ``VLLM_START_SECONDS``."""
    for _ in range(int(VLLM_START_SECONDS)):
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with code {process.returncode}")
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (OSError, urllib.error.URLError):
            pause(1.0)
    raise RuntimeError(f"{url} did not respond within {VLLM_START_SECONDS:.0f} s")


def completions(url: str, model: str) -> Stream:
    """Return how a server at ``url`` is asked."""

    async def stream(prompt: Prompt, max_tokens: int) -> AsyncIterator[int]:
        async for count in _stream(url, _body(model, prompt, max_tokens)):
            yield count

    return stream


def disaggregated_completions(prefill: str, decode: str, model: str) -> Stream:
    """Return how a pair of servers is asked, with the two requests that a proxy would send."""

    async def stream(prompt: Prompt, max_tokens: int) -> AsyncIterator[int]:
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        body = _body(model, prompt, 1) | {"stream": False, "kv_transfer_params": wanted}
        body.pop("stream_options")
        async with _http_client() as client:
            response = await client.post(f"{prefill}/v1/completions", json=body)
            response.raise_for_status()
        offered = response.json()["kv_transfer_params"]
        body = _body(model, prompt, max_tokens) | {"kv_transfer_params": offered}
        async for count in _stream(decode, body):
            yield count

    return stream


def _body(model: str, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }  # fmt: skip


def _http_client() -> httpx.AsyncClient:
    """Return a client that doesn't load certificates: that takes 26 ms, which would count as time
    to first token."""
    return httpx.AsyncClient(timeout=None, trust_env=False, verify=False)


async def _stream(url: str, body: dict[str, Any]) -> AsyncIterator[int]:
    """Send a completion request and read its stream. For each event that carries a token, yield the
    number 1, so that the caller sees when tokens arrive. Raises RuntimeError if the request fails,
    or if the answer does not have ``max_tokens`` tokens."""
    async with (
        _http_client() as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        is_complete = False
        if response.status_code != 200:
            text = (await response.aread())[:300]
            raise RuntimeError(f"the server returned status {response.status_code}: {text!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"the answer ended with an error: {str(event['error'])[:300]}")
            if usage := event.get("usage"):
                if usage["completion_tokens"] != body["max_tokens"]:
                    raise RuntimeError(
                        f"the answer has {usage['completion_tokens']} tokens; it must have "
                        f"{body['max_tokens']}"
                    )
                is_complete = True
            elif event["choices"] and event["choices"][0].get("token_ids"):
                yield 1
        if not is_complete:
            raise RuntimeError("the stream ended before the answer was complete")
