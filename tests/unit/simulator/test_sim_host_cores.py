"""Tests simulated workers that share their host's cores, with times computed by hand.

A prompt takes 0.1 s plus 1 ms per token on idle cores; a decode step 10 ms plus 1 ms per request.
While both workers are busy, each has half of its speed.
"""

import re
from dataclasses import replace
from functools import partial

import pytest

from baton.core.ids import WorkerId
from baton.errors import Invalid
from baton.traces.synthetic import TRACE_GENERATORS
from baton.traces.trace import Trace
from conductor.policy.decision import Decision
from conductor.policy.policies import get_policy
from conductor.policy.snapshot import PolicyQuery, Snapshot
from simulator.cluster import SimulatedCluster
from simulator.event_queue import EventQueue
from simulator.faults import Faults, WorkerCrash
from simulator.host_cores import SharedCores, parse_shared_speeds
from tests.unit.simulator.test_sim_cluster import CONFIG, make_request, run_cluster

HALF = (1.0, 0.5)
A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


# -- the clock -----------------------------------------------------------------------------


def run_steps(speeds: tuple[float, ...], *steps: tuple[WorkerId, float, float]) -> dict[str, float]:
    """Let each worker begin a step of a duration at a time; return when each one ends."""
    events = EventQueue()
    cores = SharedCores(events, speeds)
    ends: dict[str, float] = {}

    def begin(worker: WorkerId, seconds: float) -> None:
        cores.set_busy(worker, busy=True)
        cores.schedule(cores.now_work + seconds, lambda: end(worker))

    def end(worker: WorkerId) -> None:
        ends[worker] = events.now_seconds
        cores.set_busy(worker, busy=False)

    for worker, at, seconds in steps:
        events.schedule(at, partial(begin, worker, seconds))
    events.run()
    return ends


def test_a_worker_alone_is_as_fast_as_on_its_own_cores() -> None:
    assert run_steps(HALF, (A, 1.0, 2.0)) == {"a": 3.0}
    assert run_steps((0.8, 0.4), (A, 1.0, 2.0)) == {"a": pytest.approx(1 + 2 / 0.8)}


def test_workers_that_overlap_slow_each_other_down() -> None:
    """A computes half of its step alone and the rest in 1 s; B then has half of its step left."""
    assert run_steps(HALF, (A, 0.0, 1.0), (B, 0.5, 1.0)) == {"a": 1.5, "b": 2.0}


def test_workers_with_equal_speeds_do_not_disturb_each_other() -> None:
    assert run_steps((1.0, 1.0), (A, 0.0, 1.0), (B, 0.5, 1.0)) == {"a": 1.0, "b": 1.5}


def test_more_workers_than_speeds_divide_what_the_last_one_says() -> None:
    """Two of three have a total speed of 1, and so have three: 1/3 each."""
    steps = ((A, 0.0, 1.0), (B, 0.0, 1.0), (C, 0.0, 1.0))
    assert run_steps(HALF, *steps) == pytest.approx({"a": 3.0, "b": 3.0, "c": 3.0})


# -- in a cluster --------------------------------------------------------------------------

FIRST = make_request(0.0, 100, 11)
"""Prefilled at 0.2 s, transferred at 0.2001 s; alone its ten steps end at 0.3101 s."""


def test_one_request_at_a_time_takes_as_long_as_on_own_cores() -> None:
    (own,) = run_cluster(FIRST, num_hosts=1).jobs
    (shared,) = run_cluster(FIRST, num_hosts=1, shared_speeds=HALF).jobs
    assert shared.first_token_at_seconds == pytest.approx(own.first_token_at_seconds)
    assert shared.finished_at_seconds == pytest.approx(own.finished_at_seconds)


def test_prompt_and_answers_slow_each_other_down() -> None:
    """The second prompt arrives at 0.2551 s, when half of the first answer is left (55 ms). Both
    take twice as long until the answer ends at 0.3651 s; 145 ms of the prompt's 200 are left."""
    second = make_request(0.2551, 100, 1, head=1)
    first, other = run_cluster(FIRST, second, num_hosts=1, shared_speeds=HALF).jobs
    assert first.first_token_at_seconds == pytest.approx(0.2)
    assert first.finished_at_seconds == pytest.approx(0.3651)
    assert other.first_token_at_seconds == pytest.approx(0.3651 + 0.145)


def test_workers_of_different_hosts_do_not_share_cores() -> None:
    second = make_request(0.2551, 100, 1, head=1)
    jobs = run_cluster(FIRST, second, num_hosts=2, shared_speeds=HALF).jobs
    assert jobs[0].finished_at_seconds == pytest.approx(0.3101)
    assert jobs[1].first_token_at_seconds == pytest.approx(0.4551)


