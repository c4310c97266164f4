"""Run fault-injection simulations of a cluster, one per seed: `make sim SEED=… RUNS=…`; with
ATTACHED=1, of attached workers and their servers.

Prints the number of runs per second, and the seed of each run that violated a guarantee. With
VERBOSE=1, also prints a line per event. The last line is JSON. Exits with 1 if a run failed.
"""

import argparse
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from baton.clock import SystemClock
from tests.sim.attached.run import AttachedRun
from tests.sim.whole.run import Outcome, Run, run_seed, simulation_environment

PROGRESS_SECONDS = 30.0

PROCESS_CONTEXTS = ExitStack()
"""Contexts that stay open until the process ends."""


@dataclass
class Tally:
    """The totals over all runs."""

    num_runs: int = 0
    num_failovers: int = 0
    virtual_seconds: float = 0.0
    failed_seeds: list[int] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.num_runs += 1
        self.num_failovers += outcome.num_failovers
        self.virtual_seconds += outcome.virtual_seconds
        self.ends.update(outcome.ends)
        if outcome.failure:
            self.failed_seeds.append(outcome.seed)

    def as_json(self, seconds: float) -> str:
        return json.dumps(
            {
                "runs": self.num_runs,
                "runs_per_second": round(self.num_runs / seconds, 1),
                "seconds": round(seconds, 1),
                "virtual_seconds": round(self.virtual_seconds),
                "requests": self.ends.total(),
                "ends": dict(sorted(self.ends.items())),
                "failovers": self.num_failovers,
                "failed": len(self.failed_seeds),
                "failed_seeds": self.failed_seeds[:100],
            }
        )


def main() -> int:
    options = _options()
    clock = SystemClock()
    began = last_printed = clock.monotonic()
    tally = Tally()
    for outcome in _outcomes(options):
        tally.add(outcome)
        if options.verbose:
            print("\n".join(outcome.events))
        if outcome.failure:
            print(f"seed {outcome.seed}: {outcome.failure}", flush=True)
        if clock.monotonic() > last_printed + PROGRESS_SECONDS:
            last_printed = clock.monotonic()
            rate = tally.num_runs / (last_printed - began)
            print(f"{tally.num_runs} runs, {rate:.1f} a second", flush=True)
    print(tally.as_json(clock.monotonic() - began))
    return 1 if tally.failed_seeds else 0


def _outcomes(options: argparse.Namespace) -> Iterator[Outcome]:
    seeds = range(options.seed, options.seed + options.runs)
    run = partial(run_seed, kind=AttachedRun if options.attached else Run)
    if options.processes == 1:
        with simulation_environment():
            yield from map(run, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, initializer=_begin) as pool:
        yield from pool.imap(run, seeds, chunksize=20)


def _begin() -> None:
    """Initialize a process of the multiprocessing pool: replace what the production code can't use
    in a simulation, and make garbage collections less frequent."""
    PROCESS_CONTEXTS.enter_context(simulation_environment())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--attached", action="store_true", help="attached workers and servers")
    parser.add_argument("--verbose", action="store_true", help="one line per event")
    options = parser.parse_args()
    if options.runs < 1 or options.processes < 1:
        parser.error("--runs and --processes must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
