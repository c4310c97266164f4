"""Compare a simulated engine with the log of a real one: TTFT and time per output token.

    python -m benchmarks.calibration LOG META --model llama-3.1-8b --gpu RTX4090 [--costs FILE]

LOG has a JSON object per request, with ``input_toks``, ``output_toks``, and the times
``queued_ts``, ``first_token_ts`` and ``last_token_ts`` in seconds; META describes the engine:
``engine_kwargs`` (``max_num_seqs``, ``max_num_batched_tokens``, ``tensor_parallel_size``) and
``kv_cache`` (``num_kv_tokens``, ``block_size``). Public logs of vLLM in this form are in
LLMServingSim's repository. Costs come from the GPU's datasheet, or from a table of measured steps
(``--costs``). The requests arrive when they arrived in the log, and have its lengths; prefixes are
not shared. Prints the means and percentiles of both with their ratio, and JSON as the last line.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.traces.trace import Trace, TraceRequest
from conductor.policy.config import BatonPolicyConfig
from conductor.policy.policies import DEFAULT_POLICY, get_policy
from conductor.policy.snapshot import LinkSpeed
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.cost_table import costs_from_table
from simulator.hardware import get_gpu
from simulator.model_shapes import get_model_shape
from simulator.parallelism import Parallelism
from simulator.roofline import parallel_roofline
from simulator.step_cost import WorkerCosts

LoggedRequest = dict[str, Any]
Comparison = dict[str, dict[str, dict[str, float]]]
"""By ``ttft`` or ``tpot`` and statistic: the simulated and the logged seconds, and their ratio."""

PERCENTILES = (50, 90, 99)


def simulate(
    requests: Sequence[LoggedRequest], meta: dict[str, Any], costs: WorkerCosts
) -> SimulatedCluster:
    """Simulate one worker with the engine's limits on the log's requests."""
    limits, kv = meta["engine_kwargs"], meta["kv_cache"]
    config = ClusterConfig(
        num_prefill=0,
        num_decode=0,
        num_mixed=1,
        prefill_cost=costs.prefill,
        decode_cost=costs.decode,
        step_cost=costs.step,
        kv_bytes_per_token=costs.kv_bytes_per_token,
        device_tokens=kv["num_kv_tokens"],
        device_block_tokens=kv["block_size"],
        node_tokens=0,
        link=LinkSpeed(1e9, 1e9),
        mixed_tokens=limits["max_num_batched_tokens"],
        max_batch=limits["max_num_seqs"],
    )
    begun = requests[0]["queued_ts"]
    arrivals = tuple(
        TraceRequest(each["queued_ts"] - begun, each["input_toks"], each["output_toks"], ())
        for each in requests
    )
    return run_trace(config, Trace("log", kv["block_size"], arrivals))


def run_trace(config: ClusterConfig, trace: Trace) -> SimulatedCluster:
    """Simulate a cluster that admits all requests of the trace."""
    policy = get_policy(DEFAULT_POLICY, BatonPolicyConfig(admission=False))
    cluster = SimulatedCluster(config, trace, policy)
    cluster.run()
    return cluster


def compare(requests: Sequence[LoggedRequest], cluster: SimulatedCluster) -> Comparison:
    """Return, for TTFT and time per output token and each statistic, the simulated and the logged
    seconds and their ratio."""
    answered = [each for each in requests if each["output_toks"] > 1]
    logged = {
        "ttft": [each["first_token_ts"] - each["queued_ts"] for each in requests],
        "tpot": [
            (each["last_token_ts"] - each["first_token_ts"]) / (each["output_toks"] - 1)
            for each in answered
        ],
    }
    jobs = cluster.jobs
    simulated = {
        "ttft": [job.ttft_seconds for job in jobs],
        "tpot": [job.itl_seconds for job in jobs if job.arrival.num_answer_tokens > 1],
    }
    return {
        name: {
            statistic: {
                "simulated_seconds": ours,
                "logged_seconds": theirs,
                "ratio": ours / theirs,
            }
            for (statistic, ours), theirs in zip(
                statistics_of(simulated[name]).items(),
                statistics_of(logged[name]).values(),
                strict=True,
            )
        }
        for name in logged
    }


def statistics_of(seconds: Sequence[float]) -> dict[str, float]:
    found = zip(PERCENTILES, np.percentile(seconds, PERCENTILES).tolist(), strict=True)
    return {"mean": float(np.mean(seconds)), **{f"p{n}": value for n, value in found}}


def print_comparison(compared: Comparison) -> None:
    print(f"{'':12}{'simulated':>12}{'logged':>12}{'ratio':>9}")
    for name, statistics in compared.items():
        for statistic, each in statistics.items():
            ours, theirs = each["simulated_seconds"], each["logged_seconds"]
            print(f"{name + ' ' + statistic:12}{ours:12.4f}{theirs:12.4f}{each['ratio']:9.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("meta", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--gpu", default="RTX4090")
    parser.add_argument("--costs", type=Path, help="a table of measured steps")
    options = parser.parse_args()
    requests = [json.loads(line) for line in options.log.read_text().splitlines()]
    requests.sort(key=lambda each: each["queued_ts"])
    meta = json.loads(options.meta.read_text())
    num_gpus = meta["engine_kwargs"].get("tensor_parallel_size", 1)
    costs = (
        costs_from_table(options.costs)
        if options.costs
        else parallel_roofline(
            get_gpu(options.gpu), get_model_shape(options.model), Parallelism(num_gpus)
        )
    )
    begun = time.perf_counter()
    cluster = simulate(requests, meta, costs)
    seconds = time.perf_counter() - begun
    found = compare(requests, cluster)
    print(f"{len(requests)} requests simulated in {seconds:.2f} s")
    print_comparison(found)
    preempted = sum(worker.num_preempted for worker in cluster.decodes)
    print(json.dumps({"seconds": seconds, "preempted": preempted, **found}))


if __name__ == "__main__":
    main()
