"""Tests several conductors at once. Each one learns what the other ones have placed only from
workers' reports, once a second."""

from collections import Counter

import numpy as np
import pytest

from baton.core.cost import DecodeCost, PrefillCost
from baton.traces.trace import Trace, TraceRequest
from conductor.policy.policies import get_policy
from conductor.policy.snapshot import LinkSpeed
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig

REQUESTS, WORKERS, BLOCK = 1200, 8, 512


def trace(seed: int, rate: float) -> Trace:
    """Generate conversations: with a chance of one half, a request continues one of the 19 requests
    before it."""
    chance = np.random.default_rng(seed)
    at, arrivals, numbers = 0.0, [], iter(range(10**9))
    for number in range(REQUESTS):
        at += chance.exponential(1 / rate)
        head: tuple[int, ...] = ()
        if number > 20 and chance.random() < 0.5:
            head = arrivals[-int(chance.integers(1, 20))].block_ids[:-1]
        tokens = len(head) * BLOCK + int(min(chance.lognormal(8.5, 0.8), 40_000)) + 1
        blocks = head + tuple(next(numbers) for _ in range(-(-tokens // BLOCK) - len(head)))
        answer = int(min(chance.lognormal(5.0, 0.7), 2000)) + 2
        arrivals.append(TraceRequest(at, tokens, answer, blocks))
    return Trace("made up", BLOCK, tuple(arrivals))


def run(workload: Trace, num_conductors: int) -> tuple[float, Counter[str]]:
    """Simulate the workload. Return the goodput as a share of all requests, and the number of
    prompts per prefill worker."""
    config = ClusterConfig(
        num_prefill=WORKERS,
        num_decode=WORKERS,
        prefill_cost=PrefillCost(0.01, 6e-5, 1.2e-9),
        decode_cost=DecodeCost(0.012, 1e-4, 8e-8),
        kv_bytes_per_token=131_072,
        device_tokens=400_000,
        node_tokens=4_000_000,
        link=LinkSpeed(12.5e9, 20e9),
        report_seconds=1.0,
        num_conductors=num_conductors,
    )
    jobs = SimulatedCluster(config, workload, get_policy("baton")).run()
    good = sum(job.meets_slo(config.itl_slo_seconds) for job in jobs)
    return good / len(jobs), Counter(job.prefill for job in jobs if job.prefill)


@pytest.mark.parametrize(("rate", "least_share"), [(8.0, 0.98), (10.0, 0.95)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_three_conductors_reach_nearly_the_goodput_of_one(
    seed: int, rate: float, least_share: float
) -> None:
    """Three conductors reach 98 % of a single conductor's goodput, and 95 % of it under a load at
    which even the single conductor misses SLOs."""
    workload = trace(seed, rate)
    alone, _ = run(workload, 1)
    together, placed = run(workload, 3)
    assert alone > 0.94
    assert together >= least_share * alone
    # No worker gets far more requests than the average.
    assert max(placed.values()) < 1.25 * REQUESTS / WORKERS


def test_runs_are_deterministic() -> None:
    workload = trace(4, 8.0)
    assert run(workload, 3) == run(workload, 3)
