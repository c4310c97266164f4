"""Tests simulated workers that compute prompts and answers in the same steps, with loads small
enough to be computed by hand, and against a simulation that runs every step by itself.

A step takes 10 ms, 1 ms per token, 1 µs per pair in prompts, and 10 µs per token of KV that answers
read.
"""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from baton.core.cost import DecodeCost, PrefillCost
from baton.traces.trace import Trace, TraceRequest
from conductor.policy.config import BatonPolicyConfig
from conductor.policy.policies import get_policy
from conductor.policy.snapshot import LinkSpeed
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.faults import Faults, WorkerCrash
from simulator.mixed import SimulatedMixedWorker
from simulator.request import SimulatedRequest
from simulator.step_cost import StepCost, StepWork

COST = StepCost(0.01, 0.0, 0.001, 1e-6, 1e-5)
CONFIG = ClusterConfig(
    num_prefill=0,
    num_decode=0,
    num_mixed=1,
    prefill_cost=PrefillCost(0.01, 0.001, 1e-6),
    decode_cost=DecodeCost(0.01, 0.001, 1e-5),
    step_cost=COST,
    kv_bytes_per_token=1,
    device_tokens=10_000,
    node_tokens=0,
    link=LinkSpeed(1e6, 1e6, 0.0),
    mixed_tokens=100,
    device_block_tokens=10,
)
SEED = 20261126


def run(*arrivals: TraceRequest, faults: Faults = Faults(), **more: object) -> SimulatedCluster:
    config = replace(CONFIG, **more)  # type: ignore[arg-type]
    cluster = SimulatedCluster(
        config,
        Trace("t", 10, arrivals),
        get_policy("baton", BatonPolicyConfig(admission=False)),
        faults,
    )
    cluster.run(check_always=True)
    return cluster


def arrival(at: float, prompt: int, answer: int) -> TraceRequest:
    return TraceRequest(at, prompt, answer, ())


def prompt_step(*shares: tuple[int, int]) -> float:
    """Return the time of a step with prompts only, of which each share is (computed, new)."""
    tokens = sum(new for _, new in shares)
    return 0.01 + 0.001 * tokens + 1e-6 * sum(new * (done + new / 2) for done, new in shares)


def answer_step(*contexts: int) -> float:
    return 0.01 + 0.001 * len(contexts) + 1e-5 * sum(contexts)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    (job,) = run(arrival(0.0, 250, 3)).jobs
    first = prompt_step((0, 100)) + prompt_step((100, 100)) + prompt_step((200, 50))
    assert job.first_token_at_seconds == pytest.approx(first)
    last = first + answer_step(251) + answer_step(252)
    assert job.finished_at_seconds == pytest.approx(last)
    assert (job.prefill, job.decode) == (None, "m0")


def test_answers_come_first_and_a_prompt_gets_the_rest_of_the_budget() -> None:
    first, second = run(arrival(0.0, 50, 10), arrival(0.001, 300, 1)).jobs
    begun = prompt_step((0, 50))
    # Three steps with 99 tokens of the prompt beside a token of the answer, and one with 3.
    beside = [
        prompt_step((done, new)) + 0.001 + 1e-5 * (51 + step)
        for step, (done, new) in enumerate([(0, 99), (99, 99), (198, 99), (297, 3)])
    ]
    assert first.first_token_at_seconds == pytest.approx(begun)
    assert second.first_token_at_seconds == pytest.approx(begun + sum(beside))
    alone = [answer_step(55 + step) for step in range(5)]
    assert first.finished_at_seconds == pytest.approx(begun + sum(beside) + sum(alone))


def test_a_request_waits_until_memory_suffices_for_its_whole_prompt() -> None:
    first, second = run(arrival(0.0, 60, 4), arrival(0.0, 50, 1), device_tokens=100).jobs
    assert second.first_token_at_seconds == pytest.approx(
        first.finished_at_seconds + prompt_step((0, 50))
    )


