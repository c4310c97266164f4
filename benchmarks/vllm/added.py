"""Measure what Baton adds to vLLM servers, beside a small proxy and beside nothing in between.

    python -m benchmarks.vllm.added [--rounds 3] [--loads 512x1,512x8,512x32]
        [--prompt-seconds 0.1] [--token-seconds 0.03] [--answer-tokens 64]

The servers have vLLM's wire forms and no model: they wait for as long as a prompt and a token would
take on a GPU, so the cores of this machine are free for what stands before them. One server alone
is compared to Baton before it as a mixed worker; a pair that hands over KV, to the two requests
of a proxy, sent by the client itself and by :mod:`benchmarks.vllm.proxy`, and to Baton before
it. All run at the same time and are measured in turn, each round in another order.

Prints, for each way and load, the median over the rounds of the times to first token and between
tokens, in milliseconds, and the CPU time per token of what stands before the servers, with and
without what it takes while idle; and JSON as the last line.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from baton.network.free_port import free_port
from benchmarks.vllm.loads import (
    Load,
    Row,
    idle_cpu_percent,
    make_row,
    own_cpu_seconds,
    run_load,
)
from benchmarks.vllm.systems import (
    Stream,
    System,
    completions,
    disaggregated_completions,
    wait_until_ready,
    with_children,
)
from testkit.fakes.vllm_server import MODEL, vllm_servers
from testkit.local_cluster import local_cluster
from testkit.machine import SYSTEM_CLOCK, describe

SEED = 1
SETTINGS: dict[str, object] = {"admission": "off", "slo_itl_seconds": 10}
"""Nothing is refused or sent elsewhere for an objective."""


def serve(pipe: "Connection[list[str], None]", fields: Sequence[dict[str, Any]]) -> None:
    """Run servers with these fields until the process is killed; send their URLs."""
    with vllm_servers() as thread:
        pipe.send([thread.start("hub/model", **each).url for each in fields])
        pipe.recv()


@contextmanager
def servers(options: argparse.Namespace) -> Iterator[list[str]]:
    """Run two servers, one of which is asked alone, and two pairs, in a process of their own. Yield
    their URLs."""
    times = {"prompt_seconds": options.prompt_seconds, "token_seconds": options.token_seconds}
    fields = [times] * 2 + [times | {"lends_kv": True}] * 4
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=serve, args=(theirs, fields), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


@contextmanager
def proxy(prefill: str, decode: str) -> Iterator[System]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.vllm.proxy", "--port", str(port)]
    command += ["--prefill", prefill, "--decode", decode]
    with subprocess.Popen(command) as process:
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}/docs")
            yield _system(
                completions(f"http://127.0.0.1:{port}", MODEL),
                {"proxy": with_children(process.pid)},
            )
        finally:
            process.kill()


@contextmanager
def baton(**pools: str) -> Iterator[System]:
    """Run a cluster before servers; ``pools`` are their URLs by role."""
    attach = ",".join(f"{role}={url}" for role, url in pools.items())
    prefill, decode, mixed = (int(role in pools) for role in ("prefill", "decode", "mixed"))
    settings = {"attach": attach, **SETTINGS}
    with local_cluster(None, prefill, decode, settings, mixed=mixed) as cluster:
        model = cluster.get("/v1/models")["data"][0]["id"]
        parts = {each["id"]: with_children(each["pid"]) for each in cluster.status()["processes"]}
        yield _system(completions(cluster.url, model), parts)


def _system(stream: Stream, parts: dict[str, list[psutil.Process]]) -> System:
    return System(stream, lambda: parts, lambda: None)


@contextmanager
def open_ways(options: argparse.Namespace) -> Iterator[dict[str, System]]:
    """Start everything; yield what is compared, by name."""
    with ExitStack() as stack:
        alone, mixed, *pairs = stack.enter_context(servers(options))
        prefill, decode, own_prefill, own_decode = pairs
        yield {
            "one server": _system(completions(alone, MODEL), {}),
            "Baton, mixed": stack.enter_context(baton(mixed=mixed)),
            "two requests": _system(disaggregated_completions(prefill, decode, MODEL), {}),
            "small proxy": stack.enter_context(proxy(prefill, decode)),
            "Baton, pair": stack.enter_context(baton(prefill=own_prefill, decode=own_decode)),
        }


@dataclass(slots=True)
class Measured:
    """The figures of a way and a load, one per round; CPU times are in ms per token."""

    rows: list[Row] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    cpu_beyond_idle: list[float] = field(default_factory=list)


def measure(
    system: System, row_of: tuple[str, Load], idle_percent: float, rng: np.random.Generator,
    answer_tokens: int, found: Measured,
) -> None:  # fmt: skip
    """Run a load, and add its figures to those of earlier rounds."""
    name, load = row_of
    before = own_cpu_seconds(system)
    answers, seconds = asyncio.run(run_load(system, load, rng, answer_tokens))
    spent = own_cpu_seconds(system) - before
    num_tokens = len(answers) * answer_tokens
    found.rows.append(make_row(name, str(load), answers, seconds))
    found.cpu.append(1e3 * spent / num_tokens)
    found.cpu_beyond_idle.append(1e3 * (spent - idle_percent / 100 * seconds) / num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="512x1,512x8,512x32")
    parser.add_argument("--prompt-seconds", type=float, default=0.1)
    parser.add_argument("--token-seconds", type=float, default=0.03)
    parser.add_argument("--answer-tokens", type=int, default=64)
    options = parser.parse_args()
    loads = [Load(*map(int, text.split("x"))) for text in options.loads.split(",")]
    machine = describe()
    print(f"{machine}, seed {SEED}")
    rng = np.random.default_rng(SEED)
    found: dict[tuple[str, str], Measured] = defaultdict(Measured)
    began = SYSTEM_CLOCK()
    with open_ways(options) as ways:
        for system in ways.values():
            asyncio.run(run_load(system, Load(256, 2), rng, options.answer_tokens))  # warm-up
        idle = {name: idle_cpu_percent(system) for name, system in ways.items()}
        for number in range(options.rounds):
            for load in loads:
                for name in rng.permutation(list(ways)).tolist():
                    measure(
                        ways[name],
                        (name, load),
                        sum(idle[name].values()),
                        rng,
                        options.answer_tokens,
                        found[name, str(load)],
                    )
            print(f"round {number} ended after {SYSTEM_CLOCK() - began:.0f} s", flush=True)
    rows = []
    for load in loads:
        for name in ways:
            rows.append(_summarize(name, str(load), found[name, str(load)]))
            print(rows[-1])
    for name, parts in idle.items():
        each = ", ".join(f"{part} {percent:.1f}" for part, percent in parts.items())
        print(f"{name}: idle {sum(parts.values()):.1f} % of a core ({each})")
    print(json.dumps({"machine": machine, "idle": idle, "rows": rows}))


def _summarize(name: str, load: str, found: Measured) -> dict[str, object]:
    """Return the medians over the rounds."""
    rounds = [asdict(row) for row in found.rows]
    kinds = [kind for kind in rounds[0] if kind not in ("system", "load")]
    medians = {kind: round(statistics.median(row[kind] for row in rounds), 1) for kind in kinds}
    return {
        "system": name,
        "load": load,
        **medians,
        "cpu_ms_per_token": round(statistics.median(found.cpu), 3),
        "beyond_idle": round(statistics.median(found.cpu_beyond_idle), 3),
    }


if __name__ == "__main__":
    main()
