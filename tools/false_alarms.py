"""Overload every core, and check that no live member is declared dead.

    python -m tools.false_alarms [--seconds 120] [--hogs 4] [--streams 12]

Streams answers from a cluster of 2 prefill and 2 decode workers while other processes burn CPU.
Prints the numbers of lost connections to workers, of requests that failed over, and of registry
problems, each as logged by the router; the last line is JSON. Exits with 1 if one of these numbers
is not zero, or if an answer was wrong.
"""

import argparse
import json
import subprocess
import sys
import threading

from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import describe
from testkit.streams import make_request_bodies, record_answers, traffic
from tools.chaos import report

ALARMS = (
    "worker_connection_lost",
    "request_fails_over",
    "rejoin_period_started",
    "heartbeat_failed",
)


def alarms(cluster: LocalCluster) -> dict[str, int]:
    """Count, by event, the router's log lines about the events in ``ALARMS``, and print these
    lines."""
    lines = cluster.baton("logs", "router").stdout.splitlines()
    found = {name: [line for line in lines if f" {name} " in line] for name in ALARMS}
    for line in (line for those in found.values() for line in those):
        print(line)
    return {name: len(those) for name, those in found.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--hogs", type=int, default=4)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    print(describe(), f"seed {options.seed}")
    bodies = make_request_bodies(options.streams, options.seed, 60, 160)
    with local_cluster(None, 2, 2, {"threads": 1}) as cluster:
        questions = record_answers(cluster.url, bodies, options.streams)
        hogs = [subprocess.Popen([sys.executable, "-c", "while 1: 0"]) for _ in range(options.hogs)]
        try:
            with traffic(cluster.url, questions, options.streams) as answers:
                threading.Event().wait(options.seconds)
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
        result = report(answers) | {"alarms": alarms(cluster), "seed": options.seed}
    for name, value in result.items():
        print(f"{name}: {value}")
    ok = not any(result["alarms"].values()) and result["right"] == result["accepted"]  # type: ignore[attr-defined]
    print(json.dumps({"ok": ok, **result}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
