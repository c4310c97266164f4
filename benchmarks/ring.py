"""Measure the hash ring's balance and stability, with bounded loads and with shared prefixes.

    python -m benchmarks.ring [--keys 1000000] [--trace FILE]

Prints a table, and JSON as the last line. With a trace, its requests (all of which may share their
first block) are placed by the ring alone, with the same key as in the conductor.
"""

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import WorkerId
from baton.hash_ring import ring_successors
from baton.traces.files import read_trace
from benchmarks.machine import describe
from conductor.policy.baselines import CHWBL_LOAD_FACTOR, chwbl
from conductor.policy.candidates import ring_key
from conductor.policy.snapshot import (
    DecodeView,
    LinkSpeed,
    PolicyQuery,
    PrefillView,
    Snapshot,
    WorkerPool,
)
from simulator.caches import SimulatedCaches

WORKERS = tuple(sorted(f"worker-{number}" for number in range(16)))
COST = PrefillCost(0.0, 1e-4, 0.0)


def firsts(ids: tuple[str, ...], num_keys: int) -> list[str]:
    return [next(ring_successors(ids, number.to_bytes(8, "little"))) for number in range(num_keys)]


def evenness(num_keys: int) -> dict[str, Any]:
    """Measure the load of each of 16 workers, and how many keys move when a worker leaves or
    joins."""
    before = firsts(WORKERS, num_keys)
    loads = Counter(before)
    fewer = firsts(WORKERS[:-1], num_keys)
    more = firsts(tuple(sorted((*WORKERS, "worker-new"))), num_keys)
    moved = {
        "leave": sum(a != b for a, b in zip(before, fewer, strict=True)),
        "join": sum(a != b for a, b in zip(before, more, strict=True)),
    }
    counts = [loads[worker] for worker in WORKERS]
    return {
        "cv": statistics.pstdev(counts) / statistics.fmean(counts),
        "leave_moves": moved["leave"] / (num_keys / len(WORKERS)),
        "join_moves": moved["join"] / (num_keys / (len(WORKERS) + 1)),
    }


def bounded(num_requests: int) -> dict[str, Any]:
    """Place requests that all share one prefix and never end, which is the worst case for bounded
    loads."""
    views = [PrefillView(WorkerId(worker), COST, worker) for worker in WORKERS]
    pool, most = WorkerPool(views), 0.0
    caches = SimulatedCaches({view.id: view.node for view in views}, [], 1, 1)
    decodes = decode_pool()
    for number in range(num_requests):
        snapshot = Snapshot(0.0, number, pool, decodes, caches, 16, 1, LinkSpeed(1e9, 1e9))
        chosen = chwbl(snapshot, PolicyQuery(f"r{number}", 100, 16, (b"head",))).prefill
        assert chosen is not None
        view = pool.take_for_update(chosen)
        view.num_requests += 1
        pool.put(view)
        mean = (number + 1) / len(WORKERS)
        most = max(most, view.num_requests / math.ceil(CHWBL_LOAD_FACTOR * mean))
    return {"largest_over_bound": most, "largest_over_mean": most_loaded(pool)}


def most_loaded(pool: WorkerPool[PrefillView]) -> float:
    loads = [view.num_requests for view in pool]
    return max(loads) / statistics.fmean(loads)


def decode_pool() -> WorkerPool[DecodeView]:
    return WorkerPool([DecodeView(WorkerId("decode"), DecodeCost(0.01, 0.0, 0.0), 1 << 30)])


def trace_imbalance(path: Path) -> dict[str, Any]:
    """Place a real trace's requests by the ring's key and, for comparison, by their first block
    alone, which many requests may share. For each, return the number of requests on the busiest
    worker, divided by the mean."""
    trace = read_trace(path)
    views = [PrefillView(WorkerId(worker), COST, worker) for worker in WORKERS]
    pool = WorkerPool(views)
    caches = SimulatedCaches({view.id: view.node for view in views}, [], 1, 1)
    snapshot = Snapshot(0.0, 0, pool, decode_pool(), caches, 512, 1, LinkSpeed(1e9, 1e9))
    by_key: Counter[str] = Counter()
    by_first_block: Counter[str] = Counter()
    query = PolicyQuery("", 1, 1, ())
    for number, arrival in enumerate(trace.requests):
        query = replace(query, request_id=f"r{number}", keys=arrival.block_ids)
        by_key[next(ring_successors(WORKERS, ring_key(snapshot, query)))] += 1
        by_first_block[next(ring_successors(WORKERS, str(arrival.block_ids[0]).encode()))] += 1
        caches.record_request(arrival.block_ids)
    mean = len(trace.requests) / len(WORKERS)
    return {
        "imbalance": max(by_key.values()) / mean,
        "imbalance_by_first_block": max(by_first_block.values()) / mean,
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    result: dict[str, Any] = {"machine": machine, **evenness(options.keys)}
    print(f"16 workers, {options.keys:,} keys: CV of load {result['cv']:.3f} (aim 0.07)")
    for event in ("leave", "join"):
        print(f"one {event}s: {result[f'{event}_moves']:.3f} of K/N keys move (aim 1.1)")
    result["bounded"] = bounded(20_000)
    print(
        f"bounded loads: never above {result['bounded']['largest_over_bound']:.3f} of the bound, "
        f"at the end {result['bounded']['largest_over_mean']:.3f} of the mean "
        f"(bound {CHWBL_LOAD_FACTOR}, rounded up)"
    )
    if options.trace:
        result["shared"] = trace_imbalance(options.trace)
        print(
            f"{options.trace.name}: busiest worker over mean {result['shared']['imbalance']:.2f} "
            f"(aim 1.3); by the first block {result['shared']['imbalance_by_first_block']:.2f}"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
