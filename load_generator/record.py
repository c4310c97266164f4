"""What is kept of a call, and of the gaps between its tokens."""

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from load_generator.request import BenchRequest

SHORTEST_SECONDS = 1e-6
STEPS = 200
"""Of the histogram per factor e: values are right to half a percent."""

NUM_BINS = 24 * STEPS
"""The last one stands for more than seven hours."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Seconds from the load's beginning on; latencies count from ``scheduled_at``, when the user
    wanted to send. Tokens are as the server counted them, where it does, else as planned, and as
    many as there were events. ``code`` is None when all went well."""

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

    def meets(self, ttft_slo: float | None, tbt_slo: float | None) -> bool:
        if not self.ok or self.ttft_seconds is None:
            return False
        in_time = ttft_slo is None or self.ttft_seconds <= ttft_slo
        return in_time and (tbt_slo is None or (self.tbt_seconds or 0.0) <= tbt_slo)


def record_of(call: BenchRequest, began_at: float) -> RequestRecord:
    tokens = call.num_events if call.answer_tokens is None else call.answer_tokens
    first, fault = call.first_at, call.fault
    return RequestRecord(
        scheduled_at=call.scheduled_at - began_at,
        lag_seconds=call.sent_at - call.scheduled_at,
        ended_at=call.ended_at - began_at,
        ttft_seconds=None if first is None else first - call.scheduled_at,
        tbt_seconds=None if first is None or tokens < 2 else (call.last_at - first) / (tokens - 1),
        prompt_tokens=call.prompt_tokens or call.arrival.num_prompt_tokens,
        answer_tokens=tokens,
        cached_tokens=call.cached_tokens,
        status=call.status,
        code=None if fault is None else fault.code,
        message="" if fault is None else fault.message,
    )


class LatencyHistogram:
    """A histogram of seconds between two events, with bins that grow with them."""

    def __init__(self, counts: Iterable[int] = ()) -> None:
        self.counts = array("q", counts) or array("q", bytes(8 * NUM_BINS))

    def add(self, gaps: Iterable[float]) -> None:
        counts, log = self.counts, math.log
        for gap in gaps:
            place = int(log(max(gap, SHORTEST_SECONDS) / SHORTEST_SECONDS) * STEPS)
            counts[min(place, NUM_BINS - 1)] += 1

    def merge(self, other: "LatencyHistogram") -> None:
        for place, count in enumerate(other.counts):
            self.counts[place] += count

    def __len__(self) -> int:
        return sum(self.counts)

    def percentile(self, percent: float) -> float:
        """Of at least one. The middle of its bin."""
        cumulated = np.cumsum(self.counts)
        place = int(np.searchsorted(cumulated, cumulated[-1] * percent / 100))
        return SHORTEST_SECONDS * math.exp((min(place, NUM_BINS - 1) + 0.5) / STEPS)

    @property
    def mean(self) -> float:
        middles = SHORTEST_SECONDS * np.exp((np.arange(NUM_BINS) + 0.5) / STEPS)
        return float(np.average(middles, weights=self.counts))

    def sample(self, most: int) -> list[float]:
        """Evenly spaced percentiles, to draw."""
        if not len(self):
            return []
        return [self.percentile(100 * (place + 0.5) / most) for place in range(most)]
