"""Tests the simulator with random arrivals and worker crashes: each request must end exactly once,
and no token may be lost or generated twice."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import WorkerId
from baton.core.prefill_order import PREFILL_ORDERS
from baton.traces.trace import Trace, TraceRequest
from conductor.policy.policies import PLACEMENT_POLICIES, get_policy
from simulator.cluster import SimulatedCluster
from simulator.faults import Faults, WorkerCrash, WorkerSlowdown
from simulator.result import summarize
from tests.unit.simulator.test_sim_cluster import BLOCK, CONFIG, make_request

WORKERS = ("p0", "p1", "d0", "d1")

arrivals = st.lists(
    st.builds(
        make_request,
        at=st.sampled_from([0.0, 0.2, 0.5, 1.0, 1.75]),
        prompt=st.integers(1, 700),
        answer=st.integers(0, 120),
        head=st.integers(0, 2),
        tenant=st.sampled_from(["", "other"]),
    ),
    min_size=1,
    max_size=10,
)
crashes = st.builds(
    WorkerCrash,
    worker=st.sampled_from(WORKERS).map(WorkerId),
    at_seconds=st.floats(0, 3),
    down_seconds=st.floats(0, 3),
)
slowdowns = st.builds(
    WorkerSlowdown, st.sampled_from(WORKERS).map(WorkerId), st.sampled_from([0.5, 3.0])
)
faults = st.builds(
    Faults, st.lists(crashes, max_size=3).map(tuple), st.lists(slowdowns, max_size=2).map(tuple)
)


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    requests=arrivals,
    faults=faults,
    order=st.sampled_from(sorted(PREFILL_ORDERS)),
    device_tokens=st.sampled_from([300, 800, 10_000]),
    report_seconds=st.sampled_from([0.0, 0.3]),
    num_conductors=st.integers(1, 2),
    num_hosts=st.sampled_from([0, 2]),
)
def test_each_request_ends_exactly_once(
    policy: str,
    requests: list[TraceRequest],
    faults: Faults,
    order: str,
    device_tokens: int,
    **more: float,
) -> None:
    """The simulator checks the workers' accounting after every event: the reservations on a worker
    never exceed its memory, unless a single request is larger than all of it."""
    config = replace(
        CONFIG,
        num_prefill=2,
        num_decode=2,
        prefill_order=order,
        device_tokens=device_tokens,
        step_tokens=128,
        **more,  # type: ignore[arg-type]
    )
    ordered = tuple(sorted(requests, key=lambda each: each.arrival_seconds))
    cluster = SimulatedCluster(config, Trace("any", BLOCK, ordered), get_policy(policy), faults)
    for job in cluster.run(check_always=True):
        assert job.rejected != (job.finished_at_seconds >= 0)
        if not job.rejected:
            assert job.num_generated_tokens == max(job.arrival.num_answer_tokens, 1)
            assert (
                job.arrival.arrival_seconds < job.first_token_at_seconds <= job.finished_at_seconds
            )
            assert job.cached_tokens < job.num_prompt_tokens
    assert not any(worker._counters._queued for worker in cluster.prefills)
    accepted = [job for job in cluster.jobs if not job.rejected]
    decoded = sum(worker.num_generated_tokens for worker in cluster.decodes)
    answered = sum(max(job.arrival.num_answer_tokens, 1) for job in accepted)
    if not faults.crashes:
        assert decoded + len(accepted) == answered, "prefill must generate each first token"
    outcome = summarize(cluster)
    assert 0 <= outcome.hit_ratio_tokens <= 1
    assert outcome.load_imbalance >= 1 and outcome.decode_imbalance >= 1
