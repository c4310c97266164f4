"""Tests a simulated cluster with autoscaling: which workers are added and removed, and what they
cost."""

from dataclasses import replace

import numpy as np
import pytest

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.pools.scaling_policy import PoolBounds, ScalingConfig
from baton.traces.diurnal import DiurnalRate, with_diurnal_rate
from baton.traces.synthetic import TRACE_GENERATORS
from baton.traces.trace import Trace, TraceRequest
from conductor.planner import PlannerConfig
from conductor.policy.policies import get_policy
from conductor.policy.sizing import SizingConfig
from simulator.autoscaling import SimulatedAutoscalingConfig
from simulator.cluster import SimulatedCluster
from simulator.faults import Faults, WorkerCrash
from tests.unit.simulator.test_sim_cluster import BLOCK, CONFIG, make_request

QUICK = SimulatedAutoscalingConfig(
    planner=PlannerConfig(
        sizing=SizingConfig(shrink_seconds=20.0, max_prefill=3, max_decode=3), start_seconds=10.0
    ),
    scaling=ScalingConfig(
        prefill=PoolBounds(1, 3),
        decode=PoolBounds(1, 2),
        stable_seconds=0.0,
        cooldown_seconds=0.0,
        shrink_seconds=20.0,
        pending_seconds=100.0,
    ),
    start_seconds=10.0,
)
ONE_WRITER = replace(QUICK, scaling=replace(QUICK.scaling, decode=PoolBounds(1, 1)))


def ran(
    arrivals: list[TraceRequest], config: SimulatedAutoscalingConfig = QUICK,
    faults: Faults = Faults(),
    **more: object,
) -> SimulatedCluster:  # fmt: skip
    settings = replace(CONFIG, autoscaling=config, **more)  # type: ignore[arg-type]
    trace = Trace("by-hand", BLOCK, tuple(arrivals))
    cluster = SimulatedCluster(settings, trace, get_policy("round_robin"), faults)
    cluster.run(check_always=True)
    return cluster


def steady(gap: float, until: float, start: float = 0.0) -> list[TraceRequest]:
    """Return requests every ``gap`` seconds with prompts of 400 tokens, half a second of work
    each."""
    count = round((until - start) / gap)
    return [
        make_request(start + gap * n, 400, 5, head=n + round(start) * 100) for n in range(count)
    ]


def steps(cluster: SimulatedCluster) -> list[tuple[float, str, int]]:
    assert cluster.autoscaler is not None
    return [(at, step.role.value, step.new_size) for at, step in cluster.autoscaler.steps]


def test_pool_grows_and_the_new_worker_gets_prompts() -> None:
    """Half a second of work every 0.6 s keeps one worker busy 83 % of the time. The target is 70 %,
    so two workers are needed. The first decision is at 5 s, and the second worker serves 10 s
    later."""
    cluster = ran(steady(0.6, 60.0), ONE_WRITER)
    assert steps(cluster) == [(5.0, "prefill", 2)]
    firsts = [job.arrival.arrival_seconds for job in cluster.jobs if job.prefill == "p1"]
    assert firsts[0] == pytest.approx(15.0, abs=1.2)
    assert [worker.id for worker in cluster.prefills] == ["p0", "p1"]


def test_worker_seconds_count_from_when_the_worker_was_requested() -> None:
    cluster = ran(steady(0.6, 60.0), ONE_WRITER)
    assert cluster.autoscaler is not None
    paid = cluster.autoscaler.worker_seconds(60.0)
    assert paid == {Role.PREFILL: 60.0 + 55.0, Role.DECODE: 60.0}


LONG_ANSWERS = [make_request(1.0, 50, 4000, head=1), make_request(2.0, 100, 4000, head=2)]
"""Requests with long answers. A step with one answer takes 11 ms, so that each answer takes 44
s."""

LATER = [make_request(float(at), 10, 5, head=at) for at in (30, 60, 70)]


def test_removed_worker_finishes_its_answers() -> None:
    """Two decode workers each have a long answer and hardly any other work. After 20 s of
    observation, the less loaded worker gets no more requests. Its answer ends at 45 s, and the
    worker is paid for until the next decision."""
    cluster = ran([*LONG_ANSWERS, *LATER], num_decode=2)
    assert steps(cluster) == [(25.0, "decode", 1)]
    assert [(job.decode, job.num_restarts) for job in cluster.jobs] == [
        ("d0", 0), ("d1", 0), ("d1", 0), ("d1", 0), ("d1", 0),
    ]  # fmt: skip
    assert cluster.jobs[0].finished_at_seconds == pytest.approx(1.15 + 3999 * 0.011, abs=0.01)
    assert cluster.autoscaler is not None
    assert cluster.autoscaler.worker_seconds(70.0) == {Role.PREFILL: 70.0, Role.DECODE: 70.0 + 50.0}


