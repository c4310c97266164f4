"""Measure whether a tenant can learn from response times which prompts another tenant has sent.

    python -m benchmarks.tenant_timing [--trials N]

Runs a real cluster. In each trial the victim sends a prompt; the attacker then sends the same
prompt and a new one, in random order, and measures the TTFT. The area under the curve (AUC) is how
often the same prompt is answered sooner: 0.5 is chance, 1 is certainty. For contrast, the AUC is
also measured for a prompt that the attacker itself has sent before. Prints a table, and JSON as the
last line.
"""

import argparse
import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.core.api_key import hash_api_key
from benchmarks.tenants import VOCABULARY, cluster_of
from benchmarks.ttft_client import time_request
from testkit.machine import describe

VICTIM, ATTACKER = "victim-tenant-key-000", "attacker-tenant-key-0"
WARM_UP_TRIALS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tenants = {
        "victim": {"keys": [hash_api_key(VICTIM)]},
        "attacker": {"keys": [hash_api_key(ATTACKER)]},
    }
    with cluster_of(1, 1, tenants) as cluster:
        result = asyncio.run(_measure(cluster.url, options))
    for name, line in result.items():
        known, unknown = 1000 * line["known_median"], 1000 * line["unknown_median"]
        print(
            f"{name:12} AUC {line['auc']:.3f} ± {line['standard_error']:.3f}   medians "
            f"{known:.1f} ms (sent before), {unknown:.1f} ms (new)"
        )
    report = {"benchmark": "tenant_timing", "machine": describe(), "options": vars(options)}
    print(json.dumps({**report, **result}))


async def _measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run trials, alternating between another tenant's prompts and the attacker's own."""
    generator = np.random.default_rng(options.seed)
    seconds: dict[str, tuple[list[float], list[float]]] = {
        "another's": ([], []),
        "one's own": ([], []),
    }
    for number in range(-WARM_UP_TRIALS, options.trials):
        for name, first_key in (("another's", VICTIM), ("one's own", ATTACKER)):
            known, new = generator.integers(10, VOCABULARY, (2, options.prompt_tokens)).tolist()
            await time_request(url, first_key, known, 1)
            known_seconds, new_seconds = await _probe(url, known, new, bool(generator.integers(2)))
            if number >= 0:
                seconds[name][0].append(known_seconds)
                seconds[name][1].append(new_seconds)
    return {name: summary(*both) for name, both in seconds.items()}


async def _probe(
    url: str, known: list[int], new: list[int], known_first: bool
) -> tuple[float, float]:
    times: dict[bool, float] = {}
    for is_known in (known_first, not known_first):
        timing = await time_request(url, ATTACKER, known if is_known else new, 1)
        assert timing.ttft_seconds is not None, f"refused with {timing.status}"
        times[is_known] = timing.ttft_seconds
    return times[True], times[False]


def summary(known: Sequence[float], new: Sequence[float]) -> dict[str, float]:
    """Return how well the times tell known prompts from new ones. ``sooner`` is the AUC if shorter
    times are taken as known; ``auc`` is the greater of it and ``1 - sooner``, since an attacker
    would choose the better direction. ``standard_error`` is that of the AUC under the null
    hypothesis (Hanley and McNeil 1982). Medians are in seconds."""
    raw = auc(known, new)
    count = len(known)
    return {
        "auc": max(raw, 1 - raw),
        "sooner": raw,
        "standard_error": math.sqrt((2 * count + 1) / (12 * count * count)),
        "known_median": float(np.median(known)),
        "unknown_median": float(np.median(new)),
    }


def auc(known: Sequence[float], new: Sequence[float]) -> float:
    """Return the share of pairs in which the value from ``known`` is less than the value from
    ``new``; a tie counts half (Mann-Whitney U)."""
    one, other = np.asarray(known)[:, None], np.asarray(new)[None, :]
    return float(np.mean((one < other) + 0.5 * (one == other)))


if __name__ == "__main__":
    main()
