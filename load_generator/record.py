"""The record of one request, and a histogram of inter-token latencies."""

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from load_generator.request import BenchRequest

MIN_SECONDS = 1e-6
BINS_PER_FACTOR_E = 200
"""Number of histogram bins per factor of e, which makes values accurate to half a percent."""

NUM_BINS = 24 * BINS_PER_FACTOR_E
"""The last bin holds all values above seven hours."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The measurements of one request. Times are in seconds since the load began. Latencies count
    from ``scheduled_at``, the time at which the request should have been sent. Token counts are the
    server's. Where the server reports none, they are the planned length of the prompt and the
    number of events of the answer. ``code`` is None when the request succeeded. ``tbt_seconds`` is
    the mean inter-token latency."""

    scheduled_at: float
    lag_seconds: float
    ended_at: float
    ttft_seconds: float | None
    tbt_seconds: float | None
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int | None
    status: int
    code: str | None
    message: str

    @property
    def ok(self) -> bool:
        return self.code is None

    @property
    def e2e_seconds(self) -> float:
        return self.ended_at - self.scheduled_at

    def meets_slo(self, ttft_slo: float | None, tbt_slo: float | None) -> bool:
        if not self.ok or self.ttft_seconds is None:
            return False
        in_time = ttft_slo is None or self.ttft_seconds <= ttft_slo
        return in_time and (tbt_slo is None or (self.tbt_seconds or 0.0) <= tbt_slo)


def make_record(call: BenchRequest, began_at: float) -> RequestRecord:
    """Return the record of a request that has ended. ``began_at`` is when the load began."""
    tokens = call.num_events if call.answer_tokens is None else call.answer_tokens
    first, fault = call.first_token_at, call.error
    return RequestRecord(
        scheduled_at=call.scheduled_at - began_at,
        lag_seconds=call.sent_at - call.scheduled_at,
        ended_at=call.ended_at - began_at,
        ttft_seconds=None if first is None else first - call.scheduled_at,
        tbt_seconds=None
        if first is None or tokens < 2
        else (call.last_token_at - first) / (tokens - 1),
        prompt_tokens=call.prompt_tokens or call.arrival.num_prompt_tokens,
        answer_tokens=tokens,
        cached_tokens=call.cached_tokens,
        status=call.status,
        code=None if fault is None else fault.code,
        message="" if fault is None else fault.message,
    )


class LatencyHistogram:
    """A histogram of the times between two events, in seconds. The width of its bins is
    logarithmic."""

    def __init__(self, counts: Iterable[int] = ()) -> None:
        self.counts = array("q", counts) or array("q", bytes(8 * NUM_BINS))

    def add(self, gaps: Iterable[float]) -> None:
        counts, log = self.counts, math.log
        for gap in gaps:
            index = int(log(max(gap, MIN_SECONDS) / MIN_SECONDS) * BINS_PER_FACTOR_E)
            counts[min(index, NUM_BINS - 1)] += 1

    def merge(self, other: "LatencyHistogram") -> None:
        for index, count in enumerate(other.counts):
            self.counts[index] += count

    def __len__(self) -> int:
        return sum(self.counts)

    def percentile(self, percent: float) -> float:
        """Return the middle of the bin in which the percentile lies. The histogram must not be
        empty."""
        cumulated = np.cumsum(self.counts)
        index = int(np.searchsorted(cumulated, cumulated[-1] * percent / 100))
        return MIN_SECONDS * math.exp((min(index, NUM_BINS - 1) + 0.5) / BINS_PER_FACTOR_E)

    @property
    def mean(self) -> float:
        middles = MIN_SECONDS * np.exp((np.arange(NUM_BINS) + 0.5) / BINS_PER_FACTOR_E)
        return float(np.average(middles, weights=self.counts))

    def sample_percentiles(self, num_points: int) -> list[float]:
        """Return ``num_points`` evenly spaced percentiles for a plot, or no percentiles if the
        histogram is empty."""
        if not len(self):
            return []
        return [self.percentile(100 * (index + 0.5) / num_points) for index in range(num_points)]
