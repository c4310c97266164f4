"""Arrivals whose rate rises and falls like that of a day."""

import math
from dataclasses import dataclass, replace

import numpy as np

from baton.errors import Invalid
from baton.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class DiurnalRate:
    """From ``low_per_second`` at night to ``high_per_second`` at noon and back, along a cosine,
    each ``period_seconds``. It begins at midnight."""

    low_per_second: float
    high_per_second: float
    period_seconds: float

    @property
    def mean_per_second(self) -> float:
        return (self.low_per_second + self.high_per_second) / 2

    def expected(self, seconds: float) -> float:
        """How many have arrived until then, in the mean."""
        turn = 2 * math.pi / self.period_seconds
        swing = (self.high_per_second - self.low_per_second) / 2
        return self.mean_per_second * seconds - swing * math.sin(turn * seconds) / turn


GRID_SECONDS = 1.0
"""Between two points, a line is drawn."""


def with_diurnal_rate(trace: Trace, tide: DiurnalRate) -> Trace:
    """The same requests in the same order, and as random: what takes one mean gap in ``trace``
    takes one of that moment. Raises Invalid for rates that are not positive."""
    if not 0 < tide.low_per_second <= tide.high_per_second or tide.period_seconds <= 0:
        raise Invalid(f"{tide}: rates must be positive, the low one no higher than the high one")
    arrivals = trace.arrivals
    times = np.array([arrival.at_seconds for arrival in arrivals])
    counts = times * (len(arrivals) / max(times[-1], 1e-9))
    end = len(arrivals) / tide.low_per_second
    grid = np.arange(0.0, end + GRID_SECONDS, GRID_SECONDS)
    expected = [tide.expected(second) for second in grid.tolist()]
    moved = np.interp(counts, expected, grid).tolist()
    pairs = zip(arrivals, moved, strict=True)
    made = tuple(replace(arrival, at_seconds=at) for arrival, at in pairs)
    return replace(trace, name=f"{trace.name} in tides", arrivals=made)
