"""Tests the statistics of the tenant benchmarks."""

import numpy as np

from benchmarks.tenant_timing import auc, summary
from benchmarks.tenants import ARMS, _order


def test_area_under_the_curve() -> None:
    assert auc([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert auc([3.0, 4.0], [1.0, 2.0]) == 0.0
    assert auc([1.0, 4.0], [2.0, 3.0]) == 0.5
    assert auc([1.0, 1.0], [1.0, 2.0]) == 0.75


def test_attackers_auc_uses_the_better_direction() -> None:
    result = summary([3.0, 4.0], [1.0, 2.0])
    assert (result["auc"], result["sooner"]) == (1.0, 0.0)


def test_standard_error_matches_random_data() -> None:
    generator = np.random.default_rng(5)
    found = [auc(*generator.random((2, 40)).tolist()) for _ in range(2000)]
    expected = summary([0.0] * 40, [0.0] * 40)["standard_error"]
    assert abs(float(np.std(found)) / expected - 1) < 0.05


def test_every_arm_runs_at_every_position_of_a_round() -> None:
    order = _order(3)
    rounds = [order[start : start + 3] for start in (0, 3, 6)]
    assert all(sorted(each) == sorted(ARMS) for each in rounds)
    assert all(set(place) == set(ARMS) for place in zip(*rounds, strict=True))
