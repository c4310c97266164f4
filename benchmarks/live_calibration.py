"""Compare simulated clusters with live ones on this machine, with costs from a short profile.

    python -m benchmarks.live_calibration [--systems 1+1 2-mixed vllm] [--vllm PYTHON] [--shape 50m]
                                          [--requests 200] [--utilisation 0.3 0.6] [--seed 1]

The systems: a prefill and a decode worker, two mixed workers (a thread each), and one vLLM server
with two threads. For each, measures the steps of its engine in a process of its own, and fits the
costs to them. Then sends requests at random times, with lengths from log-normal distributions, as a
client on the same machine, and simulates the same requests. A rate is a share (``--utilisation``)
of the highest rate that the costs allow. TTFT and time per output token are the client's, so they
include the router and HTTP, which the simulator doesn't know. Prints a table per system and rate,
and JSON as the last line.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from baton.checkpoint import load_model_config
from baton.clock import SystemClock
from baton.engine.bench.bench_case import BenchCase
from baton.traces.files import scale_rate
from baton.traces.trace import Trace, TraceRequest
from benchmarks.calibration import compare, print_comparison
from benchmarks.contenders import PeerEngine
from benchmarks.machine import describe
from benchmarks.vllm.model import VOCAB_SIZE, make_model
from benchmarks.vllm.systems import (
    MAX_BATCHED_TOKENS,
    MAX_SEQUENCES,
    POOL_BYTES,
    System,
    baton,
    vllm_alone,
)
from conductor.policy.config import BatonPolicyConfig
from conductor.policy.policies import DEFAULT_POLICY, get_policy
from conductor.policy.snapshot import LinkSpeed
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.cost_table import CostTable
from simulator.rate_estimate import MeanRequest, estimated_rate
from simulator.worker_costs import WorkerCosts

BLOCK_TOKENS = 16
PROMPT_TOKENS, PROMPT_SIGMA, PROMPT_RANGE = 300, 0.6, (32, 1536)
ANSWER_TOKENS, ANSWER_SIGMA, ANSWER_RANGE = 48, 0.5, (8, 160)
"""Medians of the lengths, and the standard deviations of their logarithms."""

WARM_UP_REQUESTS = 4
VLLM_PROMPTS = (16, 64, 128, 256, 512, 1024, 2048)
VLLM_BATCHES, VLLM_CONTEXTS = (1, 4, 16), (128, 512, 2048)
VLLM_STEPS = 8
ROUNDS = 5
BYTES_PER_ELEMENT = 2
CLOCK = SystemClock()
LOCAL_LINK = LinkSpeed(3e9, 3e9)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A live system, the costs of its workers' steps, and its numbers of workers."""

    name: str
    run: Callable[[], AbstractContextManager[System]]
    profile: Callable[[], CostTable]
    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    def config(self, costs: WorkerCosts) -> ClusterConfig:
        return ClusterConfig(
            num_prefill=self.prefill,
            num_decode=self.decode,
            num_mixed=self.mixed,
            prefill_cost=costs.prefill,
            decode_cost=costs.decode,
            step_cost=costs.step,
            kv_bytes_per_token=costs.kv_bytes_per_token,
            device_tokens=POOL_BYTES // costs.kv_bytes_per_token,
            node_tokens=POOL_BYTES // costs.kv_bytes_per_token,
            link=LOCAL_LINK,
            step_tokens=MAX_BATCHED_TOKENS,
            mixed_tokens=MAX_BATCHED_TOKENS,
            max_batch=MAX_SEQUENCES,
            report_seconds=1.0,
            num_hosts=1,
        )


def traffic(num_requests: int, seed: int) -> Trace:
    """Return requests with random lengths and nothing in common, at one request per second."""
    random = np.random.default_rng(seed)
    arrivals = random.exponential(1.0, num_requests).cumsum()
    arrivals *= num_requests / arrivals[-1]
    prompts = _lengths(random, num_requests, PROMPT_TOKENS, PROMPT_SIGMA, PROMPT_RANGE)
    answers = _lengths(random, num_requests, ANSWER_TOKENS, ANSWER_SIGMA, ANSWER_RANGE)
    rows = zip(arrivals.tolist(), prompts, answers, strict=True)
    return Trace("random", BLOCK_TOKENS, tuple(TraceRequest(*row, ()) for row in rows))


def _lengths(
    random: np.random.Generator, count: int, median: int, sigma: float, limits: tuple[int, int]
) -> list[int]:
    lengths = median * np.exp(sigma * random.standard_normal(count))
    found: list[int] = lengths.clip(*limits).astype(int).tolist()
    return found


