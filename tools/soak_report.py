"""Sums up the journal of a long soak (:mod:`tools.long_soak`)."""

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MIN_MEASUREMENTS = 10
ALLOWED_GROWTH_MIB = 8.0
ALLOWED_DESCRIPTORS = 4
"""The growth that is allowed to a process within a piece. The memory allocator keeps some
freed pages, and connections are opened when they are first needed."""

SETTLE_SHARE = 0.2
"""The share of the measurements, from the first, that is left out, since caches fill."""


Entry = dict[str, Any]


def report(journal: Path) -> int:
    """Print how much the processes grew, and the totals. Return 1 if something is wrong, else 0."""
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    print(
        "piece process       cycles  own MiB first, last, growth  shared MiB  descriptors  threads"
    )
    grew = [_print_process(*item) for item in sorted(_by_process(entries).items())]
    for piece in sorted({entry["piece"] for entry in entries}):
        own = [entry for entry in entries if entry["piece"] == piece]
        files = [round(sum(entry["home_mib"].values())) for entry in own]
        print(f"piece {piece}: Redis keys {[entry['redis_keys'] for entry in own]}")
        print(f"piece {piece}: files in MiB {files}")
    totals = _totals(entries)
    ok = not any(grew) and not totals["wrong"]
    print(json.dumps({"ok": ok, **totals, "cycles": len(entries)}))
    return 0 if ok else 1


def _by_process(entries: Sequence[Entry]) -> dict[tuple[int, str, int], list[Entry]]:
    """Return the measurements of each process, by piece, name and process id."""
    series: dict[tuple[int, str, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        for usage in entry["processes"]:
            series[entry["piece"], usage["name"], usage["pid"]].append(usage)
    return series


def _print_process(process: tuple[int, str, int], usages: Sequence[Entry]) -> bool:
    """Print a line for a process that was measured often enough; return whether it grew."""
    if len(usages) < MIN_MEASUREMENTS:
        return False
    piece, name, _ = process
    grown = {
        kind: growth([usage[kind] for usage in usages])
        for kind in ("own_mib", "shared_mib", "descriptors", "threads")
    }
    grew = grown["own_mib"] > ALLOWED_GROWTH_MIB or grown["descriptors"] > ALLOWED_DESCRIPTORS
    print(
        f"{piece:5d} {name:12s} {len(usages):7d}  {usages[0]['own_mib']:7.1f} "
        f"{usages[-1]['own_mib']:7.1f} {grown['own_mib']:+7.1f}     {grown['shared_mib']:+10.1f} "
        f"{grown['descriptors']:+12.0f} {grown['threads']:+8.0f}{'  GREW' if grew else ''}"
    )
    return grew


def growth(sizes: Sequence[float]) -> float:
    """Return the median of the last fifth minus that of the first, without the first
    ``SETTLE_SHARE``."""
    settled = sizes[int(len(sizes) * SETTLE_SHARE) :]
    part = max(len(settled) // 5, 1)
    return statistics.median(settled[-part:]) - statistics.median(settled[:part])


def _totals(entries: Sequence[Entry]) -> dict[str, Any]:
    last = {entry["piece"]: entry for entry in entries}.values()
    names = ("seconds", "right", "wrong", "refused", "batch_lines")
    return {name: sum(entry[name] for entry in last) for name in names}
