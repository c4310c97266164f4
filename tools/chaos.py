"""Kill and freeze processes under running streams: no token may be lost, repeated or changed.

    python -m tools.chaos [--seconds 600] [--prefill 2] [--decode 3] [--streams 20] [--every 5]

Every few seconds one process (prefill, decode, conductor, store, Redis) gets SIGKILL, or SIGSTOP
and some seconds later SIGCONT. Answers are compared with those of the undisturbed cluster. Prints
the faults, the inter-token latencies, every worker's block counts at the end, and JSON as the last
line. Exits with 1 if an accepted request got an incomplete or wrong answer, or if a block is still
referenced. With a dtype other than float32, an answer only has to be complete, since a recomputed
token may differ.
"""

import argparse
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np

from testkit.cancellation import are_blocks_free, idle_workers
from testkit.local_cluster import (
    LocalCluster,
    local_cluster,
)
from testkit.machine import SYSTEM_CLOCK, describe
from testkit.streams import StreamedAnswer, make_request_bodies, record_answers, traffic

QUESTIONS = 60
SHORTEST, LONGEST = 60, 160
ROLES = ("prefill", "decode", "conductor", "kvstore", "redis")
LONGEST_FREEZE = 8.0
WARMUP = 8
RECOVERY_SECONDS = 60.0


class FaultInjector:
    """Kills or freezes one random process at a time."""

    def __init__(self, cluster: LocalCluster, seed: int, every: float) -> None:
        self._cluster = cluster
        self._chance = np.random.default_rng(seed)
        self._interval_seconds = every
        self._over = threading.Event()
        self.faults: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        until = SYSTEM_CLOCK() + seconds
        while SYSTEM_CLOCK() < until:
            self._over.wait(self._interval_seconds)
            self._inject_fault()

    def _inject_fault(self) -> None:
        role = str(self._chance.choice(ROLES))
        frozen = bool(self._chance.random() < 0.5)
        freeze = float(self._chance.uniform(1.0, LONGEST_FREEZE))
        pick = int(self._chance.integers(1 << 30))
        serving = [p for p in self._cluster.processes(role) if p["state"] == "serving"]
        if not serving:
            self.faults[f"no {role} was serving"] += 1
            return
        victim = serving[pick % len(serving)]
        self.faults[f"{role} {'frozen' if frozen else 'killed'}"] += 1
        action = f"frozen for {freeze:.1f} s" if frozen else "killed"
        print(f"{victim['id']} {action}", flush=True)
        if not frozen:
            _signal(victim["pid"], signal.SIGKILL)
        elif _signal(victim["pid"], signal.SIGSTOP):
            self._over.wait(freeze)
            _signal(victim["pid"], signal.SIGCONT)


def await_recovery(cluster: LocalCluster) -> None:
    """Wait, for a limited time, until the process that was disturbed last serves again. A timeout
    is no error here: the final check reports what is still wrong."""
    until, pause = SYSTEM_CLOCK() + RECOVERY_SECONDS, threading.Event()
    while SYSTEM_CLOCK() < until:
        checked = cluster.baton("check", "--json", check=False)
        if cluster.status()["ready"] and checked.returncode == 0:
            return
        pause.wait(0.5)


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def report(answers: Sequence[StreamedAnswer]) -> dict[str, object]:
    accepted = [answer for answer in answers if not answer.is_refused]
    gaps = np.array(
        [answer.max_inter_token_seconds for answer in accepted if answer.token_times] or [0.0]
    )
    first = np.array([a.token_times[0] - a.started_at for a in accepted if a.token_times] or [0.0])
    return {
        "accepted": len(accepted),
        "whole": sum(
            not answer.error and len(answer.tokens) == len(answer.case.tokens)
            for answer in accepted
        ),
        "right": sum(answer.is_right for answer in accepted),
        "failed": sum(bool(answer.error) for answer in accepted),
        "changed": sum(not answer.error and not answer.is_right for answer in accepted),
        "refused": len(answers) - len(accepted),
        "longest_gap_seconds": _percentiles(gaps),
        "ttft_seconds": _percentiles(first),
        "errors": sorted({answer.error[:300] for answer in answers if answer.error})[:20],
    }


def _percentiles(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> dict[str, float]:
    p50, p99 = (round(float(value), 3) for value in np.percentile(values, [50, 99]))
    return {"p50": p50, "p99": p99, "max": round(float(values.max()), 3)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=3)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    print(describe(), f"seed {options.seed}")
    bodies = make_request_bodies(QUESTIONS, options.seed, SHORTEST, LONGEST)
    settings = {"threads": 1, "dtype": options.dtype}
    pools = (options.prefill, options.decode)
    with local_cluster(None, *pools, settings) as cluster:
        questions = record_answers(cluster.url, bodies, WARMUP)
        villain = FaultInjector(cluster, options.seed, options.every)
        with traffic(cluster.url, questions, options.streams) as answers:
            villain.run(options.seconds)
        await_recovery(cluster)
        workers = idle_workers(cluster)
    result = report(answers) | {"deeds": dict(villain.faults), "seed": options.seed}
    free = all(are_blocks_free(worker) for worker in workers)
    for name, value in result.items():
        print(f"{name}: {value}")
    print(f"{len(workers)} workers, {'all free' if free else 'NOT all free'}")
    exact = result["right"] if options.dtype == "float32" else result["whole"]
    ok = free and exact == result["accepted"]
    for worker in workers:
        worker.pop("description", None)
    print(json.dumps({"ok": ok, **result, "workers": workers}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
