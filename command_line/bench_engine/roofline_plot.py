"""A roofline (Williams et al., CACM 2009): what was reached, by operations for each byte."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from baton.engine.bench.bench_result import BenchResult
from baton.engine.bench.ceilings import Ceilings
from baton.errors import Invalid
from baton.plots import figure_in, label_axes

MARKS = {"prefill": ("s", "tab:orange"), "decode": ("o", "tab:blue")}
MARGIN = 2.0
"""The figure goes so many times beyond its points, each way."""


def check_plot_path(path: Path | None) -> None:
    """Raises Invalid before minutes of measuring, not after."""
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise Invalid("--plot needs matplotlib: pip install 'baton[plots]'")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise Invalid(f"--plot {path}: {error.strerror}") from error


def draw_roofline(path: Path, figures: Sequence[BenchResult], title: str) -> None:
    """Both axes logarithmic. Raises Invalid when ``path`` can't be written, or its ending is none
    of a figure."""
    ceilings = figures[0].ceilings.wall
    with figure_in(path) as (axes,):
        _draw_roof(axes, figures, ceilings)
        for kind in MARKS:
            _draw_points(axes, kind, [each for each in figures if each.work.kind == kind])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(title, fontsize="small")
        label_axes(axes, "operations for each byte (FLOP/byte)", "GFLOP/s")


def roof_at(intensity: float, ceilings: Ceilings) -> float:
    """Operations in a second that are possible."""
    return min(ceilings.flops_per_second, intensity * ceilings.bytes_per_second)


def _draw_roof(axes: Any, figures: Sequence[BenchResult], ceilings: Ceilings) -> None:
    ridge = ceilings.flops_per_second / ceilings.bytes_per_second
    found = [figure.demand.intensity for figure in figures]
    low, high = min(found) / MARGIN, max(*found, ridge) * MARGIN
    xs = np.geomspace(min(low, ridge / MARGIN), high, 200)
    axes.plot(xs, [roof_at(x, ceilings) / 1e9 for x in xs], color="black", label=_told(ceilings))


def _draw_points(axes: Any, kind: str, figures: Sequence[BenchResult]) -> None:
    mark, color = MARKS[kind]
    xs = [figure.demand.intensity for figure in figures]
    ys = [figure.flops_per_second / 1e9 for figure in figures]
    if figures:
        axes.plot(xs, ys, mark, color=color, label=kind)
    for figure, x, y in zip(figures, xs, ys, strict=True):
        told = f"{figure.work.batch} × {figure.work.context:,}: {figure.share:.0%}"
        axes.annotate(told, (x, y), textcoords="offset points", xytext=(5, -10), fontsize="x-small")


def _told(ceilings: Ceilings) -> str:
    flops, num_bytes = ceilings.flops_per_second / 1e9, ceilings.bytes_per_second / 1e9
    return f"this machine: {flops:,.0f} GFLOP/s, {num_bytes:,.1f} GB/s"
