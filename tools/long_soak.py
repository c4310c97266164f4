"""Run a cluster for hours, in pieces: every answer is checked, and nothing may grow.

    python -m tools.long_soak --journal soak.jsonl [--minutes 60] [--set NAME=VALUE …] [--seed 1]
    python -m tools.long_soak --journal soak.jsonl --report

A piece starts a cluster of 2 prefill and 2 decode workers that transfer KV over gRPC, with two
tenants and a small store with an SSD tier. Streams of both tenants run all the time. A cycle of
about two minutes grows the pools, kills one of the workers that were added, shrinks the pools,
cancels some streams, and runs a batch. The conductor, the store and Redis are killed in the first
three cycles, so that what their clients open then for good is not taken for growth, and again from
a third of the way on, in every second cycle. Each cycle ends without traffic; then memory, file
descriptors, threads, Redis keys and files are measured and appended to the journal, one JSON object
per line. Answers are compared with those of the undisturbed cluster at the start of the piece.

``--report`` reads all pieces in the journal, and prints for each process that was measured at
least ten times how much its memory and descriptors grew from the second quarter of its measurements
to the last. Exits with 1 if an answer was wrong or incomplete, a process grew, or a block leaked.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from testkit.cancellation import CancellationStorm, are_blocks_free, idle_workers
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import SYSTEM_CLOCK, describe, pause
from testkit.streams import (
    CompletionCase,
    StreamedAnswer,
    make_request_bodies,
    record_answers,
    traffic,
)
from tools.chaos import await_recovery
from tools.process_census import take_census
from tools.soak_batch import run_batch
from tools.soak_report import report

TENANTS = {"acme": "baton-soak-key-of-acme", "globex": "baton-soak-key-of-globex"}
QUESTIONS, SHORTEST, LONGEST = 48, 40, 120
STREAMS_PER_TENANT = 3
BATCH_LINES = 12
CANCELLATIONS = 20
TRAFFIC_SECONDS = 30.0
SMALL, LARGE = {"prefill": 2, "decode": 2}, {"prefill": 3, "decode": 3}
SINGLE_ROLES = ("conductor", "kvstore", "redis")


@dataclass
class Tally:
    """Counts of a piece's answers. ``problems`` are the first messages of wrong ones."""

    right: int = 0
    wrong: int = 0
    refused: int = 0
    batch_lines: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, answers: Sequence[StreamedAnswer]) -> None:
        for answer in answers:
            if answer.is_refused:
                self.refused += 1
            elif answer.is_right:
                self.right += 1
            else:
                self.fail(answer.error or "an answer has other tokens than before")

    def fail(self, problem: str) -> None:
        self.wrong += 1
        if len(self.problems) < 20:
            self.problems.append(problem[:300])


