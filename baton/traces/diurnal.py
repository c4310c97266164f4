"""Arrivals whose rate rises and falls over a day."""

import math
from dataclasses import dataclass, replace

import numpy as np

from baton.errors import Invalid
from baton.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class DiurnalRate:
    """A request rate that follows a cosine with period ``period_seconds``. It begins at midnight
    with ``low_per_second``, rises to ``high_per_second`` at noon, and falls back."""

    low_per_second: float
    high_per_second: float
    period_seconds: float

    @property
    def mean_per_second(self) -> float:
        return (self.low_per_second + self.high_per_second) / 2

    def expected_arrivals(self, seconds: float) -> float:
        """Return the expected number of arrivals in the first ``seconds``."""
        frequency = 2 * math.pi / self.period_seconds
        amplitude = (self.high_per_second - self.low_per_second) / 2
        sine = math.sin(frequency * seconds)
        return self.mean_per_second * seconds - amplitude * sine / frequency


INTERPOLATION_SECONDS = 1.0
"""Spacing, in seconds, of the points between which arrival times are interpolated linearly."""


def with_diurnal_rate(trace: Trace, rate: DiurnalRate) -> Trace:
    """Return the trace with arrival times that follow ``rate``: each interval between two requests
    is scaled in proportion to the mean interval at that time of day, so that arrivals remain as
    irregular as they were. Raises Invalid unless all values of ``rate`` are positive and its low
    rate is at most its high rate."""
    if not 0 < rate.low_per_second <= rate.high_per_second or rate.period_seconds <= 0:
        raise Invalid(
            f"{rate}: all values must be positive, and the low rate at most the high rate"
        )
    arrivals = trace.requests
    times = np.array([arrival.arrival_seconds for arrival in arrivals])
    counts = times * (len(arrivals) / max(times[-1], 1e-9))
    end = len(arrivals) / rate.low_per_second
    grid = np.arange(0.0, end + INTERPOLATION_SECONDS, INTERPOLATION_SECONDS)
    expected = [rate.expected_arrivals(second) for second in grid.tolist()]
    new_times = np.interp(counts, expected, grid).tolist()
    pairs = zip(arrivals, new_times, strict=True)
    scaled = tuple(replace(arrival, arrival_seconds=at) for arrival, at in pairs)
    return replace(trace, name=f"{trace.name} with diurnal rate", requests=scaled)