def test_mixed_workers_of_a_host_share_its_cores() -> None:
    """Two prompts that arrive together, one on each worker, take twice as long as one."""
    alone, pair = (
        run_cluster(
            *(make_request(0.0, 100, 1, head=head) for head in range(count)),
            num_prefill=0, num_decode=0, num_mixed=2, num_hosts=1, shared_speeds=HALF,
        ).jobs
        for count in (1, 2)
    )  # fmt: skip
    assert {job.decode for job in pair} == {"m0", "m1"}
    took = alone[0].first_token_at_seconds
    assert [job.first_token_at_seconds for job in pair] == pytest.approx([2 * took, 2 * took])


def place_locally(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """Let the decode worker compute the second request's prompt."""
    prefill = None if snapshot.num_placed == 1 else WorkerId("p0")
    return Decision(prefill, WorkerId("d0"), "")


def test_first_token_of_a_local_prefill_comes_when_it_is_computed() -> None:
    """The decode worker begins the second prompt (200 ms) at 1 s. From 1.1 s to the end of the
    third one's prompt, p0 computes, too: half of the second one's is left then, and takes 0.2 s.
    Half of the third one's is left at 1.3 s, minus the decode worker's two steps of 11 ms."""
    arrivals = (
        make_request(0.0, 100, 1),
        make_request(1.0, 100, 3, head=1),
        make_request(1.1, 100, 1, head=2),
    )
    config = replace(CONFIG, num_hosts=1, shared_speeds=HALF)
    cluster = SimulatedCluster(config, Trace("by-hand", 10, arrivals), place_locally)
    _, local, third = cluster.run(check_always=True)
    assert local.first_token_at_seconds == pytest.approx(1.3)
    assert local.finished_at_seconds == pytest.approx(1.3 + 2 * 2 * 0.011)
    assert third.first_token_at_seconds == pytest.approx(1.3 + 0.044 + (0.1 - 0.022))


def test_a_crashed_worker_disturbs_nobody() -> None:
    """The prefill worker dies in the middle of the second prompt, when the first answer has 27.5 ms
    left."""
    second = make_request(0.2551, 100, 1, head=1)
    faults = Faults(crashes=(WorkerCrash(WorkerId("p0"), 0.2551 + 0.055, 5.0),))
    first, _ = run_cluster(FIRST, second, faults=faults, num_hosts=1, shared_speeds=HALF).jobs
    assert first.finished_at_seconds == pytest.approx(0.2551 + 0.055 + 0.0275)


@pytest.mark.parametrize("pools", [(2, 2, 0), (0, 0, 4), (1, 1, 2)])
def test_crashes_lose_no_request(pools: tuple[int, int, int]) -> None:
    prefill, decode, mixed = pools
    names = [*(f"p{i}" for i in range(prefill)), *(f"d{i}" for i in range(decode)),
             *(f"m{i}" for i in range(mixed))]  # fmt: skip
    crashes = [WorkerCrash(WorkerId(name), 2.0 + i, 2.0) for i, name in enumerate(names)]
    config = replace(
        CONFIG, num_prefill=prefill, num_decode=decode, num_mixed=mixed, num_hosts=2,
        shared_speeds=(0.9, 0.6), ttft_slo_seconds=60.0, device_tokens=60_000,
    )  # fmt: skip
    trace = TRACE_GENERATORS["chat"](60, 8.0, 1, 1.0)
    cluster = SimulatedCluster(config, trace, get_policy("baton"), Faults(crashes=tuple(crashes)))
    jobs = cluster.run(check_always=True)
    assert sum(job.num_restarts for job in jobs) > 0


# -- the option ----------------------------------------------------------------------------


def test_speeds_are_parsed() -> None:
    assert parse_shared_speeds("1, 0.6,0.6", 1) == (1.0, 0.6, 0.6)


@pytest.mark.parametrize(
    "text", ["", "1,x", "1.1", "0.5,0.6", "1,0", "-1", "nan", ",".join("1" * 65)]
)
def test_wrong_speeds_are_named(text: str) -> None:
    with pytest.raises(Invalid, match=re.escape(f"--shared-speeds is {text!r}; it must be")):
        parse_shared_speeds(text, 1)


def test_shared_speeds_need_hosts() -> None:
    with pytest.raises(Invalid, match="--shared-speeds needs --hosts"):
        parse_shared_speeds("1,0.6", 0)
