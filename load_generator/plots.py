"""A run's figures."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from baton.plots import plot_cdfs, plot_load
from load_generator.record import LatencyHistogram, RequestRecord

POINTS = 500
"""Of a line that is drawn from a histogram."""

SECOND = 1.0


def draw_latencies(folder: Path, records: Sequence[RequestRecord], gaps: LatencyHistogram) -> None:
    """``latency.png``: shares of requests by TTFT, of gaps by their length. ``time.png``: what came
    and what was answered in each second."""
    ttfts = [each.ttft_seconds for each in records if each.ttft_seconds is not None]
    plot_cdfs(folder / "latency.png", {"measured": (ttfts, gaps.sample(POINTS))})
    lines = {
        "arrived per second": _per_second([each.scheduled_at for each in records]),
        "answered per second": _per_second([each.ended_at for each in records if each.ok]),
        "failed per second": _per_second([each.ended_at for each in records if not each.ok]),
    }
    plot_load(folder / "time.png", {name: line for name, line in lines.items() if line})


def _per_second(moments: Sequence[float]) -> list[tuple[float, float]]:
    counts = Counter(int(moment // SECOND) for moment in moments)
    if not counts:
        return []
    return [(at * SECOND, counts[at] / SECOND) for at in range(min(counts), max(counts) + 1)]
