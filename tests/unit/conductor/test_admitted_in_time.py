"""Simulates overload of a prefill worker whose speed the conductor overestimates, as it does on a
host with other work, and whose steps compute several prompts at once. Of the admitted requests, at
most one in ten may be late: also right after a start, before the worker has measured its speed."""

import numpy as np
import pytest

from baton.core.cost import DecodeCost, PrefillCost
from baton.traces.trace import Trace, TraceRequest
from conductor.policy.baton import place
from conductor.policy.config import BatonPolicyConfig
from conductor.policy.decision import Decision
from conductor.policy.snapshot import LinkSpeed, PolicyQuery, Snapshot
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.request import SimulatedRequest

TOKENS, BLOCK, SECONDS = 768, 16, 60.0
SLOWDOWN = 1.15
"""How many times as long as predicted prompts take."""

CAPACITY = 10 / SLOWDOWN
"""Prompts that the worker can compute per second, one by one."""

CONFIG = ClusterConfig(
    num_prefill=1,
    num_decode=1,
    prefill_cost=PrefillCost(0.01, 0.09 / TOKENS, 0.0),
    decode_cost=DecodeCost(0.005, 0.0005, 0.0),
    kv_bytes_per_token=1000,
    device_tokens=400_000,
    node_tokens=1_000,
    link=LinkSpeed(1e9, 1e10),
    step_tokens=2048,
    ttft_slo_seconds=0.5,
    itl_slo_seconds=0.5,
    report_seconds=1.0,
    allow_local_prefill=False,
    shared_speeds=(1 / SLOWDOWN,),
)


def run(load: float, seed: int, unmeasured_seconds: float) -> list[SimulatedRequest]:
    """Simulate ``load`` times the worker's capacity. The worker knows its speed after
    ``unmeasured_seconds``."""
    chance = np.random.default_rng(seed)
    at, arrivals, blocks = 0.0, [], TOKENS // BLOCK
    while (at := at + chance.exponential(1 / (load * CAPACITY))) < SECONDS:
        first = len(arrivals) * blocks
        arrivals.append(TraceRequest(at, TOKENS, 8, tuple(range(first, first + blocks))))

    def place_after_start(snapshot: Snapshot, query: PolicyQuery) -> Decision:
        for view in snapshot.prefills:
            view.is_measured = snapshot.now_seconds >= unmeasured_seconds
        return place(snapshot, query, BatonPolicyConfig())

    trace = Trace("new prompts", BLOCK, tuple(arrivals))
    return SimulatedCluster(CONFIG, trace, place_after_start).run()


@pytest.mark.parametrize("unmeasured_seconds", [0.0, 2.0])
@pytest.mark.parametrize("load", [0.5, 1.0, 1.5, 3.0])
def test_at_most_one_admitted_request_in_ten_is_late(
    load: float, unmeasured_seconds: float
) -> None:
    for seed in range(3):
        jobs = run(load, seed, unmeasured_seconds)
        admitted = [job for job in jobs if not job.rejected]
        late = [job for job in admitted if job.first_token_at_seconds > job.deadline_seconds]
        print(f"seed {seed}: {len(jobs)} requests, {len(admitted)} admitted, {len(late)} late")
        assert len(late) <= 0.1 * len(admitted)
        in_time = (len(admitted) - len(late)) / SECONDS
        assert in_time >= 0.75 * min(load, 1.0) * CAPACITY
        assert load > 0.5 or len(admitted) >= 0.98 * len(jobs)
