"""Tests the search for the highest rate within the SLO, with faked clusters."""

from dataclasses import replace

import pytest

from baton.traces.synthetic import TRACE_GENERATORS
from conductor.policy.policies import get_policy
from simulator.cluster import SimulatedCluster
from simulator.goodput import find_goodput, min_hopeless_misses, rates_between
from tests.unit.simulator.test_sim_cluster import CONFIG, make_request, run_cluster

NUM_REQUESTS = 10


def fake_run(rate: float, num_met: int) -> SimulatedCluster:
    """Run ten requests at a rate, ``num_met`` of which get their first token in time."""
    arrivals = [make_request(i / rate, 100, 1, head=i) for i in range(NUM_REQUESTS)]
    cluster = run_cluster(*arrivals, num_prefill=NUM_REQUESTS)
    for job in cluster.jobs[num_met:]:
        job.first_token_at_seconds = job.deadline_seconds + 1
    return cluster


@pytest.mark.parametrize(
    ("num_requests", "target", "misses"),
    [(10, 0.9, 2), (100, 0.9, 11), (1000, 0.99, 11), (7, 0.9, 1), (3, 1.0, 1), (12_031, 0.9, 1204)],
)
def test_minimum_number_of_hopeless_misses(num_requests: int, target: float, misses: int) -> None:
    assert min_hopeless_misses(num_requests, target) == misses
    assert (num_requests - misses) / num_requests < target
    assert (num_requests - misses + 1) / num_requests >= target


def test_rates_between_two_bounds() -> None:
    assert rates_between(1.0, 1.2, 1.1) == pytest.approx((1.0, 1.1, 1.2))
    assert rates_between(2.0, 2.0) == (2.0,)
    assert rates_between(1.0, 1.01, 1.01) == pytest.approx((1.0, 1.01))


def test_highest_passing_rate_counts_even_if_a_lower_one_fails() -> None:
    tried: list[float] = []

    def run(rate: float, seed: int) -> SimulatedCluster:
        tried.append(rate)
        return fake_run(rate, {1.0: 10, 2.0: 8, 4.0: 9, 4.2: 5}.get(rate, 0))

    found = find_goodput(run, [4.0, 1.0, 4.2, 2.0], seeds=[0])
    (seed,) = found.by_seed
    assert (seed.rate_rps, seed.attainment) == (4.0, 0.9)
    assert seed.goodput_rps == pytest.approx(9 / (9 / 4.0))
    assert seed.attainments[:3] == ((1.0, 1.0), (2.0, 0.8), (4.0, 0.9))
    assert sorted(tried)[:3] == [1.0, 2.0, 4.0]
    assert tried[4:] == pytest.approx([4.04, 4.0804, 4.121204, 4.16241604])


def test_rate_is_refined_in_steps_of_one_percent() -> None:
    def run(rate: float, seed: int) -> SimulatedCluster:
        return fake_run(rate, 10 if rate <= 10.25 else 0)

    (seed,) = find_goodput(run, [10.0, 10.5], seeds=[0]).by_seed
    assert seed.rate_rps == pytest.approx(10.0 * 1.01**2)


def test_no_rate_above_the_last_is_tried() -> None:
    (seed,) = find_goodput(lambda rate, seed: fake_run(rate, 10), [1.0, 2.0], seeds=[0]).by_seed
    assert (seed.rate_rps, len(seed.attainments)) == (2.0, 2)


def test_each_seed_is_searched_separately_and_the_median_reported() -> None:
    best = {0: 1.0, 1: 4.0, 2: 2.0}

    def run(rate: float, seed: int) -> SimulatedCluster:
        return fake_run(rate, 10 if rate <= best[seed] else 0)

    found = find_goodput(run, [1.0, 2.0, 4.0], seeds=[0, 1, 2])
    assert [each.rate_rps for each in found.by_seed] == [1.0, 4.0, 2.0]
    assert found.rate_rps == 2.0
    assert found.goodput_rps == found.by_seed[2].goodput_rps


def test_no_passing_rate_gives_zero() -> None:
    (seed,) = find_goodput(lambda rate, seed: fake_run(rate, 8), [1.0], seeds=[5]).by_seed
    assert (seed.seed, seed.rate_rps, seed.goodput_rps, seed.attainment) == (5, 0.0, 0.0, 0.0)
    assert seed.attainments == ((1.0, 0.8),)


def test_giving_up_early_does_not_change_the_result() -> None:
    config = replace(CONFIG, num_prefill=2, num_decode=2, ttft_slo_seconds=0.5)

    def run(rate: float, seed: int, patient: bool = True) -> SimulatedCluster:
        trace = TRACE_GENERATORS["few_shot"](60, rate, seed)
        cluster = SimulatedCluster(config, trace, get_policy("least_work"))
        cluster.run(None if patient else min_hopeless_misses(60))
        return cluster

    rates = (0.5, 1.0, 4.0)
    patient = find_goodput(run, rates, [0])
    hasty = find_goodput(lambda rate, seed: run(rate, seed, False), rates, [0])
    assert patient.rate_rps == hasty.rate_rps > 0
    assert len(hasty.by_seed[0].attainments) < len(patient.by_seed[0].attainments)
