"""Measure a quiet tenant's TTFT, alone and while another tenant floods the cluster.

    python -m benchmarks.tenants [--prefill N] [--decode M] [--rounds R] [--seconds S]

Runs a real cluster. The flooder sends ten times its limit of requests, from its own process, so
that the two tenants share only the cluster. The quiet tenant is measured, in turn, alone, beside a
tenant that stays within its limit, and during the flood. The flooder's requests within its limit
are served, and delay the quiet tenant as any others do; the rest of the flood is rejected, and
should not delay it. Prints a table, and JSON as the last line.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from baton.core.api_key import hash_api_key
from benchmarks.ttft_client import time_request
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import SYSTEM_CLOCK, describe

QUIET, FLOODER = "quiet-tenant-key-0000", "flooder-tenant-key-00"
FLOOD = 10
"""The flood's rate as a multiple of the tenant's limit."""

ARMS = {"alone": 0.0, "within": 0.9, "flood": float(FLOOD)}
"""The other tenant's rate in each arm, as a multiple of its limit."""

WARM_UP_SECONDS = 3.0

FIRST_MINUTE = 60 / (FLOOD - 1) + 1.0
"""Seconds until a flood has used up the burst that its limit allows, and is rejected."""

VOCABULARY = 400


def main() -> None:
    options = _options()
    with cluster_of(options.prefill, options.decode, limits(options.limit)) as cluster:
        figures = asyncio.run(_measure(cluster, options))
    report = {"benchmark": "tenants", "machine": describe(), "options": vars(options), **figures}
    _show(figures)
    print(json.dumps(report))


def limits(per_minute: int) -> dict[str, Any]:
    """Return the entries of the tenants file: the quiet tenant without a limit, and the flooder
    with a limit of ``per_minute`` requests."""
    return {
        "quiet": {"keys": [hash_api_key(QUIET)]},
        "flooder": {"keys": [hash_api_key(FLOODER)], "limits": {"requests_per_minute": per_minute}},
    }


@contextmanager
def cluster_of(prefill: int, decode: int, tenants: dict[str, Any]) -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="baton-tenants-") as folder:
        path = Path(folder) / "tenants.yaml"
        path.write_text(yaml.safe_dump({"tenants": tenants}))
        with local_cluster(None, prefill, decode, {"tenants_file": path}) as cluster:
            yield cluster