async def replay(system: System, trace: Trace, seed: int) -> list[dict[str, Any]]:
    """Send the requests at their times. Return a log as ``benchmarks.calibration`` reads it."""
    random = np.random.default_rng(seed)
    prompts = [
        random.integers(10, VOCAB_SIZE, each.num_prompt_tokens).tolist() for each in trace.requests
    ]

    async def one(arrival: TraceRequest, prompt: list[int]) -> dict[str, Any]:
        await CLOCK.sleep(max(began + arrival.arrival_seconds - CLOCK.monotonic(), 0.0))
        queued = CLOCK.monotonic()
        events = system.stream(prompt, arrival.num_answer_tokens)
        times = [CLOCK.monotonic() async for _ in events]
        return {
            "input_toks": len(prompt),
            "output_toks": arrival.num_answer_tokens,
            "queued_ts": queued,
            "first_token_ts": times[0],
            "last_token_ts": times[-1],
        }

    for prompt in prompts[:WARM_UP_REQUESTS]:
        async for _ in system.stream([*reversed(prompt)], ANSWER_TOKENS):
            pass
    began = CLOCK.monotonic()
    return await asyncio.gather(*map(one, trace.requests, prompts))


def profile_baton(model: Path) -> CostTable:
    """Measure Baton's own engine with ``baton bench engine --profile``, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "baton", "bench", "engine", "--model", str(model)]
        command += ["--threads", "1", "--dtype", "bfloat16", "--profile", str(path)]
        subprocess.run(command, stdout=sys.stderr, check=True)
        return CostTable.parse(path.read_text(), "profile")


def profile_vllm(model: Path, python: Path, kv_bytes_per_token: int) -> CostTable:
    """Measure vLLM's steps on all cores; the cases take turns in each round."""
    threads = ("--threads", str(os.cpu_count() or 1), "--dtype", "bfloat16")
    cases = [BenchCase("prefill", 1, context) for context in VLLM_PROMPTS]
    cases += [
        BenchCase("decode", batch, context) for batch in VLLM_BATCHES for context in VLLM_CONTEXTS
    ]
    seconds: dict[BenchCase, list[float]] = {case: [] for case in cases}
    with contextlib.closing(PeerEngine(python, "vllm_steps.py", model, *threads)) as engine:
        for _ in range(ROUNDS):
            for case in cases:
                engine.prepare(case)
                count = 1 if case.kind == "prefill" else VLLM_STEPS
                seconds[case].append(engine.run_steps(count).wall)
                engine.free()
    rows: dict[str, list[dict[str, float]]] = {"prefill": [], "decode": []}
    for case, found in seconds.items():
        sizes = (
            {"new_tokens": case.context, "cached_tokens": 0}
            if case.kind == "prefill"
            else {"batch": case.batch, "context_tokens": case.batch * case.context}
        )
        rows[case.kind].append({**sizes, "seconds": float(np.median(found))})
    sizes = {"kv_bytes_per_token": kv_bytes_per_token, "kv_capacity_tokens": 1}
    return CostTable.parse(json.dumps({**rows, **sizes}), "profile of vLLM")


def simulate(config: ClusterConfig, trace: Trace) -> SimulatedCluster:
    policy = get_policy(DEFAULT_POLICY, BatonPolicyConfig(admission=False))
    cluster = SimulatedCluster(config, trace, policy)
    cluster.run()
    return cluster


def calibrate(
    each: Calibrated, utilisations: Sequence[float], num_requests: int, seed: int
) -> list[dict[str, Any]]:
    """Profile the system, run it at each rate, and simulate the same."""
    config = each.config(each.profile().costs())
    trace = traffic(num_requests, seed)
    highest = estimated_rate(config, MeanRequest.of(trace))
    found = []
    with each.run() as system:
        for utilisation in utilisations:
            rate = utilisation * highest
            scaled = scale_rate(trace, rate)
            logged = asyncio.run(replay(system, scaled, seed))
            compared = compare(logged, simulate(config, scaled))
            print(f"\n{each.name}, {rate:.2f} requests/s, {utilisation:.0%} of the highest rate")
            print_comparison(compared)
            found.append({"system": each.name, "rate_rps": rate, **compared})
    return found


def calibrated_systems(model: Path, vllm: Path | None, kv_bytes: int) -> list[Calibrated]:
    """Return the systems; vLLM only if its Python is given. ``kv_bytes`` is the size of a token's
    KV."""
    profile = cache(partial(profile_baton, model))
    found = [
        Calibrated("1+1", partial(baton, model, None), profile, prefill=1, decode=1),
        Calibrated("2-mixed", partial(baton, model, None, mixed=2), profile, mixed=2),
    ]
    if vllm is not None:
        run = partial(vllm_alone, model, vllm, compiled=True)
        found.append(Calibrated("vllm", run, partial(profile_vllm, model, vllm, kv_bytes), mixed=1))
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--systems", nargs="+", help="some of those; all unless given")
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM")
    parser.add_argument("--shape", choices=("0.5b", "50m"), default="50m")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--utilisation", type=float, nargs="+", default=[0.3, 0.6])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"random-{options.shape}"
        make_model(model, options.seed, options.shape)
        kv_bytes = load_model_config(model).kv_elements_per_token * BYTES_PER_ELEMENT
        for each in calibrated_systems(model, options.vllm, kv_bytes):
            if not options.systems or each.name in options.systems:
                results += calibrate(each, options.utilisation, options.requests, options.seed)
    print(json.dumps({"machine": machine, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
