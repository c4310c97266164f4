"""Ramp the load of a live cluster on this machine up and down, and list what its autoscaler does.

    python -m benchmarks.autoscale_live [--users 32] [--seconds 30] [--seed 1]

The cluster begins with one prefill and one decode worker of the demo model. Its autoscaler checks
every second; a change must be wanted for 3 s, and past needs count for 20 s. One user in a closed
loop sends requests for ``--seconds``, then a quarter of ``--users``, then all of them, then one
again, for three times as long. Prints each change with the time since the first of them, and as
the last line JSON with the numbers of changes up and down of each pool, and the shortest time in
seconds from a pool's growth to its next shrinkage.
"""

import argparse
import json
import re
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from benchmarks.machine import describe
from tools.local_cluster import LocalCluster, local_cluster

SETTINGS: dict[str, object] = {
    "autoscale": "on",
    "autoscale_interval_seconds": 1,
    "autoscale_stable_seconds": 3,
    "autoscale_cooldown_seconds": 5,
    "autoscale_start_seconds": 8,
    "autoscale_shrink_seconds": 20,
    "max_prefill": 3,
    "max_decode": 3,
}
CHANGE = re.compile(r"^(\S+Z) .*changes (prefill|decode) (\d+) to (\d+): ([^']*)", re.MULTILINE)


def send(cluster: LocalCluster, users: int, seconds: float, seed: int) -> None:
    """Let ``users`` send requests for ``seconds``. Raises CalledProcessError if that fails."""
    cluster.baton(
        *("bench", "--url", cluster.url, "--concurrency", str(users), "--duration", f"{seconds:g}"),
        *("--input-tokens", "512", "--output-tokens", "64", "--seed", str(seed)),
        *("--salt", f"{users}-{seed}"),
    )


def changes(log: str) -> list[tuple[datetime, str, int, int, str]]:
    """Return the changes in the supervisor's log: time, pool, old and new size, and reason."""
    return [
        (datetime.fromisoformat(at), role, int(old), int(new), reason)
        for at, role, old, new, reason in CHANGE.findall(log)
    ]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    print(describe(), f"seed {options.seed}", flush=True)
    with local_cluster(settings=SETTINGS) as cluster:
        for users, factor in ((1, 1), (options.users // 4, 1), (options.users, 1), (1, 3)):
            send(cluster, users, factor * options.seconds, options.seed)
        found = changes(_log(cluster.home))
    result: dict[str, object] = {"benchmark": "autoscale_live", "seed": options.seed}
    for at, role, old, new, reason in found:
        print(f"{(at - found[0][0]).total_seconds():6.1f} s  {role} {old} to {new}: {reason}")
    for role in ("prefill", "decode"):
        own = [each for each in found if each[1] == role]
        kept = [
            (after[0] - before[0]).total_seconds()
            for before, after in pairwise(own)
            if before[3] > before[2] and after[3] < after[2]
        ]
        result[role] = {
            "up": sum(new > old for _, _, old, new, _ in own),
            "down": sum(new < old for _, _, old, new, _ in own),
            "kept_seconds": min(kept, default=None),
        }
    print(json.dumps(result))


def _log(home: Path) -> str:
    return "".join(path.read_text() for path in sorted(home.rglob("supervisor*.log")))


if __name__ == "__main__":
    main(sys.argv[1:])
