"""Measure one stream beside clients that want one token, and beside clients that want two.

    python -m benchmarks.one_token [--clients 6] [--tokens 970] [--tree DIR] [--seed 1]

The demo model on 1 + 1 workers. A stream of 400 tokens runs alone, then beside clients with
``max_tokens: 2``, then with ``max_tokens: 1``; each client sends one new prompt after the other.
Prompts never delay answers on a decode worker, so both kinds should cost the stream the same.
Prints a line each, and JSON as the last line. With ``--tree``, the cluster runs another version.
"""

import argparse
import json
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from baton.clock import SystemClock
from benchmarks.machine import describe, pause
from tools.local_cluster import LocalCluster, local_cluster

STREAM_TOKENS, WARM_UP_SECONDS = 400, 3.0


def time_stream(cluster: LocalCluster) -> dict[str, float]:
    """Return the seconds of the stream, and the percentiles of its gaps in milliseconds."""
    body = {"prompt": "def read(path):", "max_tokens": STREAM_TOKENS, "stream": True,
            "ignore_eos": True, "temperature": 0}  # fmt: skip
    request = urllib.request.Request(
        cluster.url + "/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    clock = SystemClock()
    began = clock.monotonic()
    with urllib.request.urlopen(request) as response:
        times = [clock.monotonic() for line in response if line.startswith(b"data: {")]
    gaps = np.diff(times) * 1e3
    return {
        "seconds": round(times[-1] - began, 2),
        **{f"gap_p{p}": round(float(np.percentile(gaps, p)), 1) for p in (50, 99)},
        "gap_max": round(float(gaps.max()), 1),
    }


def time_beside(cluster: LocalCluster, options: argparse.Namespace, max_tokens: int) -> Any:
    """Return the stream's times beside the clients, and how many requests they sent."""
    is_over, counts = threading.Event(), [0] * options.clients

    def send(number: int) -> None:
        chance = np.random.default_rng((options.seed, number, max_tokens))
        while not is_over.is_set():
            prompt = chance.integers(300, 3000, options.tokens).tolist()
            cluster.post("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens})
            counts[number] += 1

    threads = [threading.Thread(target=send, args=(n,)) for n in range(options.clients)]
    for thread in threads:
        thread.start()
    try:
        pause(WARM_UP_SECONDS)
        return {**time_stream(cluster), "requests": sum(counts)}
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=970)
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"machine": describe()}
    print(result["machine"], f"seed {options.seed}", flush=True)
    with local_cluster(tree=options.tree) as cluster:
        time_stream(cluster)
        result["alone"] = time_stream(cluster)
        for max_tokens in (2, 1):
            result[f"beside max_tokens {max_tokens}"] = time_beside(cluster, options, max_tokens)
    for name in list(result)[1:]:
        print(name, result[name])
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
