"""Tests that sampling a whole batch gives the same tokens as sampling row by row."""

import os
import subprocess
import sys

import numpy as np
import pytest

from baton.core.philox import uniform
from baton.engine.philox_batch import uniforms

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
    """The checks run in their own process, since the interpreter is selected when Triton is
    imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.cuda_sampler_cases"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == NUM_LINES
