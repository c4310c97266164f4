"""Draws the figure of ``baton plan --pareto``."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.errors import Invalid
from baton.pareto import on_frontier
from simulator.pareto import ParetoPoint, ParetoReport, SloFigures
from simulator.running_costs import RunningCosts

SIZE_INCHES = (9.0, 5.6)
DOTS_PER_INCH = 150
NAMES = ("pareto.png", "pareto.svg")

MIN_LABEL_DISTANCE = 0.08
"""Minimum distance of labelled points, as a share of the axes."""

_INK, _QUIET, _GRID = "#1b1f24", "#59636e", "#e1e5ea"
_STYLES = {"mixed": ("#b4500b", "o"), "split": ("#0b62b4", "s"), "hybrid": ("#0d7a53", "^")}
_OTHER_STYLE = ("#7b3fa0", "D")
_SETTINGS = {
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text: the file is small, and readers can search it
    "svg.hashsalt": "baton",  # the same report gives the same file
    "text.parse_math": False,  # a dollar sign is a dollar sign
}

Place = tuple[float, float]
"""Tokens per second per user, and per GPU."""


def draw_figure(report: ParetoReport, folder: Path, title: str, subtitle: str) -> None:
    """Write the files NAMES to ``folder``: throughput per GPU against speed per user, under the
    simulated SLO. Raises Invalid if matplotlib is not installed or a file can't be written."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Invalid("figures need matplotlib: pip install 'baton[plots]'") from error
    with rc_context(_SETTINGS):
        figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.08, 0.105, 0.84, 0.745))
        figure.text(0.02, 0.945, title, fontsize=14, fontweight="bold", color=_INK)
        figure.text(0.02, 0.9, subtitle, fontsize=9, color=_QUIET)
        _style(axes, "output tokens per second per GPU, within the SLO")
        points = [point for point in report.points if _figures(point).meets_target]
        if points:
            _draw_points(axes, points)
            _add_price_axis(axes, report.costs)
        else:
            axes.text(0.5, 0.5, "No configuration meets the SLO.", ha="center", color=_QUIET)
        for name in NAMES:
            _save(figure, folder / name)


def _figures(point: ParetoPoint) -> SloFigures:
    return point.by_slo[0]


def _place(point: ParetoPoint) -> Place:
    return point.tokens_per_second_per_user, _figures(point).tokens_per_second_per_gpu


def _frontier(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """Return the Pareto-optimal ones of these points, slowest first."""
    optimal = on_frontier([_place(point) for point in points])
    return sorted((p for p, best in zip(points, optimal, strict=True) if best), key=_place)


# -- points and their labels ---------------------------------------------------------------


def _draw_points(axes: Any, points: Sequence[ParetoPoint]) -> None:
    xs, ys = zip(*map(_place, points), strict=True)
    width, height = max(xs) * 1.14, max(ys) * 1.08
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    taken: list[float] = []
    present = {point.kind for point in points}
    for kind in [kind for kind in _STYLES if kind in present] + sorted(present - _STYLES.keys()):
        color, marker = _STYLES.get(kind, _OTHER_STYLE)
        own = [point for point in points if point.kind == kind]
        best = _frontier(own)
        _plot(axes, own, marker, color=color, alpha=0.22, markersize=5, markeredgewidth=0)
        _plot(axes, best, "-", color=color, linewidth=1.8, zorder=3)
        optimal = [point for point in own if _figures(point).on_frontier]
        _plot(axes, optimal, marker, color=color, markersize=7.5, markeredgecolor=_INK, zorder=4)
        _name(axes, kind, color, _place(best[0]), taken, height)
    for point in _spread(_frontier(points), width, height):
        text = f"{point.label} at {point.rate_rps:.3g}/s"
        offset = {"textcoords": "offset points", "xytext": (9, 5)}
        axes.annotate(text, _place(point), fontsize=8.5, color=_INK, zorder=5, **offset)


def _plot(axes: Any, points: Sequence[ParetoPoint], style: str, **options: Any) -> None:
    places = [_place(point) for point in points]
    axes.plot([x for x, _ in places], [y for _, y in places], style, **options)


def _name(
    axes: Any, kind: str, color: str, place: Place, taken: list[float], height: float
) -> None:
    """Write the kind's name beside the slowest point of its line, below the names in ``taken``."""
    gap = height * 0.045
    y = place[1]
    while any(abs(y - other) < gap for other in taken):
        y -= gap / 4
    taken.append(y)
    offset = {"textcoords": "offset points", "xytext": (-9, 0), "ha": "right", "va": "center"}
    axes.annotate(kind, (place[0], y), color=color, fontweight="bold", zorder=5, **offset)


def _spread(points: Sequence[ParetoPoint], width: float, height: float) -> list[ParetoPoint]:
    """Return the points that have no earlier one of the result nearby."""
    chosen: list[ParetoPoint] = []
    for point in points:
        x, y = _place(point)
        distances = (math.hypot((x - u) / width, (y - v) / height) for u, v in map(_place, chosen))
        if all(distance >= MIN_LABEL_DISTANCE for distance in distances):
            chosen.append(point)
    return chosen


# -- axes and files ------------------------------------------------------------------------


def _style(axes: Any, y: str) -> None:
    axes.set_xlabel("tokens per second per user (median)", color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _add_price_axis(axes: Any, costs: RunningCosts) -> None:
    """Write, at the right, the price of a million tokens at heights that give round prices."""
    top = axes.get_ylim()[1]
    shown: list[tuple[float, float]] = []
    for price in _round_prices():
        y = costs.tokens_per_second_per_gpu(price)
        below = shown[-1][0] if shown else top * 1.05
        if 0.04 * top < y < below - 0.05 * top:
            shown.append((y, price))
    right = axes.twinx()
    right.set_ylim(axes.get_ylim())
    right.set_yticks([y for y, _ in shown], [f"${price:g}" for _, price in shown])
    right.set_ylabel("dollars per million output tokens", color=_INK)
    right.tick_params(colors=_QUIET, length=0)
    for spine in right.spines.values():
        spine.set_visible(False)


def _round_prices() -> list[float]:
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    return [float(f"{step}e{power}") for power in range(-4, 5) for step in steps]


def _save(figure: Any, path: Path) -> None:
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    try:
        figure.savefig(path, facecolor="white", metadata=metadata)
    except OSError as error:
        raise Invalid(f"{path}: cannot be written: {error.strerror}") from error
