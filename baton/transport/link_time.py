"""Measures how long a link was in use by reads, some of them concurrent."""

from collections.abc import Iterable


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of the reads was in progress. ``intervals`` are the times of the
    beginning and the end of each read."""
    seconds, busy_until = 0.0, float("-inf")
    for began, ended in sorted(intervals):
        seconds += max(ended - max(began, busy_until), 0.0)
        busy_until = max(busy_until, ended)
    return seconds
