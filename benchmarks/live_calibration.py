"""Compare simulated clusters with live ones on this machine, with costs from a short profile.

    python -m benchmarks.live_calibration [--systems 1+1 2-mixed vllm] [--vllm PYTHON] [--shape 50m]
                                          [--requests 200] [--utilisation 0.3 0.6] [--seed 1]

The systems: a prefill and a decode worker, two mixed workers (a thread each), and one vLLM server
with two threads. For each, a client on the same machine first measures single prompts of five
lengths, and batches of answers; the costs are fitted to these. Then it measures how fast a worker
is while the other one is busy, and how much CPU time client, router, conductor, store and Redis
take for a request. Then it sends requests at random times, with lengths from log-normal
distributions, and the same requests are simulated, with workers that share the cores and with
workers that have cores of their own. A rate is a share (``--utilisation``) of the highest rate that
the costs allow. Prints TTFT and time per output token of both for each system and rate, and JSON as
the last line.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from baton.checkpoints.checkpoint import load_model_config
from baton.clock import SystemClock
from baton.traces.files import scale_rate
from baton.traces.trace import Trace, TraceRequest
from benchmarks.calibration import compare, print_comparison, run_trace
from benchmarks.live_sharing import Overhead, SharingProbe
from benchmarks.vllm.model import VOCAB_SIZE, make_model
from benchmarks.vllm.systems import (
    MAX_BATCHED_TOKENS,
    MAX_SEQUENCES,
    POOL_BYTES,
    System,
    baton,
    vllm_alone,
)
from conductor.policy.snapshot import LinkSpeed
from simulator.cluster_config import ClusterConfig
from simulator.cost_table import CostTable
from simulator.rate_search import MeanRequest, estimated_rate
from simulator.step_cost import WorkerCosts
from testkit.machine import describe

BLOCK_TOKENS = 16
PROMPT_TOKENS, PROMPT_SIGMA, PROMPT_RANGE = 300, 0.6, (32, 1536)
ANSWER_TOKENS, ANSWER_SIGMA, ANSWER_RANGE = 48, 0.5, (8, 160)
"""Medians of the lengths, and the standard deviations of their logarithms."""

WARM_UP_REQUESTS = 4
PROFILE_PROMPTS = (32, 128, 512, 1024, 2048)
PROFILE_BATCHES, PROFILE_CONTEXTS, PROFILE_ANSWER = (1, 4, 12), (128, 1024), 48
ROUNDS = 3
OVERHEAD_REQUESTS = 20
BYTES_PER_ELEMENT = 2
CLOCK = SystemClock()
LOCAL_LINK = LinkSpeed(3e9, 3e9)


@dataclass(frozen=True, slots=True)
class LiveSystem:
    """A live system, and its numbers of workers."""

    name: str
    run: Callable[[], AbstractContextManager[System]]
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
            device_tokens=costs.kv_capacity_tokens,
            node_tokens=costs.kv_capacity_tokens,
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


async def replay(system: System, trace: Trace, seed: tuple[int, int]) -> list[dict[str, Any]]:
    """Send the requests at their times, with random prompts. Return a log as
    ``benchmarks.calibration`` reads it."""
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
        async for _ in system.stream(prompt[::-1], ANSWER_TOKENS):
            pass
    began = CLOCK.monotonic()
    return await asyncio.gather(*map(one, trace.requests, prompts))


async def measure_costs(
    system: System, num_workers: int, kv_bytes: int, busy_speed: float
) -> WorkerCosts:
    """Measure prompts one at a time and answers in batches, spread over ``num_workers`` workers,
    and fit the costs of a worker that computes alone to them. ``busy_speed`` is the speed of these
    workers while all of them are busy, and ``kv_bytes`` the size of a token's KV."""
    random = np.random.default_rng(0)

    async def times(num_tokens: int, answer_tokens: int) -> list[float]:
        prompt = random.integers(10, VOCAB_SIZE, num_tokens).tolist()
        began = CLOCK.monotonic()
        return [CLOCK.monotonic() - began async for _ in system.stream(prompt, answer_tokens)]

    prefill, decode = [], []
    for num_tokens in PROFILE_PROMPTS:
        found = [(await times(num_tokens, 2))[0] for _ in range(ROUNDS + 1)]
        seconds = statistics.median(found[1:])  # the first one warms up
        prefill.append({"new_tokens": num_tokens, "cached_tokens": 0, "seconds": seconds})
    for batch, context in product(PROFILE_BATCHES, PROFILE_CONTEXTS):
        gaps: list[float] = []
        for _ in range(ROUNDS):
            count = batch * num_workers
            answers = await asyncio.gather(*(times(context, PROFILE_ANSWER) for _ in range(count)))
            begun = max(answer[0] for answer in answers)  # from then on, all are in the batch
            for answer in answers:
                later = [at for at in answer if at > begun]
                gaps += [b - a for a, b in pairwise(later)]
        held = batch * (context + PROFILE_ANSWER // 2)
        seconds = statistics.mean(gaps) * busy_speed
        decode.append({"batch": batch, "context_tokens": held, "seconds": seconds})
    sizes = {"kv_bytes_per_token": kv_bytes, "kv_capacity_tokens": POOL_BYTES // kv_bytes}
    table = {"prefill": prefill, "decode": decode, **sizes}
    return CostTable.parse(json.dumps(table), "the profile").costs()


async def measure_sharing(
    each: LiveSystem, system: System, requests: Sequence[TraceRequest]
) -> tuple[tuple[float, ...], Overhead]:
    """Return the speeds of workers while one and while two are busy (only the first if there is one
    worker), and what the other processes take for one of these requests."""
    probe = SharingProbe(system, np.random.default_rng(1))
    overhead = await probe.overhead(requests[:OVERHEAD_REQUESTS])
    if each.mixed > 1:
        return (1.0, await probe.speed_of_pair()), overhead
    return ((1.0,) if each.mixed else (1.0, await probe.speed_of_pools())), overhead


async def measure(
    each: LiveSystem, system: System, requests: Sequence[TraceRequest], kv_bytes: int
) -> tuple[ClusterConfig, Overhead]:
    """Return the cluster with the measured costs and speeds, and the overhead."""
    speeds, overhead = await measure_sharing(each, system, requests)
    num_workers = max(each.decode, each.mixed)
    busy_speed = speeds[min(num_workers, len(speeds)) - 1]
    costs = await measure_costs(system, num_workers, kv_bytes, busy_speed)
    return replace(each.config(costs), shared_speeds=speeds), overhead


def calibrate(
    each: LiveSystem, utilisations: Sequence[float], num_requests: int, seed: int, kv_bytes: int
) -> list[dict[str, Any]]:
    """Measure the system's costs, run it at each rate, and simulate the same."""
    trace = traffic(num_requests, seed)
    found = []
    with each.run() as system:
        config, overhead = asyncio.run(measure(each, system, trace.requests, kv_bytes))
        own_cores = replace(config, shared_speeds=())
        highest = estimated_rate(config, MeanRequest.of(trace))
        for number, utilisation in enumerate(utilisations):
            rate = utilisation * highest
            scaled = scale_rate(trace, rate)
            left = 1 - overhead.share(rate)
            shared = replace(config, shared_speeds=tuple(s * left for s in config.shared_speeds))
            logged = asyncio.run(replay(system, scaled, (seed, number)))
            compared = {
                name: compare(logged, run_trace(cluster, scaled))
                for name, cluster in (("shared cores", shared), ("own cores", own_cores))
            }
            speeds = ", ".join(f"{speed:.2f}" for speed in shared.shared_speeds)
            print(f"\n{each.name}, {rate:.2f} requests/s, {utilisation:.0%} of the highest rate;")
            print(f"speeds with 1, 2 busy workers: {speeds}")
            for name, figures in compared.items():
                print(f"simulated with {name}")
                print_comparison(figures)
            found.append({"system": each.name, "rate_rps": rate,
                          "speeds": shared.shared_speeds, **compared})  # fmt: skip
    return found


def live_systems(model: Path, vllm: Path | None) -> list[LiveSystem]:
    """Return the systems; vLLM only if its Python is given."""
    found = [
        LiveSystem("1+1", partial(baton, model), prefill=1, decode=1),
        LiveSystem("2-mixed", partial(baton, model, mixed=2), mixed=2),
    ]
    if vllm is not None:
        found.append(LiveSystem("vllm", partial(vllm_alone, model, vllm, compiled=True), mixed=1))
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
        for each in live_systems(model, options.vllm):
            if not options.systems or each.name in options.systems:
                results += calibrate(
                    each, options.utilisation, options.requests, options.seed, kv_bytes
                )
    print(json.dumps({"machine": machine, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