async def _measure(cluster: LocalCluster, options: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    statuses: dict[str, dict[str, int]] = {arm: {} for arm in ARMS}
    await _quiet(cluster.url, WARM_UP_SECONDS, options.quiet_rps, options.prompt_tokens, 0)
    for number, arm in enumerate(_order(options.rounds), start=1):
        rate = ARMS[arm] * options.limit / 60
        # Each arm has its own seed, since a prompt that was sent before would be cached.
        with _other(cluster.url, rate, options.flood_tokens, number) as counted:
            await asyncio.sleep(FIRST_MINUTE if arm == "flood" else WARM_UP_SECONDS)
            seconds[arm].append(
                await _quiet(
                    cluster.url, options.seconds, options.quiet_rps, options.prompt_tokens, number
                )
            )
        for status, count in counted().items():
            statuses[arm][status] = statuses[arm].get(status, 0) + count
    return _summary(seconds, statuses)


def _order(rounds: int) -> list[str]:
    """Return the names of the arms (those of :data:`ARMS`) in the order in which they run: each arm
    once per round, and each round begins one arm later than the previous round."""
    arms = list(ARMS)
    return [
        arms[(first + step) % len(arms)] for first in range(rounds) for step in range(len(arms))
    ]


async def _quiet(url: str, seconds: float, rate: float, num_tokens: int, seed: int) -> list[float]:
    """Send the quiet tenant's requests at even intervals (an open loop). Return the TTFT of
    each."""
    generator = np.random.default_rng([7, seed])
    began = SYSTEM_CLOCK()
    async with asyncio.TaskGroup() as tasks:
        requests = []
        for number in range(int(seconds * rate)):
            await asyncio.sleep(max(began + number / rate - SYSTEM_CLOCK(), 0))
            prompt = generator.integers(10, VOCABULARY, num_tokens).tolist()
            requests.append(tasks.create_task(time_request(url, QUIET, prompt, 4)))
    times = [task.result().ttft_seconds for task in requests]
    assert None not in times, "the quiet tenant was refused"
    return [each for each in times if each is not None]


@contextmanager
def _other(url: str, rate: float, num_tokens: int, seed: int) -> Iterator[Any]:
    """Send the other tenant's requests, beside those of the quiet tenant, from a process of their
    own while the ``with`` block runs. Yields a function that, after the block has ended, returns
    the number of the other tenant's responses by status."""
    statuses: dict[str, int] = {}
    if not rate:
        yield lambda: statuses
        return
    context = multiprocessing.get_context("spawn")
    ended, results = context.Event(), context.SimpleQueue()
    arguments = (url, rate, num_tokens, seed, ended, results)
    process = context.Process(target=_send_for_ever, args=arguments, daemon=True)
    process.start()
    try:
        yield lambda: statuses
    finally:
        ended.set()
        statuses.update(results.get())
        process.join()


def _send_for_ever(
    url: str, rate: float, num_tokens: int, seed: int, ended: Any, results: Any
) -> None:
    results.put(asyncio.run(_send(url, rate, num_tokens, seed, ended)))


async def _send(url: str, rate: float, num_tokens: int, seed: int, ended: Any) -> dict[str, int]:
    generator = np.random.default_rng([8, seed])
    began, number, requests = SYSTEM_CLOCK(), 0, []
    async with asyncio.TaskGroup() as tasks:
        while not ended.is_set():
            await asyncio.sleep(max(began + number / rate - SYSTEM_CLOCK(), 0))
            prompt = generator.integers(10, VOCABULARY, num_tokens).tolist()
            requests.append(tasks.create_task(time_request(url, FLOODER, prompt, 4)))
            number += 1
    statuses: dict[str, int] = {}
    for task in requests:
        status = str(task.result().status)
        statuses[status] = statuses.get(status, 0) + 1
    return statuses


def _summary(
    seconds: dict[str, list[list[float]]], statuses: dict[str, dict[str, int]]
) -> dict[str, Any]:
    """Summarize all arms, and compare the arm ``flood`` with the other arms. ``p99_ratio`` compares
    the p99 over all samples; ``median_p99_ratio`` is the median, over the rounds, of each round's
    own p99 ratio. If the two differ much, a few short disturbances are the cause: see
    ``p99_by_round``."""
    figures: dict[str, Any] = {}
    for arm, rounds in seconds.items():
        together = [each for one in rounds for each in one]
        p50, p99 = (float(np.percentile(together, q)) for q in (50, 99))
        figures[arm] = {
            "samples": len(together),
            "p50": p50,
            "p99": p99,
            "p99_by_round": [float(np.percentile(one, 99)) for one in rounds],
            "other": statuses[arm],
        }
    ratios = {
        f"flood_to_{arm}": {
            "p50_ratio": figures["flood"]["p50"] / figures[arm]["p50"],
            "p99_ratio": figures["flood"]["p99"] / figures[arm]["p99"],
            "median_p99_ratio": statistics.median(
                float(np.percentile(flood, 99) / np.percentile(other, 99))
                for flood, other in zip(seconds["flood"], seconds[arm], strict=True)
            ),
        }
        for arm in ("alone", "within")
    }
    return {"ttft_seconds": figures, **ratios}


def _show(figures: dict[str, Any]) -> None:
    print(f"{'':8} {'samples':>8} {'p50 ms':>8} {'p99 ms':>8}  the other tenant's answers")
    for arm, line in figures["ttft_seconds"].items():
        p50, p99 = 1000 * line["p50"], 1000 * line["p99"]
        print(f"{arm:8} {line['samples']:8} {p50:8.1f} {p99:8.1f}  {line['other']}")
        by_round = ", ".join(f"{1000 * each:.1f}" for each in line["p99_by_round"])
        print(f"{'':8} p99 of each round: {by_round}")
    for name in ("flood_to_alone", "flood_to_within"):
        ratios = ", ".join(f"{key} {value:.3f}" for key, value in figures[name].items())
        print(f"{name}: {ratios}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each arm of a round")
    parser.add_argument("--quiet-rps", type=float, default=5.0)
    parser.add_argument("--limit", type=int, default=60, help="of the flooder, per minute")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of the quiet tenant")
    parser.add_argument("--flood-tokens", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
