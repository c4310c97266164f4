"""Draws the plots of a benchmark run."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from baton.plots import plot_cdfs, plot_load
from load_generator.record import LatencyHistogram, RequestRecord

POINTS = 500
"""The number of points in a line that is drawn from a histogram."""

SECOND = 1.0


def draw_latencies(folder: Path, records: Sequence[RequestRecord], gaps: LatencyHistogram) -> None:
    """Write two plots: ``latency.png`` with the distributions of TTFT and inter-token latency, and
    ``time.png`` with the numbers of requests that arrived, were answered and failed in each
    second."""
    ttfts = [each.ttft_seconds for each in records if each.ttft_seconds is not None]
    plot_cdfs(folder / "latency.png", {"measured": (ttfts, gaps.sample_percentiles(POINTS))})
    lines = {
        "arrived per second": _per_second([each.scheduled_at for each in records]),
        "answered per second": _per_second([each.ended_at for each in records if each.ok]),
        "failed per second": _per_second([each.ended_at for each in records if not each.ok]),
    }
    plot_load(folder / "time.png", {name: line for name, line in lines.items() if line})


def _per_second(times: Sequence[float]) -> list[tuple[float, float]]:
    counts = Counter(int(time // SECOND) for time in times)
    if not counts:
        return []
    return [(at * SECOND, counts[at] / SECOND) for at in range(min(counts), max(counts) + 1)]
