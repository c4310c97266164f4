"""Tests that in a thousand runs of a whole cluster with random faults, no token is lost, repeated
or changed, no request fails unless all of its placements have failed, and no resource leaks. Also
tests that such runs find every bug that is planted in the production code.

    make sim SEED=17 VERBOSE=1

replays one run and prints a line per event.
"""

import os
import subprocess
import sys

import pytest

from tests.sim.whole.bugs import BUGS, planted
from tests.sim.whole.run import run_seed, simulation_environment

NUM_RUNS = 1000
BATCHES = 20


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_fault_schedule_breaks_a_guarantee(batch: int) -> None:
    share = NUM_RUNS // BATCHES
    with simulation_environment():
        for seed in range(batch * share, (batch + 1) * share):
            outcome = run_seed(seed)
            assert not outcome.failure, f"seed {seed}: {outcome.failure}"


@pytest.mark.timeout(400)  # some are found after hundreds of runs
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    with simulation_environment(), planted(BUGS[bug]):
        for seed in range(NUM_RUNS):
            outcome = run_seed(seed)
            if outcome.failure:
                print(f"{bug}: found in run {seed + 1}: {outcome.failure[:200]}")
                return
    raise AssertionError(f"{NUM_RUNS} runs did not find the planted bug {bug}")


def test_a_seed_replays_its_run_in_any_process() -> None:
    """Sets iterate in a different order in each process; runs must not depend on this order."""
    script = (
        "from tests.sim.whole.run import run_seed, simulation_environment\n"
        "with simulation_environment():\n"
        "    print([(o.events, o.num_callbacks) for o in map(run_seed, range(20, 30))])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1