def test_draining_worker_that_crashes_is_not_restarted() -> None:
    """The draining worker's answer continues on the other worker."""
    faults = Faults(crashes=(WorkerCrash(WorkerId("d0"), 40.0, 2.0),))
    cluster = ran([*LONG_ANSWERS, *LATER], faults=faults, num_decode=2)
    assert steps(cluster) == [(25.0, "decode", 1)]
    assert [(job.decode, job.num_restarts) for job in cluster.jobs] == [
        ("d1", 1), ("d1", 0), ("d1", 0), ("d1", 0), ("d1", 0),
    ]  # fmt: skip


def test_last_worker_of_a_pool_is_not_removed() -> None:
    cluster = ran([make_request(float(10 * n), 10, 5, head=n) for n in range(10)])
    assert steps(cluster) == []


def test_growth_that_takes_too_long_is_taken_back() -> None:
    slow = replace(ONE_WRITER, start_seconds=1000.0)
    config = replace(slow, scaling=replace(slow.scaling, pending_seconds=20.0))
    cluster = ran(steady(0.6, 40.0), config)
    assert steps(cluster)[:2] == [(5.0, "prefill", 2), (25.0, "prefill", 1)]
    assert [worker.id for worker in cluster.prefills] == ["p0"]


RAMP = replace(
    ONE_WRITER,
    planner=replace(ONE_WRITER.planner, start_seconds=8.0),
    scaling=replace(ONE_WRITER.scaling, stable_seconds=3.0, cooldown_seconds=5.0),
    start_seconds=8.0,
    check_seconds=1.0,
)
"""Between two plans, which are made every 5 s, the autoscaler checks the pools four more times."""


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_ramp_causes_one_change_up_and_one_down_after_the_shrink_time(seed: int) -> None:
    """The rate rises for 30 s, to more than one worker can serve, stays, and falls at 62 s, when
    most of the new workers have just been asked for. Each worker starts in 8 s and then serves for
    20 s, even though the plans that were made meanwhile are content with one worker."""
    print(f"seed {seed}")
    random, at, arrivals = np.random.default_rng(seed), 0.0, list[TraceRequest]()
    while at < 160.0:
        at += random.exponential(1 / (0.4 + 1.9 * min(at / 30.0, 1.0) if at < 62.0 else 0.05))
        arrivals.append(make_request(at, 400, 5, head=len(arrivals)))
    settings = replace(CONFIG, autoscaling=RAMP, report_seconds=1.0)
    cluster = SimulatedCluster(settings, Trace("ramp", BLOCK, tuple(arrivals)), get_policy("baton"))
    cluster.run(check_always=True)
    changes = steps(cluster)
    assert [(role, size) for _, role, size in changes] == [("prefill", 2), ("prefill", 1)]
    assert changes[1][0] - changes[0][0] >= 8.0 + 20.0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_simulated_days_lose_no_request_and_are_deterministic(seed: int) -> None:
    print(f"seed {seed}")
    trace = TRACE_GENERATORS["chat"](1200, 2.0, seed, 1.0)
    diurnal = with_diurnal_rate(trace, DiurnalRate(0.3, 3.7, 300.0))
    config = replace(
        CONFIG, device_tokens=45_000, autoscaling=QUICK, num_conductors=2, report_seconds=1.0,
        prefill_cost=replace(CONFIG.prefill_cost, per_token_seconds=0.0002),
    )  # fmt: skip

    def run() -> tuple[list[float], list[tuple[float, str, int]]]:
        cluster = SimulatedCluster(config, diurnal, get_policy("baton"))
        cluster.run()
        return [job.finished_at_seconds for job in cluster.jobs], steps(cluster)

    first = run()
    assert first == run()
    sizes = [new for _, role, new in first[1] if role == "decode"]
    assert sizes[:2] == [2, 1]


# -- diurnal rates -------------------------------------------------------------------------


def test_diurnal_trace_has_its_rates() -> None:
    """If the rate varies by half of its mean, the quarter of the period around midnight has 0.25 -
    0.5 / pi / sqrt(2) of all requests, and the quarter around noon 0.25 + 0.5 / pi / sqrt(2)."""
    diurnal = DiurnalRate(0.5, 1.5, 3600.0)
    evenly = Trace("even", BLOCK, tuple(make_request(float(n), 10, 5) for n in range(3600)))
    times = [each.arrival_seconds for each in with_diurnal_rate(evenly, diurnal).requests]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(3600.0, abs=2.0)
    night = sum(at < 450 or at > 3150 for at in times)
    noon = sum(1350 < at < 2250 for at in times)
    assert night == pytest.approx(3600 * (0.25 - 0.5 / 3.14159 / 2**0.5), abs=3)
    assert noon == pytest.approx(3600 * (0.25 + 0.5 / 3.14159 / 2**0.5), abs=3)
