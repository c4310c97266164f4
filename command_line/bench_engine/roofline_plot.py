"""A roofline plot (Williams et al., CACM 2009): measured FLOP/s by operational intensity."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from baton.engine.bench.bench_case_result import BenchCaseResult
from baton.engine.bench.ceilings import Ceilings
from baton.errors import Invalid
from baton.reports.plots import label_axes, open_figure

MARKERS = {"prefill": ("s", "tab:orange"), "decode": ("o", "tab:blue")}
AXIS_MARGIN = 2.0
"""The factor by which the axis extends beyond the points, at both ends."""


def check_plot_path(path: Path | None) -> None:
    """Raise Invalid if the plot can't be written. Call it before the measurement, which takes
    minutes."""
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise Invalid("--plot needs matplotlib: pip install 'baton[plots]'")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise Invalid(f"--plot {path}: {error.strerror}") from error


def draw_roofline(path: Path, figures: Sequence[BenchCaseResult], title: str) -> None:
    """Draw the measured figures in a plot with logarithmic axes. Raises Invalid when ``path`` can't
    be written, or has no suffix of an image format."""
    ceilings = figures[0].ceilings.wall
    with open_figure(path) as (axes,):
        _draw_roof(axes, figures, ceilings)
        for kind in MARKERS:
            _draw_points(axes, kind, [each for each in figures if each.case.kind == kind])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(title, fontsize="small")
        label_axes(axes, "operations for each byte (FLOP/byte)", "GFLOP/s")


def attainable_flops_per_second(intensity: float, ceilings: Ceilings) -> float:
    """Return the maximum FLOP/s at an operational ``intensity`` in FLOP/byte."""
    return min(ceilings.flops_per_second, intensity * ceilings.bytes_per_second)


def _draw_roof(axes: Any, figures: Sequence[BenchCaseResult], ceilings: Ceilings) -> None:
    ridge = ceilings.flops_per_second / ceilings.bytes_per_second
    found = [figure.demand.intensity for figure in figures]
    low, high = min(found) / AXIS_MARGIN, max(*found, ridge) * AXIS_MARGIN
    xs = np.geomspace(min(low, ridge / AXIS_MARGIN), high, 200)
    axes.plot(
        xs,
        [attainable_flops_per_second(x, ceilings) / 1e9 for x in xs],
        color="black",
        label=_label(ceilings),
    )


def _draw_points(axes: Any, kind: str, figures: Sequence[BenchCaseResult]) -> None:
    mark, color = MARKERS[kind]
    xs = [figure.demand.intensity for figure in figures]
    ys = [figure.flops_per_second / 1e9 for figure in figures]
    if figures:
        axes.plot(xs, ys, mark, color=color, label=kind)
    for figure, x, y in zip(figures, xs, ys, strict=True):
        text = f"{figure.case.batch} × {figure.case.context:,}: {figure.roofline_share:.0%}"
        axes.annotate(text, (x, y), textcoords="offset points", xytext=(5, -10), fontsize="x-small")


def _label(ceilings: Ceilings) -> str:
    flops, num_bytes = ceilings.flops_per_second / 1e9, ceilings.bytes_per_second / 1e9
    return f"this machine: {flops:,.0f} GFLOP/s, {num_bytes:,.1f} GB/s"