class SoakPiece:
    """One piece of the soak, over one cluster."""

    def __init__(self, cluster: LocalCluster, journal: Path, seed: int) -> None:
        self._cluster = cluster
        self._journal = journal
        self._chance = np.random.default_rng(seed)
        self._seed = seed
        self._cases: dict[str, list[CompletionCase]] = {}
        self.tally = Tally()

    def run(self, seconds: float) -> None:
        began, cycle = SYSTEM_CLOCK(), 0
        bodies = make_request_bodies(QUESTIONS, self._seed, SHORTEST, LONGEST)
        for tenant, key in TENANTS.items():
            self._cases[tenant] = record_answers(self._cluster.url, bodies, 4, key)
        while SYSTEM_CLOCK() - began < seconds:
            past_third = SYSTEM_CLOCK() - began > seconds / 3
            self._cycle(cycle, past_third)
            cycle += 1
            self._record(cycle, SYSTEM_CLOCK() - began)

    def _cycle(self, number: int, kill_single_process: bool) -> None:
        with self._traffic():
            self._scale(LARGE)
            pause(TRAFFIC_SECONDS)
            self._kill_added_worker()
            pause(TRAFFIC_SECONDS / 2)
            self._scale(SMALL)
            self._cancel_streams(number)
            if number < len(SINGLE_ROLES):
                self._kill(SINGLE_ROLES[number])
            elif kill_single_process and number % 2:
                self._kill(SINGLE_ROLES[number // 2 % len(SINGLE_ROLES)])
            self._run_batch(number)
        await_recovery(self._cluster)

    @contextmanager
    def _traffic(self) -> Iterator[None]:
        """During the ``with`` block, streams of all tenants run; their answers are then counted."""
        found: list[list[StreamedAnswer]] = []
        with ExitStack() as streams:
            for tenant, key in TENANTS.items():
                running = traffic(self._cluster.url, self._cases[tenant], STREAMS_PER_TENANT, key)
                found.append(streams.enter_context(running))
            yield
        for answers in found:
            self.tally.add(answers)

    def _scale(self, sizes: dict[str, int]) -> None:
        wanted = [f"{role}={count}" for role, count in sizes.items()]
        done = self._cluster.baton("scale", *wanted, check=False)
        if done.returncode:
            self.tally.fail(f"baton scale {' '.join(wanted)} failed: {done.stderr}")

    def _kill_added_worker(self) -> None:
        role = str(self._chance.choice(("prefill", "decode")))
        self._kill(role, newest=True)

    def _kill(self, role: str, newest: bool = False) -> None:
        serving = [p for p in self._cluster.processes(role) if p["state"] == "serving"]
        if serving:
            victim = serving[-1 if newest else 0]
            print(f"kill {victim['id']}", flush=True)
            os.kill(victim["pid"], signal.SIGKILL)

    def _cancel_streams(self, number: int) -> None:
        storm = CancellationStorm.make(CANCELLATIONS, self._seed + number)
        key = next(iter(TENANTS.values()))
        try:
            storm.run(self._cluster.url, key)
        except (httpx.HTTPError, KeyError) as error:  # refused, or its router is gone
            self.tally.fail(f"a stream of the cancellations failed: {error!r}")

    def _run_batch(self, number: int) -> None:
        """Run a batch of known requests, compare its answers, and delete its files."""
        tenant, key = list(TENANTS.items())[number % len(TENANTS)]
        try:
            problems = run_batch(self._cluster.url, key, self._cases[tenant][:BATCH_LINES])
        except (httpx.HTTPError, RuntimeError) as error:
            problems = [f"the batch failed: {error!r}"]
        self.tally.batch_lines += BATCH_LINES
        for problem in problems:
            self.tally.fail(problem)

    def _record(self, cycle: int, seconds: float) -> None:
        workers = idle_workers(self._cluster)
        if not all(are_blocks_free(worker) for worker in workers):
            self.tally.fail(f"cycle {cycle}: a block is still referenced on an idle worker")
        checked = self._cluster.baton("check", "--json", check=False)
        if checked.returncode:
            self.tally.fail(f"cycle {cycle}: baton check: {checked.stdout[-300:]}")
        census = take_census(self._cluster)
        entry = {
            "piece": self._seed,
            "cycle": cycle,
            "seconds": round(seconds, 1),
            "right": self.tally.right,
            "wrong": self.tally.wrong,
            "refused": self.tally.refused,
            "batch_lines": self.tally.batch_lines,
            "problems": self.tally.problems,
            **census.as_dict(),
        }
        with self._journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        own = sum(usage.own_mib for usage in census.processes)
        print(
            f"cycle {cycle}, {seconds / 60:.1f} min: {self.tally.right} right, {self.tally.wrong} "
            f"wrong, {self.tally.refused} refused; {own:.0f} MiB, {census.redis_keys} Redis keys",
            flush=True,
        )


def tenants_file(folder: Path) -> Path:
    """Write a tenants file with the keys of TENANTS."""
    lines = ["tenants:"]
    for name, key in TENANTS.items():
        digest = hashlib.sha256(key.encode()).hexdigest()
        lines += [f"  {name}:", f"    keys: ['sha256:{digest}']"]
    path = folder / "tenants.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", dest="settings")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(arguments)
    if options.report:
        return report(options.journal)
    print(describe(), f"seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="baton-soak-") as name:
        folder = Path(name)
        settings: dict[str, object] = {
            "threads": 1,
            "transports": "grpc",
            "store_bytes": 32 << 20,
            "store_disk_bytes": 128 << 20,
            "tenants_file": tenants_file(folder),
            **dict(pair.split("=", 1) for pair in options.settings),
        }
        with local_cluster(prefill=2, decode=2, settings=settings) as cluster:
            cluster.api_key = next(iter(TENANTS.values()))
            piece = SoakPiece(cluster, options.journal, options.seed)
            piece.run(60 * options.minutes)
    print(json.dumps({"right": piece.tally.right, "wrong": piece.tally.wrong}))
    return int(piece.tally.wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
