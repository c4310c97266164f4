"""Measure the conductor's mirror of the KV index with ten million blocks.

Look-up, insertion, removal, growth and memory are measured.

    python -m benchmarks.mirror [--keys N]

Chains of 8,192 keys are made by a seeded generator. Prints JSON as the last line.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence

import numpy as np

from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.store import Tier, WatchEvent
from benchmarks.machine import SYSTEM_CLOCK, describe
from conductor.store_mirror import StoreMirror

CHAIN = 8192
PAGE = 8192
LOOK_UPS = 1000
KEPT = 64
"""The number of chains that are looked up in turn: so many that not all reads hit a CPU cache."""


def chains(seed: int, count: int) -> list[BlockKey]:
    """Return the keys of ``count`` random chains of CHAIN keys each, one chain after the other. The
    same seed gives the same keys."""
    chance = np.random.default_rng(seed)
    raw = chance.integers(256, size=(count * CHAIN, 16), dtype=np.uint8).tobytes()
    return [BlockKey(raw[start : start + 16]) for start in range(0, len(raw), 16)]


def fill(
    mirror: StoreMirror, nodes: Sequence[WorkerId], num_keys: int
) -> tuple[list[tuple[WorkerId, list[BlockKey]]], list[float]]:
    """Insert chains into the mirror, in watch events (pages) of PAGE keys each. Return about KEPT
    of the chains, each with its store node, and the seconds that the mirror took for each page."""
    kept: list[tuple[WorkerId, list[BlockKey]]] = []
    times = []
    num_pages = max(1, round(num_keys / len(nodes) / PAGE))
    every = max(1, num_pages * len(nodes) // KEPT)
    for index, node in enumerate(nodes):
        for number in range(num_pages):
            keys = chains(1 + index * num_pages + number, PAGE // CHAIN)
            if (index * num_pages + number) % every == 0:
                kept.append((node, keys[:CHAIN]))
            page = WatchEvent(Incarnation(1), number, Tier.DRAM, tuple(keys), is_reset=number == 0)
            times.append(apply_seconds(mirror, node, page))
    return kept, times


def remove_chains(mirror: StoreMirror, kept: Sequence[tuple[WorkerId, list[BlockKey]]]) -> float:
    """Remove the chains in ``kept``; return the seconds per million keys."""
    total = 0.0
    for node, keys in kept:
        _, number = mirror.position(node)
        page = WatchEvent(Incarnation(1), number + 1, Tier.NONE, tuple(keys), is_reset=False)
        total += apply_seconds(mirror, node, page)
    return total / (len(kept) * CHAIN) * 1e6


def look_up(
    mirror: StoreMirror, queries: Sequence[Sequence[BlockKey]], expected: int
) -> tuple[float, float]:
    """Look up one of ``queries`` at a time, LOOK_UPS times in total. Every look-up must find a
    prefix of ``expected`` blocks. Return the median and 99th percentile of the time, in
    microseconds."""
    times = []
    for turn in range(LOOK_UPS):
        keys = queries[turn % len(queries)]
        began = SYSTEM_CLOCK()
        hint = mirror.best_node(keys)
        times.append(SYSTEM_CLOCK() - began)
        assert (hint.num_blocks if hint else 0) == expected
    return statistics.median(times) * 1e6, statistics.quantiles(times, n=100)[98] * 1e6


def apply_seconds(mirror: StoreMirror, node: WorkerId, page: WatchEvent) -> float:
    began = SYSTEM_CLOCK()
    assert mirror.apply(node, page)
    return SYSTEM_CLOCK() - began


def measure(num_nodes: int, num_keys: int) -> dict[str, float]:
    mirror = StoreMirror()
    nodes = [WorkerId(f"node-{index:02}") for index in range(num_nodes)]
    kept, times = fill(mirror, nodes, num_keys)
    num_blocks = mirror.num_blocks
    row: dict[str, float] = {
        "nodes": num_nodes,
        "blocks": num_blocks,
        "bytes_per_block": sum(v.table.size_bytes for v in mirror._contents.values()) / num_blocks,
        "seconds_per_million_inserted": sum(times) / num_blocks * 1e6,
        "longest_pause_seconds": max(times),
    }
    held = [keys for _, keys in kept]
    unknown = [chains(10**9 + number, 1) for number in range(len(held))]
    pairs = zip(held, unknown, strict=True)
    half = [[*keys[: CHAIN // 2], *other[CHAIN // 2 :]] for keys, other in pairs]
    for name, queries, expected in (
        ("hit", held, CHAIN),
        ("half", half, CHAIN // 2),
        ("miss", unknown, 0),
    ):
        row[f"{name}_us"], row[f"{name}_p99_us"] = look_up(mirror, queries, expected)
    row["seconds_per_million_removed"] = remove_chains(mirror, kept)
    assert mirror.num_blocks == num_blocks - len(kept) * CHAIN
    return row


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keys", type=int, default=10_000_000)
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    rows = []
    for num_nodes in (1, 4, 16):
        row = measure(num_nodes, options.keys)
        rows.append(row)
        print(
            f"{num_nodes:3} nodes, {row['blocks']:,} blocks: "
            f"{row['bytes_per_block']:.1f} bytes each; chain of {CHAIN}: "
            f"hit {row['hit_us']:.0f} us (p99 {row['hit_p99_us']:.0f}), "
            f"half {row['half_us']:.0f} ({row['half_p99_us']:.0f}), "
            f"miss {row['miss_us']:.0f} ({row['miss_p99_us']:.0f}); "
            f"insert {row['seconds_per_million_inserted']:.2f} s per million, longest pause "
            f"{row['longest_pause_seconds']:.2f} s, remove "
            f"{row['seconds_per_million_removed']:.2f} s per million",
            flush=True,
        )
    print(json.dumps({"machine": machine, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
