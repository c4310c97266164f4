"""Tests that sampling a whole batch gives the same tokens as sampling row by row."""

import numpy as np
import pytest

from baton.core.philox import uniform
from baton.engine.philox_batch import uniforms
from tests.unit.baton.engine.cuda.interpreted import run_interpreted

SEED = 20261121
NUM_LINES = 1 + 1 + 8 + 1 + 1 + 1 + 1


@pytest.mark.parametrize("count", [1, 200])
def test_batched_random_draws_equal_single_draws(count: int) -> None:
    chance = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    seeds = [0, 1, -1, 2**64 - 1, *chance.integers(0, 2**63, count).tolist()]
    positions = [0, 2**40, 7, 1, *chance.integers(0, 2**20, count).tolist()]
    wanted = [uniform(*each) for each in zip(seeds, positions, strict=True)]
    assert uniforms(seeds, positions).tolist() == wanted


@pytest.mark.timeout(300)
def test_batched_sampling_gives_the_tokens_of_row_by_row_sampling() -> None:
    pytest.importorskip("triton")
    assert len(run_interpreted("tests.unit.baton.engine.cuda.cuda_sampler_cases")) == NUM_LINES
