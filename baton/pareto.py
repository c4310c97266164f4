"""Finds the Pareto-optimal ones of points with two figures."""

from collections.abc import Sequence


def on_frontier(points: Sequence[tuple[float, float]]) -> list[bool]:
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
