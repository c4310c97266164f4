"""Plots of simulation results. They need matplotlib, which is an optional dependency: pip install
'baton[plots]'."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from baton.errors import Invalid

WIDTH_INCHES = 6.0
HEIGHT_INCHES = 4.0
DOTS_PER_INCH = 144

Latencies = tuple[Sequence[float], Sequence[float]]
"""TTFT of each request and ITL of each token, in seconds."""

Points = Sequence[tuple[float, float]]

Place = tuple[float, float]
"""Tokens per second per user, and per GPU."""

PricedPoint = tuple[float, float, str]
"""Tokens per second and user, dollars per million tokens, and a label."""


def prepare_plots(folder: Path | None, option: str = "--plots") -> None:
    """Check that matplotlib is installed and create ``folder``, before a long simulation begins.
    Raises Invalid, which names the ``option``, if either fails. Without a folder, do nothing."""
    if folder is None:
        return
    if find_spec("matplotlib") is None:
        raise Invalid(f"{option} needs matplotlib: pip install 'baton[plots]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Invalid(f"{option} {folder}: {error.strerror}") from error


def plot_cdfs(path: Path, latencies: Mapping[str, Latencies]) -> None:
    """Plot the distribution functions of TTFT and ITL, one line per policy. For this and all other
    figures, the suffix of ``path`` determines the format, and Invalid is raised if matplotlib is
    not installed or ``path`` cannot be written."""
    with open_figure(path, num_axes=2) as (ttft_axes, itl_axes):
        for policy, (ttft_seconds, itl_seconds) in latencies.items():
            _draw_cdf(ttft_axes, ttft_seconds, policy)
            _draw_cdf(itl_axes, itl_seconds, policy)
        label_axes(ttft_axes, "TTFT (s)", "share of requests")
        label_axes(itl_axes, "ITL (s)", "share of tokens")


def plot_goodput(path: Path, attainments: Mapping[str, Points]) -> None:
    """Plot the share of requests within their SLO (0 to 1) against the arrival rate per second,
    one line per policy."""
    with open_figure(path) as (axes,):
        _draw_lines(axes, attainments, marker="o")
        axes.set_ylim(0.0, 1.05)
        label_axes(axes, "requests per second", "share within the SLO")


def plot_load(path: Path, loads: Mapping[str, Points]) -> None:
    """Plot load against virtual time in seconds, one line per worker."""
    with open_figure(path) as (axes,):
        _draw_lines(axes, loads, drawstyle="steps-post")
        label_axes(axes, "time (s)", "load")


def plot_prices(path: Path, points: Sequence[PricedPoint]) -> None:
    """Plot each point with its label, and a line through the Pareto frontier."""
    with open_figure(path) as (axes,):
        for speed, dollars, label in points:
            axes.plot(speed, dollars, "o", color="tab:blue")
            axes.annotate(label, (speed, dollars), textcoords="offset points", xytext=(5, 5))
        optimal = on_frontier([(speed, -dollars) for speed, dollars, _ in points])
        best = sorted(point for point, best in zip(points, optimal, strict=True) if best)
        speeds, dollars_of_best = [p[0] for p in best], [p[1] for p in best]
        axes.plot(speeds, dollars_of_best, drawstyle="steps-pre", color="tab:blue", alpha=0.5)
        label_axes(axes, "tokens per second and user", "dollars per million tokens")


def plot_pareto(path: Path, kinds: Mapping[str, Mapping[Place, str]], title: str) -> None:
    """Plot the labelled points of each kind, and a line through the kind's Pareto frontier. A label
    is drawn for the points that are optimal among all kinds."""
    every = [place for points in kinds.values() for place in points]
    optimal = {place for place, best in zip(every, on_frontier(every), strict=True) if best}
    with open_figure(path) as (axes,):
        for kind, points in kinds.items():
            places = list(points)
            best = sorted(
                p for p, is_best in zip(places, on_frontier(places), strict=True) if is_best
            )
            (line,) = axes.plot(*zip(*best, strict=True), marker="o", label=kind)
            axes.plot(*zip(*places, strict=True), "o", color=line.get_color(), alpha=0.2)
            for place in optimal & points.keys():
                offset = {"textcoords": "offset points", "xytext": (5, 5), "fontsize": "x-small"}
                axes.annotate(points[place], place, **offset)
        axes.set_title(title, fontsize="small", parse_math=False, wrap=True)
        label_axes(axes, "tokens per second per user (median)", "tokens per second per GPU")


def on_frontier(points: Points) -> list[bool]:
    """Return for each point whether it is Pareto-optimal: no other point is at least as high in
    both figures and higher in one of them. Equal points do not beat each other, so they are all
    optimal or all not. A figure for which lower is better must be negated."""
    optimal = [False] * len(points)
    highest = float("-inf")
    best: tuple[float, float] | None = None
    for index in sorted(range(len(points)), key=points.__getitem__, reverse=True):
        point = points[index]
        if point[1] > highest:
            best, highest = point, point[1]
        optimal[index] = point == best
    return optimal


@contextmanager
def open_figure(path: Path, num_axes: int = 1) -> Iterator[list[Any]]:
    """Context manager that yields axes side by side, and writes the figure to ``path`` at the end.
    It draws on an Agg canvas, which needs no display, and leaves the global state of pyplot alone.
    Raises Invalid if matplotlib is not installed or ``path`` cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Invalid("figures need matplotlib: pip install 'baton[plots]'") from error
    size = (WIDTH_INCHES * num_axes, HEIGHT_INCHES)
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    yield list(figure.subplots(1, num_axes, squeeze=False)[0])
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise Invalid(f"{path}: cannot be written: {error}") from error


def _draw_cdf(axes: Any, seconds: Sequence[float], label: str) -> None:
    ordered = np.sort(np.asarray(seconds, dtype=np.float64))
    shares = np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
    axes.plot(ordered, shares, drawstyle="steps-post", label=label)


def _draw_lines(axes: Any, lines: Mapping[str, Points], **style: str) -> None:
    for label, line in lines.items():
        axes.plot([x for x, _ in line], [y for _, y in line], label=label, **style)


def label_axes(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
