"""Resize the pools under load, and check that no answer fails or changes.

    python -m tools.resize [--on local] [--grow 3,3] [--shrink 1,2] [--streams 12]
        [--seed 1]

While answers stream, ``baton scale`` resizes the pools from 1 prefill and 1 decode worker to the
sizes of ``--grow``, and then to those of ``--shrink``. Every token is compared with the answer of
the undisturbed cluster. Prints how long it took for a new worker to start serving, the longest
inter-token latency, and JSON as the last line. Exits with 1 if an answer failed or differs. The
dtype is float32, in which an answer does not depend on the other answers of a batch.
"""

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from testkit.local_cluster import (
    LocalCluster,
    local_cluster,
)
from testkit.machine import SYSTEM_CLOCK, describe
from testkit.streams import (
    CompletionCase,
    StreamedAnswer,
    make_request_bodies,
    record_answers,
    stream_completion,
    traffic,
)

SHORTEST, LONGEST = 40, 150
ROLES = ("prefill", "decode")
PROBE_SECONDS = 60.0
"""The timeout until a new worker of each role has served a request."""


@dataclass
class Probe:
    """Sends short requests until, for each role, a worker that is not in ``known`` has served one.
    ``served`` is the time of that request by role, in seconds since ``began``."""

    cluster: LocalCluster
    known: set[str]
    began: float = field(default_factory=SYSTEM_CLOCK)
    served: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        chance = np.random.default_rng(len(self.known))
        while len(self.served) < len(ROLES) and self._seconds() < PROBE_SECONDS:
            prompt = chance.integers(3, 4000, size=64).tolist()
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            _, headers = self.cluster.post_with_headers("/v1/completions", body)
            for role in ROLES:
                if headers.get(f"x-baton-{role}", "") not in self.known | {""}:
                    self.served.setdefault(role, self._seconds())

    def _seconds(self) -> float:
        return SYSTEM_CLOCK() - self.began


def scale(cluster: LocalCluster, sizes: dict[str, int]) -> float:
    """Run ``baton scale``; return the seconds that it took. Raises RuntimeError when it failed."""
    began = SYSTEM_CLOCK()
    done = cluster.baton("scale", *(f"{role}={n}" for role, n in sizes.items()), check=False)
    seconds = SYSTEM_CLOCK() - began
    print(f"baton scale {sizes}, {seconds:.1f} s:\n{done.stdout}{done.stderr}".rstrip())
    if done.returncode != 0:
        raise RuntimeError(f"baton scale failed: {done.stderr}")
    return seconds


def workers(cluster: LocalCluster) -> set[str]:
    return {entry["id"] for role in ROLES for entry in cluster.processes(role)}


def pool_sizes(text: str) -> dict[str, int]:
    """Parse the sizes of the pools: ``3,2`` means 3 prefill and 2 decode workers."""
    return dict(zip(ROLES, map(int, text.split(",")), strict=True))


def resize_pools(
    cluster: LocalCluster, grown: dict[str, int], shrunk: dict[str, int]
) -> dict[str, Any]:
    """Grow the pools, wait until a new worker of each role has served, and shrink them."""
    probe = Probe(cluster, workers(cluster))
    probing = threading.Thread(target=probe.run)
    probing.start()
    grow = scale(cluster, grown)
    probing.join()
    shrink = scale(cluster, shrunk)
    return {
        "grow_seconds": grow,
        "first_served_seconds": probe.served,
        "shrink_seconds": shrink,
        "seconds": SYSTEM_CLOCK() - probe.began,
        "workers": sorted(workers(cluster)),
    }


def gap_percentiles(answers: Sequence[StreamedAnswer]) -> dict[str, float]:
    """Return percentiles of the answers' longest inter-token latencies, in seconds."""
    found = [answer.max_inter_token_seconds for answer in answers]
    return {
        "p50": float(np.percentile(found, 50)),
        "p99": float(np.percentile(found, 99)),
        "max": max(found),
    }


def collect_answers(
    url: str, questions: Sequence[CompletionCase], at_once: int
) -> list[StreamedAnswer]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda question: stream_completion(url, question), questions))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--on", choices=["local", "ray"], default="local")
    parser.add_argument("--grow", type=pool_sizes, default="3,3")
    parser.add_argument("--shrink", type=pool_sizes, default="1,2")
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--questions", type=int, default=36)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    print(describe())
    print(f"seed {options.seed}")
    bodies = make_request_bodies(options.questions, options.seed, SHORTEST, LONGEST)
    settings = {"on": options.on, "dtype": "float32"}
    with local_cluster(settings=settings) as cluster:
        questions = record_answers(cluster.url, bodies, options.streams)
        before = collect_answers(cluster.url, questions, options.streams)
        with traffic(cluster.url, questions, options.streams) as answers:
            result = resize_pools(cluster, options.grow, options.shrink)
        check = cluster.baton("check", check=False)
    failed = [answer.error for answer in answers if answer.error]
    changed = sum(not answer.is_right for answer in [*before, *answers]) - len(failed)
    for error in failed:
        print(f"failed: {error}")
    sound = check.returncode == 0
    result |= {
        "on": options.on,
        "seed": options.seed,
        "answers": len(answers),
        "failed": len(failed),
        "changed": changed,
        "sound": sound,
        "gap_seconds": gap_percentiles(answers),
        "undisturbed_gap_seconds": gap_percentiles(before),
    }
    ok = not failed and not changed and sound and len(result["first_served_seconds"]) == len(ROLES)
    print(
        f"{len(answers)} answers: {len(failed)} failed, {changed} changed; resized twice in "
        f"{result['seconds']:.1f} s; longest gap p50 {result['gap_seconds']['p50']:.2f} s, "
        f"p99 {result['gap_seconds']['p99']:.2f} s"
    )
    print(json.dumps({"ok": ok, **result}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
