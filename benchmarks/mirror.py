"""The conductor's mirror with ten million blocks: look-up, growth, memory.

    python -m benchmarks.mirror [--keys N]

Chains of 8,192 keys are made by a seeded generator. Prints JSON as the last line.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence

import numpy as np

from baton.core.ids import BlockKey, Generation, WorkerId
from baton.core.store import Tier, WatchPage
from benchmarks.machine import SYSTEM_CLOCK, describe
from conductor.mirror import Mirror

CHAIN = 8192
PAGE = 8192
LOOK_UPS = 1000


def chains(first: int, count: int) -> list[BlockKey]:
    """``count`` chains of CHAIN keys, the same for the same numbers."""
    chance = np.random.default_rng(first)
    raw = chance.integers(256, size=(count * CHAIN, 16), dtype=np.uint8).tobytes()
    return [BlockKey(raw[start : start + 16]) for start in range(0, len(raw), 16)]


def fill(mirror: Mirror, node: WorkerId, num_keys: int) -> tuple[list[BlockKey], list[float]]:
    """A chain that it holds, and the seconds that each page took."""
    held: list[BlockKey] = []
    times = []
    for number, first in enumerate(range(0, num_keys, PAGE)):
        keys = chains(int(node[-2:]) * 10**8 + first, PAGE // CHAIN)
        held = keys[:CHAIN]
        reset = first == 0
        page = WatchPage(Generation(1), number, Tier.DRAM, tuple(keys), reset=reset)
        began = SYSTEM_CLOCK()
        assert mirror.apply(node, page)
        times.append(SYSTEM_CLOCK() - began)
    return held, times


def look_up(mirror: Mirror, keys: Sequence[BlockKey], expected: int) -> tuple[float, float]:
    """Median and 99th percentile, in microseconds."""
    times = []
    for _ in range(LOOK_UPS):
        began = SYSTEM_CLOCK()
        hint = mirror.best(keys)
        times.append(SYSTEM_CLOCK() - began)
        assert (hint.num_blocks if hint else 0) == expected
    return statistics.median(times) * 1e6, statistics.quantiles(times, n=100)[98] * 1e6


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keys", type=int, default=10_000_000)
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    rows = []
    for num_nodes in (1, 4, 16):
        mirror = Mirror()
        nodes = [WorkerId(f"node-{index:02}") for index in range(num_nodes)]
        times: list[float] = []
        held: list[BlockKey] = []
        for node in nodes:
            held, some = fill(mirror, node, options.keys // num_nodes)
            times += some
        size = sum(view.table.size_bytes for view in mirror._views.values())
        row = {
            "nodes": num_nodes,
            "blocks": mirror.num_blocks,
            "bytes_per_block": size / mirror.num_blocks,
            "seconds_per_million_inserted": sum(times) / mirror.num_blocks * 1e6,
            "longest_pause_seconds": max(times),
        }
        half = [*held[: CHAIN // 2], *chains(7, 1)[CHAIN // 2 :]]
        for name, keys, expected in (
            ("hit", held, CHAIN),
            ("half", half, CHAIN // 2),
            ("miss", chains(7, 1), 0),
        ):
            row[f"{name}_us"], row[f"{name}_p99_us"] = look_up(mirror, keys, expected)
        view = mirror._views[nodes[-1]]
        began = SYSTEM_CLOCK()
        view.table.remove(held)
        row["seconds_per_million_removed"] = (SYSTEM_CLOCK() - began) / len(held) * 1e6
        rows.append(row)
        print(
            f"{num_nodes:3} nodes, {row['blocks']:,} blocks: "
            f"{row['bytes_per_block']:.1f} bytes each; chain of {CHAIN}: "
            f"hit {row['hit_us']:.0f} us (p99 {row['hit_p99_us']:.0f}), "
            f"half {row['half_us']:.0f}, miss {row['miss_us']:.0f}; "
            f"insert {row['seconds_per_million_inserted']:.2f} s per million, longest pause "
            f"{row['longest_pause_seconds']:.2f} s, remove "
            f"{row['seconds_per_million_removed']:.2f} s per million",
            flush=True,
        )
    print(json.dumps({"machine": machine, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
