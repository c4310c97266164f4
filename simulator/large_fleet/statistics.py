"""The results of a large fleet's simulation, by hour of arrival."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np

from simulator.large_fleet.arrays import Bools, Floats, Ints

HOUR_SECONDS = 3600.0

LEAST_SECONDS, BINS_PER_DECADE, NUM_DECADES = 1e-4, 100, 8
"""Latencies are counted in bins that are 2.3 % wide, from 0.1 ms to 10,000 s."""

NUM_LATENCY_BINS = BINS_PER_DECADE * NUM_DECADES

QUARTILES = 4

MAX_BUFFERED_SLICES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """Figures of the requests that arrived in an hour, or in the whole run, with the same meaning
    as in :class:`simulator.result.SimulationResult`. ``prefill_workers`` and ``decode_workers`` are
    the mean numbers of workers on which requests were placed; ``prefill_utilisation`` and
    ``decode_memory`` are the mean shares of their time and of their KV memory that were used.
    Figures of which there is no observation are None."""

    start_seconds: float
    num_requests: int
    rate_rps: float
    attainment: float | None
    attainment_by_length_quartile: list[float | None]
    rejected_ratio: float | None
    restarts: int
    ttft_p50_seconds: float | None
    ttft_p90_seconds: float | None
    ttft_p99_seconds: float | None
    itl_p50_seconds: float | None
    itl_p99_seconds: float | None
    hit_ratio_tokens: float | None
    prefill_workers: float
    decode_workers: float
    prefill_utilisation: float | None
    decode_memory: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class FleetStatistics:
    """Counts requests by hour of arrival. Its size depends on the number of hours only."""

    def __init__(self, duration_seconds: float, length_edges: Floats) -> None:
        self.num_hours = max(int(np.ceil(duration_seconds / HOUR_SECONDS)), 1)
        self._duration_seconds = duration_seconds
        self._edges = length_edges
        size = self.num_hours
        self._requests, self._met = np.zeros((size, QUARTILES)), np.zeros((size, QUARTILES))
        self._rejected, self._restarts = np.zeros(size), np.zeros(size)
        self._prompts, self._cached = np.zeros(size), np.zeros(size)
        self._ended: list[tuple[Floats, Floats, Floats, Floats, Bools, Bools]] = []
        self._ttft, self._itl = (np.zeros((size, NUM_LATENCY_BINS)) for _ in range(2))
        self._sums: dict[str, Floats] = {
            name: np.zeros(size) for name in ("seconds", "prefill", "decode", "busy", "memory")
        }

    # -- recording -------------------------------------------------------------------------

    def record_arrivals(self, now_seconds: float, prompt_tokens: Floats) -> None:
        quartiles = self._quartiles(prompt_tokens)
        self._requests[self._hour(now_seconds)] += np.bincount(quartiles, minlength=QUARTILES)

    def record_rejected(self, now_seconds: float, count: int) -> None:
        self._rejected[self._hour(now_seconds)] += count

    def record_restarts(self, now_seconds: float, count: int) -> None:
        self._restarts[self._hour(now_seconds)] += count

    def record_placed(self, now_seconds: float, prompt_tokens: float, cached: float) -> None:
        self._prompts[self._hour(now_seconds)] += prompt_tokens
        self._cached[self._hour(now_seconds)] += cached

    def record_ended(
        self, arrivals: Floats, prompt_tokens: Floats, ttft: Floats, itl: Floats, met: Bools,
        has_itl: Bools,
    ) -> None:  # fmt: skip
        """Record requests that have ended; a request with ``has_itl`` has two tokens or more."""
        self._ended.append((arrivals, prompt_tokens, ttft, itl, met, has_itl))
        if len(self._ended) >= MAX_BUFFERED_SLICES:
            self._count_ended()

    def _count_ended(self) -> None:
        """Count the buffered requests together, which takes less time than one slice's at once."""
        if not self._ended:
            return
        columns = [np.concatenate(column) for column in zip(*self._ended, strict=True)]
        arrivals, prompt_tokens, ttft, itl, met, has_itl = columns
        self._ended.clear()
        hours = self._hours(arrivals)
        np.add.at(self._met, (hours, self._quartiles(prompt_tokens)), met)
        np.add.at(self._ttft, (hours, _latency_bins(ttft)), 1)
        is_counted = has_itl.astype(np.bool_)
        np.add.at(self._itl, (hours[is_counted], _latency_bins(itl[is_counted])), 1)

    def record_slice(self, now_seconds: float, seconds: float, gauges: Mapping[str, float]) -> None:
        """Record the numbers of ``prefill`` and ``decode`` workers, the prefill workers' ``busy``
        worker-seconds per second, and the workers' worth of KV memory that is used (``memory``)."""
        hour = self._hour(now_seconds)
        self._sums["seconds"][hour] += seconds
        for name, value in gauges.items():
            self._sums[name][hour] += value * seconds

    # -- results ---------------------------------------------------------------------------

    def by_hour(self) -> list[FleetResult]:
        return [self._result(slice(hour, hour + 1)) for hour in range(self.num_hours)]

    def total(self) -> FleetResult:
        return self._result(slice(0, self.num_hours))

    def _result(self, hours: slice) -> FleetResult:
        self._count_ended()
        requests, met = self._requests[hours].sum(axis=0), self._met[hours].sum(axis=0)
        count = requests.sum()
        start = hours.start * HOUR_SECONDS
        seconds = min(hours.stop * HOUR_SECONDS, self._duration_seconds) - start
        ttft, itl = self._ttft[hours].sum(axis=0), self._itl[hours].sum(axis=0)
        sums = {name: float(values[hours].sum()) for name, values in self._sums.items()}
        return FleetResult(
            start_seconds=start,
            num_requests=int(count),
            rate_rps=float(count / seconds),
            attainment=_ratio(met.sum(), count),
            attainment_by_length_quartile=[
                _ratio(part, whole) for part, whole in zip(met, requests, strict=True)
            ],
            rejected_ratio=_ratio(self._rejected[hours].sum(), count),
            restarts=int(self._restarts[hours].sum()),
            ttft_p50_seconds=_percentile(ttft, 0.5),
            ttft_p90_seconds=_percentile(ttft, 0.9),
            ttft_p99_seconds=_percentile(ttft, 0.99),
            itl_p50_seconds=_percentile(itl, 0.5),
            itl_p99_seconds=_percentile(itl, 0.99),
            hit_ratio_tokens=_ratio(self._cached[hours].sum(), self._prompts[hours].sum()),
            prefill_workers=sums["prefill"] / max(sums["seconds"], 1e-9),
            decode_workers=sums["decode"] / max(sums["seconds"], 1e-9),
            prefill_utilisation=_ratio(sums["busy"], sums["prefill"]),
            decode_memory=_ratio(sums["memory"], sums["decode"]),
        )

    def _hour(self, now_seconds: float) -> int:
        return min(int(now_seconds / HOUR_SECONDS), self.num_hours - 1)

    def _hours(self, seconds: Floats) -> Ints:
        hours = (seconds / HOUR_SECONDS).astype(np.int64)
        return cast(Ints, np.minimum(hours, self.num_hours - 1))

    def _quartiles(self, prompt_tokens: Floats) -> Ints:
        return np.searchsorted(self._edges, prompt_tokens)


def _latency_bins(seconds: Floats) -> Ints:
    decades = np.log10(np.maximum(seconds, LEAST_SECONDS) / LEAST_SECONDS)
    bins = (decades * BINS_PER_DECADE).astype(np.int64)
    return cast(Ints, np.minimum(bins, NUM_LATENCY_BINS - 1))


def _percentile(counts: Floats, share: float) -> float | None:
    """Return the middle of the bin that has the percentile; None if nothing was counted."""
    total = counts.sum()
    if not total:
        return None
    position = int(np.searchsorted(np.cumsum(counts), share * total))
    return float(LEAST_SECONDS * 10 ** ((position + 0.5) / BINS_PER_DECADE))


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
