"""Compare the simulator with a live cluster, whose measured costs it uses, on a scaled trace.

    python -m benchmarks.sim_life --trace FILE [--requests N] [--rate R]

Starts a cluster of 2 prefill and 2 decode workers with the demo model, measures its costs, and
replays the first requests of the trace on it. Lengths are divided by 32, so that the trace's blocks
of 512 tokens become blocks of 16. Then simulates the same requests with the measured costs. Prints
both results, and JSON as the last line.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from baton.clock import SystemClock
from baton.traces.files import add_jitter, read_trace, scale_rate
from baton.traces.trace import Trace, TraceRequest
from benchmarks.machine import describe
from conductor.policy.policies import get_policy
from conductor.policy.snapshot import LinkSpeed
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.cost_table import costs_from_table
from simulator.worker_costs import WorkerCosts
from tools.cost_table import REQUEST_SECONDS, table, timed
from tools.local_cluster import local_cluster

SHRINK = 32
ANSWER_SHRINK = 32
BLOCK_TOKENS = 16
POOL = 2
SEED = 7
CLOCK = SystemClock()
SETTINGS: dict[str, object] = {"threads": 1, "admission": False, "store_reload": "fetch"}


def shrunk(trace: Trace, num_requests: int, rate: float) -> Trace:
    """Return the first ``num_requests`` requests, jittered and at ``rate``, with prompt lengths
    divided by ``SHRINK`` and answer lengths by ``ANSWER_SHRINK``."""
    jittered_trace = add_jitter(trace, SEED)
    arrivals = jittered_trace.requests[:num_requests]
    factor = rate / (num_requests / arrivals[-1].arrival_seconds)
    small = tuple(_small(arrival) for arrival in arrivals)
    return scale_rate(Trace("shrunk", BLOCK_TOKENS, small), factor)


def _small(arrival: TraceRequest) -> TraceRequest:
    tokens = max(arrival.num_prompt_tokens // SHRINK, 2)
    answer = max(arrival.num_answer_tokens // ANSWER_SHRINK, 2)
    blocks = arrival.block_ids[: -(-tokens // BLOCK_TOKENS)]
    return replace(arrival, num_prompt_tokens=tokens, num_answer_tokens=answer, block_ids=blocks)


def prompt_of(arrival: TraceRequest) -> list[int]:
    """Return a prompt whose token ids depend only on its block numbers, so that equal blocks have
    equal tokens."""
    ids: list[int] = []
    for block in arrival.block_ids:
        ids += np.random.default_rng(block).integers(3, 256, size=BLOCK_TOKENS).tolist()
    return ids[: arrival.num_prompt_tokens]


async def replay(url: str, trace: Trace) -> list[dict[str, Any]]:
    """Replay the trace. Return each request's TTFT and the workers that served it."""
    limits = httpx.Limits(max_connections=256)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, limits=limits) as client:
        began = CLOCK.monotonic()

        async def one(arrival: TraceRequest) -> dict[str, Any]:
            prompt = prompt_of(arrival)
            await CLOCK.sleep(max(began + arrival.arrival_seconds - CLOCK.monotonic(), 0.0))
            answer = await timed(client, prompt, arrival.num_answer_tokens)
            explanation = (await client.get(f"/admin/requests/{answer.request_id}")).json()
            return {
                "ttft_seconds": answer.at_seconds[0],
                "prefill": (explanation["prefill"] or explanation["decode"])["id"],
                "decode": explanation["decode"]["id"],
                "cached_tokens": explanation["cached_tokens"],
            }

        return await asyncio.gather(*(one(arrival) for arrival in trace.requests))


def simulate(trace: Trace, costs: WorkerCosts) -> list[dict[str, Any]]:
    config = ClusterConfig(
        num_prefill=POOL,
        num_decode=POOL,
        prefill_cost=costs.prefill,
        decode_cost=costs.decode,
        kv_bytes_per_token=costs.kv_bytes_per_token,
        device_tokens=costs.kv_capacity_tokens,
        node_tokens=costs.kv_capacity_tokens,
        link=LinkSpeed(3e9, 3e9, 0.002),
        step_tokens=512,
        max_batch=64,
        report_seconds=1.0,
        num_hosts=1,
        allow_local_prefill=False,
    )
    jobs = SimulatedCluster(config, trace, get_policy("baton")).run()
    return [
        {
            "ttft_seconds": job.ttft_seconds,
            "prefill": job.prefill,
            "decode": job.decode,
            "cached_tokens": job.cached_tokens,
        }
        for job in jobs
    ]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ttft = sorted(row["ttft_seconds"] for row in rows)
    return {
        "p50": statistics.median(ttft),
        "p90": ttft[int(0.9 * (len(ttft) - 1))],
        "prefill": sorted(Counter(row["prefill"] for row in rows).values()),
        "decode": sorted(Counter(row["decode"] for row in rows).values()),
        "cached_tokens": sum(row["cached_tokens"] for row in rows),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--rate", type=float, default=1.5)
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    trace = shrunk(read_trace(options.trace), options.requests, options.rate)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        with local_cluster(prefill=POOL, decode=POOL, settings=SETTINGS) as cluster:
            costs = asyncio.run(table(cluster.url, 6144, 87_000, 5, POOL))
            path.write_text(json.dumps(costs))
            measured = costs_from_table(path)
            live = summary(asyncio.run(replay(cluster.url, trace)))
        simulated = summary(simulate(trace, measured))
    for name, found in (("live", live), ("simulated", simulated)):
        print(f"{name:10}", {key: _short(value) for key, value in found.items()})
    ratios = {key: simulated[key] / live[key] for key in ("p50", "p90", "cached_tokens")}
    print("simulated over live", {key: round(ratio, 3) for key, ratio in ratios.items()})
    result = {"machine": machine, "live": live, "simulated": simulated, "ratios": ratios}
    print(json.dumps(result | {"costs": costs}))


def _short(value: Any) -> Any:
    return f"{value * 1e3:.1f} ms" if isinstance(value, float) else value


if __name__ == "__main__":
    main(sys.argv[1:])
