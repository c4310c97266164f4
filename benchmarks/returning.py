"""Count how many prompts leave the prefill worker that has their prefix, on a running cluster.

    python -m benchmarks.returning [--prefill 4] [--prefixes 100] [--passes 4] [--seed 1]
        [--tree DIR]

The demo model, one request at a time, in passes over the same prompts in a new order. Then the
conductor is frozen for a pass. Then one prefill worker is killed for a pass, and after its return
there is another one. Prints a line per pass, and JSON as the last line. Nothing should ever move,
except, after the kill, the prompts of the killed worker.
"""

import argparse
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.machine import describe
from tools.local_cluster import LocalCluster, local_cluster


def run_pass(cluster: LocalCluster, prompts: list[list[int]], seed: int) -> list[str]:
    """Send all prompts in a new order; return the worker that computed each."""
    workers = [""] * len(prompts)
    for number in np.random.default_rng(seed).permutation(len(prompts)):
        body = {"prompt": prompts[number], "max_tokens": 2}
        headers = cluster.post_with_headers("/v1/completions", body)[1]
        workers[number] = headers["x-baton-prefill"]
    return workers


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--prefixes", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=140)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tree", type=Path, help="source of another version to run")
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine, f"seed {options.seed}", flush=True)
    shape = options.prefixes, options.tokens
    prompts = np.random.default_rng(options.seed).integers(300, 3000, shape).tolist()
    result: dict[str, object] = {"machine": machine, **vars(options), "tree": str(options.tree)}
    with local_cluster(prefill=options.prefill, tree=options.tree) as cluster:
        before: list[str] = []

        def show(name: str, number: int) -> None:
            nonlocal before
            now = run_pass(cluster, prompts, options.seed + number)
            moved = [(a, b) for a, b in zip(before, now, strict=False) if a != b]
            print(
                f"{name}: {len(moved)} of {len(now)} moved, {dict(sorted(Counter(now).items()))}",
                f"from {dict(sorted(Counter(a for a, _ in moved).items()))}" if moved else "",
                flush=True,
            )
            result[name] = len(moved)
            before = now

        for number in range(options.passes):
            show(f"pass {number + 1}", number)
        kept = before
        (conductor,) = cluster.processes("conductor")
        os.kill(conductor["pid"], signal.SIGSTOP)
        show("without a conductor", 100)
        os.kill(conductor["pid"], signal.SIGCONT)
        before = kept
        show("with it again", 101)
        victim = cluster.processes("prefill")[0]
        os.kill(victim["pid"], signal.SIGKILL)
        show(f"after a kill of {victim['id']}", 102)
        cluster.wait_until_ready()
        show("after its return", 103)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
