"""``baton plan --pareto`` sweeps configurations over rates, and writes the trade-off between
throughput per GPU and speed per user as data, figure and page."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from baton.clock import Clock
from baton.errors import Invalid
from command_line.deployment_hint import (
    deployment_note,
    expert_note,
    helm_values,
    up_command,
)
from command_line.pareto_figure import draw_figure
from command_line.pareto_page import render_page
from simulator.hardware import get_gpu
from simulator.pareto import ParetoReport, Slo, mark_frontiers, pareto_point, stricter_slos
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
    ) -> ParetoReport:
        """Simulate the configurations in ``pool``, and write the files."""
        rates = rates_up_to(self.highest_rps)
        slos = stricter_slos(self._slo)
        progress = SweepProgress(len(configurations) * len(rates), show, clock)
        evaluate = partial(pareto_point, slos, self.target, self.costs)
        points = sweep(configurations, pool, rates, self.target, progress, evaluate)
        report = ParetoReport(
            about=self._about(),
            target=self.target,
            costs=self.costs,
            slos=slos,
            deployments={each.label: self._deployment(each) for each in configurations},
            points=mark_frontiers([point for point in points if point is not None]),
        )
        self._write(report)
        return report

    @property
    def _slo(self) -> Slo:
        return Slo(self.hardware.ttft_slo, self.hardware.tbt_slo)

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

    def _deployment(self, configuration: SweptConfiguration) -> dict[str, str | None]:
        workers, pools = configuration.workers, configuration.parallelism
        slo = (self._slo.ttft_seconds, self._slo.itl_seconds)
        notes = filter(None, (expert_note(workers, pools), deployment_note(workers, pools)))
        return {
            "up": up_command(workers, pools, slo),
            "helm_values": helm_values(workers, pools, slo),
            "note": ". ".join(notes) or None,
        }

    def _write(self, report: ParetoReport) -> None:
        about = report.about
        title = (
            f"{about['model']} on {about['num_gpus']} × {about['gpu']}: tokens per second per GPU "
            "against per user"
        )
        subtitle = (
            f"{about['traffic']}, {about['num_requests']:,} requests, seed {about['seed']}.  SLO "
            f"for {self.target:.0%}: TTFT ≤ {self._slo.ttft_seconds:g} s + prompt's prefill, ITL ≤ "
            f"{self._slo.itl_seconds * 1000:g} ms.  Simulated, {about['costs']}."
        )
        as_dict = report.as_dict()
        _write_text(self.folder / "pareto.json", json.dumps(as_dict) + "\n")
        _write_text(self.folder / "pareto.html", render_page(as_dict, title))
        draw_figure(report, self.folder, title, subtitle)


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Invalid(f"{path}: cannot be written: {error.strerror}") from error


def _format_seconds(seconds: float) -> str:
    return f"{math.ceil(seconds)} s" if seconds < 90 else f"{math.ceil(seconds / 60)} min"