def test_the_last_one_admitted_is_preempted_and_computed_again() -> None:
    cluster = run(arrival(0.0, 40, 30), arrival(0.0, 40, 30), device_tokens=100)
    first, second = cluster.jobs
    assert cluster.decodes[0].num_preempted == 1
    # Each has 50 tokens of memory; the 11th token of an answer needs another block.
    begun = prompt_step((0, 40), (0, 40))
    both = sum(answer_step(41 + step, 41 + step) for step in range(10))
    alone = sum(answer_step(51 + step) for step in range(19))
    assert first.finished_at_seconds == pytest.approx(begun + both + alone)
    again = prompt_step((0, 51)) + sum(answer_step(52 + step) for step in range(18))
    assert second.finished_at_seconds == pytest.approx(first.finished_at_seconds + again)
    assert second.first_token_at_seconds == pytest.approx(begun)


def test_requests_of_a_crashed_worker_continue_with_the_tokens_that_were_sent() -> None:
    crash = Faults(crashes=(WorkerCrash("m0", 1.0, 5.0),))  # type: ignore[arg-type]
    cluster = run(arrival(0.0, 50, 200), faults=crash)
    (job,) = cluster.jobs
    assert (job.num_restarts, job.num_generated_tokens) == (1, 200)
    assert job.first_token_at_seconds == pytest.approx(prompt_step((0, 50)))
    ends = accumulate((answer_step(51 + step) for step in range(199)), initial=prompt_step((0, 50)))
    assert job.num_prompt_tokens == 50 + sum(end <= 1.0 for end in ends)


def test_several_workers_share_the_requests() -> None:
    cluster = run(*(arrival(0.0, 50, 20) for _ in range(6)), num_mixed=3)
    assert sorted(job.decode or "" for job in cluster.jobs) == ["m0", "m0", "m1", "m1", "m2", "m2"]


def test_hybrids_place_requests_on_all_kinds_of_workers() -> None:
    arrivals = [arrival(0.05 * number, 60, 20) for number in range(100)]
    crash = Faults(crashes=(WorkerCrash("m0", 0.5, 1.0),))  # type: ignore[arg-type]
    cluster = run(*arrivals, num_prefill=1, num_decode=1, num_mixed=1, faults=crash)
    placed = {(job.prefill, job.decode) for job in cluster.jobs}
    assert {("p0", "d0"), (None, "m0")} <= placed
    assert sum(job.num_restarts for job in cluster.jobs) > 0


def test_experts_are_read_as_far_as_they_are_chosen() -> None:
    cost = StepCost(0.0, 0.001, 0.0, 0.0, 0.0, expert_seconds=0.01, num_experts=4,
                    experts_per_token=1)  # fmt: skip
    assert cost.seconds(StepWork(1, 1, 0.0, 0)) == pytest.approx(0.001 + 0.01 / 4)
    assert cost.seconds(StepWork(2, 2, 0.0, 0)) == pytest.approx(0.001 + 0.01 * 7 / 16)


def test_measured_costs_give_the_measured_steps() -> None:
    prefill, decode = PrefillCost(0.002, 2e-5, 1e-9), DecodeCost(0.0065, 1e-5, 5e-8)
    cost = StepCost.from_measured(prefill, decode)
    assert cost.seconds(StepWork(8, 8, 0.0, 9000)) == pytest.approx(decode.seconds(8, 9000))
    prompt = StepWork(2048, 1, 2048 * 1024, 0)
    assert cost.seconds(prompt) == pytest.approx(prefill.seconds(2048) + 1e-5)


@pytest.mark.parametrize("seed", range(SEED, SEED + 20))
def test_steps_in_one_event_equal_single_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    chance = np.random.default_rng(seed)
    at, arrivals = 0.0, []
    for _ in range(40):
        at += float(chance.exponential(0.2)) if chance.integers(2) else 0.0
        prompt, answer = int(chance.integers(1, 300)), int(chance.integers(60))
        arrivals.append(arrival(at, prompt, answer))
    limits = {"device_tokens": int(chance.choice([400, 1000, 10_000])), "max_batch": 6}
    fast = ends(run(*arrivals, **limits).jobs)
    monkeypatch.setattr(SimulatedMixedWorker, "_num_equal_steps", lambda _: 1)
    slow = ends(run(*arrivals, **limits).jobs)
    assert fast == pytest.approx(slow)


def ends(jobs: list[SimulatedRequest]) -> list[float]:
    return [each for job in jobs for each in (job.first_token_at_seconds, job.finished_at_seconds)]
