"""Tests that in runs of attached workers with random faults of workers, servers and links, no
client gets a wrong token, every request ends whole, and nothing is left at any server. Also tests
that such runs find every bug that is planted in the production code.

    make sim ATTACHED=1 SEED=17 VERBOSE=1

replays one run and prints a line per event.
"""

import pytest

from tests.sim.attached.bugs import BUGS
from tests.sim.attached.run import AttachedRun
from tests.sim.whole.bugs import planted
from tests.sim.whole.run import run_seed, simulation_environment

NUM_RUNS = 40
MAX_RUNS_PER_BUG = 300


def test_no_fault_schedule_breaks_a_guarantee() -> None:
    with simulation_environment():
        for seed in range(NUM_RUNS):
            outcome = run_seed(seed, AttachedRun)
            assert not outcome.failure, f"seed {seed}: {outcome.failure}"


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    with simulation_environment(), planted(BUGS[bug]):
        for seed in range(MAX_RUNS_PER_BUG):
            outcome = run_seed(seed, AttachedRun)
            if outcome.failure:
                print(f"{bug}: found in run {seed + 1}: {outcome.failure[:200]}")
                return
    raise AssertionError(f"{MAX_RUNS_PER_BUG} runs did not find the planted bug {bug}")
