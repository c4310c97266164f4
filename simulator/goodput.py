"""The highest rate of requests at which a cluster still meets its SLO."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from simulator.cluster import SimulatedCluster
from simulator.result import summarize

COARSE_STEP = 1.05
FINE_STEP = 1.01
"""Between two rates that are tried."""

TARGET_ATTAINMENT = 0.9
"""Of requests within their SLO."""

RunAtRate = Callable[[float, int], SimulatedCluster]
"""A cluster that has run at a rate (requests per second) with a seed. It may have been given up
when :func:`min_hopeless_misses` requests had missed their SLO."""


@dataclass(frozen=True, slots=True)
class SeedGoodput:
    """All are 0 when no rate that was tried meets the target. ``attainments`` are of all rates that
    were tried and not given up."""

    seed: int
    rate_rps: float
    goodput_rps: float
    attainment: float
    attainments: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Goodput:
    """Medians over the seeds."""

    rate_rps: float
    goodput_rps: float
    by_seed: tuple[SeedGoodput, ...]


def min_hopeless_misses(num_requests: int, target: float = TARGET_ATTAINMENT) -> int:
    """With so many misses, and no fewer, the target can't be reached any more."""
    return num_requests - math.ceil(num_requests * target - 1e-9) + 1


def rates_between(low: float, high: float, step: float = COARSE_STEP) -> tuple[float, ...]:
    """From ``low`` on, each ``step`` times the one before; ``high`` is the last."""
    assert 0 < low <= high and step > 1
    count = math.ceil(math.log(high / low) / math.log(step) - 1e-9)
    return *(low * step**number for number in range(count)), high


def find_goodput(
    run: RunAtRate, rates: Sequence[float], seeds: Sequence[int], target: float = TARGET_ATTAINMENT
) -> Goodput:
    """For each seed, the highest of ``rates`` at which the share of requests within their SLO is
    ``target`` or more, then refined up to the next of ``rates``, by steps of one percent. A higher
    rate is not always harder (other requests meet), so all rates are tried."""
    found = tuple(_of_seed(run, sorted(rates), seed, target) for seed in seeds)
    return Goodput(
        median(each.rate_rps for each in found),
        median(each.goodput_rps for each in found),
        found,
    )


def _of_seed(run: RunAtRate, rates: Sequence[float], seed: int, target: float) -> SeedGoodput:
    tried = [_tried(run, rate, seed) for rate in rates]
    meeting = [number for number, each in enumerate(tried) if each.attainment >= target]
    if meeting and meeting[-1] + 1 < len(rates):
        low, high = rates[meeting[-1]], rates[meeting[-1] + 1]
        between = rates_between(low, high, FINE_STEP)[1:-1]
        tried += [_tried(run, rate, seed) for rate in between]
    met = [each for each in tried if each.attainment >= target]
    best = max(met, key=lambda each: each.rate_rps, default=SeedGoodput(seed, 0.0, 0.0, 0.0))
    known = sorted((each.rate_rps, each.attainment) for each in tried if each.attainment >= 0)
    return SeedGoodput(seed, best.rate_rps, best.goodput_rps, best.attainment, tuple(known))


def _tried(run: RunAtRate, rate: float, seed: int) -> SeedGoodput:
    """One that was given up has an attainment below 0, of which nobody hears."""
    cluster = run(rate, seed)
    if cluster.gave_up:
        return SeedGoodput(seed, rate, 0.0, -1.0)
    outcome = summarize(cluster)
    return SeedGoodput(seed, rate, outcome.goodput_rps, outcome.attainment)
