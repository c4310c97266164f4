"""``baton plan --pareto`` sweeps configurations over rates, and writes the trade-off between
throughput per GPU and speed per user as data and figure."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from baton.clock import Clock
from baton.errors import Invalid
from baton.reports.plots import Place, plot_pareto
from simulator.hardware import get_gpu
from simulator.pareto import ParetoReport, mark_frontier, pareto_point
from simulator.running_costs import RunningCosts
from simulator.scenario import Traffic
from simulator.simulated_hardware import SimulatedHardware
from simulator.simulation_pool import SimulationPool
from simulator.sweep import SweptConfiguration, rates_up_to, sweep

LINE_SECONDS = 10.0
"""Time between two lines of progress, if stderr is not a terminal."""


@dataclass
class SweepProgress:
    """Says which simulation runs, and about how long the rest takes: ``show`` gets each text, for a
    terminal's status line, and stderr a line from time to time if it is not a terminal."""

    total: int
    show: Callable[[str], None]
    clock: Clock
    _started_seconds: float = field(init=False)
    _written_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_seconds = self._written_seconds = self.clock.monotonic()

    def __call__(self, done: int, text: str) -> None:
        now = self.clock.monotonic()
        rest = remaining_seconds(done, self.total, now - self._started_seconds)
        left = "" if rest is None else f", about {_format_seconds(rest)} left"
        line = f"{text}: {done + 1} of {self.total}{left}"
        self.show(line)
        if not sys.stderr.isatty() and now - self._written_seconds >= LINE_SECONDS:
            self._written_seconds = now
            print(f"simulating {line}", file=sys.stderr)


def remaining_seconds(done: int, total: int, elapsed_seconds: float) -> float | None:
    """Estimate the remaining time, if simulations take as long as they did on average; None before
    the first one is done."""
    return elapsed_seconds / done * (total - done) if done else None


@dataclass(frozen=True)
class ParetoSweep:
    """What ``baton plan --pareto FOLDER`` sweeps: configurations, up to ``highest_rps``."""

    folder: Path
    traffic: Traffic
    hardware: SimulatedHardware
    num_gpus: int
    target: float
    costs: RunningCosts
    highest_rps: float

    def run(
        self,
        configurations: Sequence[SweptConfiguration],
        pool: SimulationPool,
        show: Callable[[str], None],
        clock: Clock,
    ) -> None:
        """Simulate the configurations in ``pool``, and write the files."""
        rates = rates_up_to(self.highest_rps)
        progress = SweepProgress(len(configurations) * len(rates), show, clock)
        evaluate = partial(pareto_point, self.target, self.costs)
        points = sweep(configurations, pool, rates, self.target, progress, evaluate)
        report = ParetoReport(
            about=self._about(),
            target=self.target,
            ttft_seconds=self.hardware.ttft_slo,
            itl_seconds=self.hardware.tbt_slo,
            costs=self.costs,
            points=mark_frontier([point for point in points if point is not None]),
        )
        _write_text(self.folder / "pareto.json", json.dumps(report.as_dict()) + "\n")
        draw_report(report, self.folder)

    def _about(self) -> dict[str, object]:
        trace, costs = self.traffic.trace_at_requested_rate, self.hardware.costs
        return {
            "model": self.hardware.model,
            "gpu": get_gpu(self.hardware.gpu).name,
            "num_gpus": self.num_gpus,
            "traffic": self.traffic.kind or trace.name,
            "num_requests": len(trace.requests),
            "seed": self.traffic.seed,
            "costs": "costs from the GPU's datasheet" if costs is None else f"costs: {costs.name}",
            "highest_rps": self.highest_rps,
        }


def draw_report(report: ParetoReport, folder: Path) -> None:
    """Write the points that meet the target to ``pareto.png`` and ``pareto.svg``. Raises Invalid if
    matplotlib is not installed or a file can't be written."""
    about = report.about
    title = (
        f"{about['model']} on {about['num_gpus']} × {about['gpu']}; {about['traffic']}, "
        f"{about['num_requests']:,} requests; {report.target:.0%} within TTFT ≤ "
        f"{report.ttft_seconds:g} s + prefill and ITL ≤ {report.itl_seconds * 1000:g} ms; "
        f"simulated, {about['costs']}"
    )
    kinds: dict[str, dict[Place, str]] = {}
    for point in report.points:
        if point.meets_target:
            label = f"{point.label} at {point.rate_rps:.3g}/s"
            kinds.setdefault(point.kind, {})[point.place] = label
    for suffix in ("png", "svg"):
        plot_pareto(folder / f"pareto.{suffix}", kinds, title)


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Invalid(f"{path}: cannot be written: {error.strerror}") from error


def _format_seconds(seconds: float) -> str:
    return f"{math.ceil(seconds)} s" if seconds < 90 else f"{math.ceil(seconds / 60)} min"
