"""Finds the highest request rate at which a cluster still meets its SLO."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from simulator.cluster import SimulatedCluster
from simulator.result import summarize

COARSE_STEP = 1.05
FINE_STEP = 1.01
"""Ratios of consecutive rates that are tried, in the coarse and in the fine search."""

MAX_DOUBLINGS = 12
"""How often a search doubles (or halves) the rate until the SLO is missed (or met)."""

TARGET_ATTAINMENT = 0.9
"""Required share of requests within their SLO."""

RunAtRate = Callable[[float, int], SimulatedCluster]
"""Runs a cluster at a rate (requests per second) with a seed, and returns the cluster. The run may
stop early once :func:`min_hopeless_misses` requests have missed their SLO."""


@dataclass(frozen=True, slots=True)
class SeedGoodput:
    """The highest rate that meets the target with one seed, and the goodput and attainment at that
    rate; all three are 0 if no rate meets the target. ``attainments`` has a pair (rate, attainment)
    for each run that did not stop early."""

    seed: int
    rate_rps: float
    goodput_rps: float
    attainment: float
    attainments: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Goodput:
    """The goodput over several seeds. ``rate_rps`` and ``goodput_rps`` are medians over the seeds;
    ``by_seed`` has the result with each seed."""

    rate_rps: float
    goodput_rps: float
    by_seed: tuple[SeedGoodput, ...]


def min_hopeless_misses(num_requests: int, target: float = TARGET_ATTAINMENT) -> int:
    """Return the smallest number of SLO misses with which the target can no longer be reached."""
    return num_requests - math.ceil(num_requests * target - 1e-9) + 1


def rates_between(low: float, high: float, step: float = COARSE_STEP) -> tuple[float, ...]:
    """Return rates from ``low`` to ``high``. Each is ``step`` times the previous one, except that
    the last one is exactly ``high``."""
    assert 0 < low <= high and step > 1
    count = math.ceil(math.log(high / low) / math.log(step) - 1e-9)
    return *(low * step**number for number in range(count)), high


def find_goodput(
    run: RunAtRate, rates: Sequence[float], seeds: Sequence[int], target: float = TARGET_ATTAINMENT
) -> Goodput:
    """Return the highest rate that meets the SLO, as the median over the seeds.

    For each seed, run all ``rates``, and find the highest one at which at least the share
    ``target`` of the requests meets the SLO. Then run the rates between it and the next higher one
    of ``rates``, in steps of 1 %. Rates are not searched by bisection, since the attainment does
    not always fall when the rate rises: at each rate, different requests overlap."""
    found = tuple(_seed_goodput(run, sorted(rates), seed, target) for seed in seeds)
    return Goodput(
        median(each.rate_rps for each in found),
        median(each.goodput_rps for each in found),
        found,
    )


def search_goodput(run: RunAtRate, rate: float, seeds: Sequence[int]) -> Goodput:
    """Find the highest rate that meets the SLO, beginning at ``rate``. If it meets the SLO, double
    it until the SLO is missed; otherwise halve it until the SLO is met. Then :func:`find_goodput`
    searches from half to twice the highest rate that met the SLO."""
    best = _highest_power(
        lambda at: _run_at_rate(run, at, seeds[0]).attainment >= TARGET_ATTAINMENT, rate
    )
    return find_goodput(run, rates_between(best / 2, best * 2), seeds)


def highest_rate(meets: Callable[[float], bool], rate: float, most: float = math.inf) -> float:
    """Return about the highest rate up to ``most`` that meets the target, as ``meets`` says of a
    rate: it does, and COARSE_STEP times this rate does not. Begin at ``rate``. Return 0 if no rate
    does. This asks for some ten rates instead of the many of :func:`search_goodput`, for some of
    them twice, and may miss a higher rate that meets the target while a lower one does not."""
    low = _highest_power(meets, rate, most)
    if not meets(low):
        return 0.0
    high = min(low * 2, most)
    while high / low > COARSE_STEP:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def _highest_power(meets: Callable[[float], bool], rate: float, most: float = math.inf) -> float:
    """Double ``rate`` until the target is missed, or halve it until the target is met. Return the
    last rate that met the target, or the lowest rate tried."""
    doublings, upward = 0, meets(rate)
    while doublings < MAX_DOUBLINGS:
        following = rate * 2 if upward else rate / 2
        if following > most or meets(following) != upward:
            break
        rate, doublings = following, doublings + 1
    return rate if upward else rate / 2


def _seed_goodput(run: RunAtRate, rates: Sequence[float], seed: int, target: float) -> SeedGoodput:
    tried = [_run_at_rate(run, rate, seed) for rate in rates]
    meeting = [number for number, each in enumerate(tried) if each.attainment >= target]
    if meeting and meeting[-1] + 1 < len(rates):
        low, high = rates[meeting[-1]], rates[meeting[-1] + 1]
        between = rates_between(low, high, FINE_STEP)[1:-1]
        tried += [_run_at_rate(run, rate, seed) for rate in between]
    met = [each for each in tried if each.attainment >= target]
    best = max(met, key=lambda each: each.rate_rps, default=SeedGoodput(seed, 0.0, 0.0, 0.0))
    known = sorted((each.rate_rps, each.attainment) for each in tried if each.attainment >= 0)
    return SeedGoodput(seed, best.rate_rps, best.goodput_rps, best.attainment, tuple(known))


def _run_at_rate(run: RunAtRate, rate: float, seed: int) -> SeedGoodput:
    """Run at one rate. If the run stopped early, the attainment in the result is negative."""
    cluster = run(rate, seed)
    if cluster.stopped_early:
        return SeedGoodput(seed, rate, 0.0, -1.0)
    outcome = summarize(cluster)
    return SeedGoodput(seed, rate, outcome.goodput_rps, outcome.attainment)
