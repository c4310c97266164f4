"""Computes how many workers each pool should have, from the load and the throughput of one worker.

A pool grows at once, by as much as the load needs. It shrinks to the largest number of workers that
was needed in the last ``shrink_seconds`` at a utilisation of ``shrink_utilisation``. So the load
must grow by a factor of ``utilisation / shrink_utilisation`` before a removed worker is needed
again. No pool becomes too small for the requests that were already admitted. A queue makes a pool
grow only by what the queue adds to the work of the next minute, since a worker that starts now
comes too late for the requests that are queued now. But each worker that misses the SLO counts as
fully used, whatever its measured speed: it may be slower than it was measured alone, and clients
that wait for their answers send no more requests than it can serve.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from baton.core.pool_plan import PoolAlternative
from conductor.load_forecast import LoadForecast


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingConfig:
    """Settings for sizing the pools. ``utilisation`` is the target utilisation when a pool grows,
    and ``shrink_utilisation`` when it shrinks. ``ttft_slo_seconds`` and ``itl_slo_seconds`` are the
    SLO."""

    min_prefill: int = 1
    max_prefill: int = 64
    min_decode: int = 1
    max_decode: int = 64
    utilisation: float = 0.7
    shrink_utilisation: float = 0.6
    shrink_seconds: float = 300.0
    ttft_slo_seconds: float = 2.0
    itl_slo_seconds: float = 0.05


BACKLOG_SECONDS = 60.0
"""Time in which queued prompts should be prefilled, in addition to new ones."""


@dataclass(frozen=True, slots=True)
class DemandPeaks:
    """How many workers of a pool were needed since ``since_seconds``. ``peaks`` are pairs (time,
    number of workers) from the last ``shrink_seconds``, without pairs that were followed by an
    equal or larger number."""

    since_seconds: float
    peaks: tuple[tuple[float, int], ...] = ()

    def with_demand(
        self, now_seconds: float, num_needed: int, shrink_seconds: float
    ) -> "DemandPeaks":
        recent = (peak for peak in self.peaks if peak[0] > now_seconds - shrink_seconds)
        higher = (peak for peak in recent if peak[1] > num_needed)
        return DemandPeaks(self.since_seconds, (*higher, (now_seconds, num_needed)))

    @property
    def max_needed(self) -> int:
        return self.peaks[0][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCapacity:
    """The current pool sizes, and the measured capacity of one worker of each pool: prompt tokens
    computed per second, answer tokens per second within the SLO, and tokens of KV (each 0 if not
    measured yet). ``queued_prompt_tokens`` and ``projected_tokens`` (tokens of KV) are the demand
    of requests that were already admitted. ``late_prefill`` and ``late_decode`` are the numbers of
    workers whose requests miss the SLO. ``prefill_demand`` and ``decode_demand`` are the demand
    peaks from the last :class:`PoolSizes`."""

    now_seconds: float
    num_prefill: int
    num_decode: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    decode_capacity_tokens: int
    queued_prompt_tokens: int = 0
    projected_tokens: int = 0
    late_prefill: int = 0
    late_decode: int = 0
    prefill_demand: DemandPeaks | None = None
    decode_demand: DemandPeaks | None = None


@dataclass(frozen=True, slots=True)
class PoolSizes:
    prefill: int
    decode: int
    reason: str
    alternatives: tuple[PoolAlternative, ...] = ()
    prefill_demand: DemandPeaks | None = None
    decode_demand: DemandPeaks | None = None


@dataclass(frozen=True, slots=True)
class _PoolDemand:
    """The demand for workers of one pool. ``load`` is the number of workers that the load would
    keep busy all the time. ``committed`` is the number of workers that the already admitted
    requests need; the pool does not shrink below it."""

    name: str
    num_workers: int
    load: float
    committed: int
    min_workers: int
    max_workers: int
    demand: DemandPeaks | None
    is_measured: bool = True
    """False if the speed of the pool's workers is not known, so that ``load`` is not either."""

    def needed(self, utilisation: float) -> int:
        """Return the number of workers that the load needs, at least ``min_workers`` and at most
        ``max_workers``."""
        num_workers = math.ceil(self.load / utilisation - 1e-9)
        return min(max(num_workers, self.min_workers), self.max_workers)

    @property
    def kept(self) -> int:
        """The number of existing workers that admitted requests need. The pool keeps them even if
        they are more than ``max_workers``."""
        return min(self.committed, self.num_workers)

    def utilisation(self, num_workers: int) -> float:
        return self.load / num_workers if num_workers else math.inf


def size_pools(load: LoadForecast, pools: PoolCapacity, config: SizingConfig) -> PoolSizes:
    """Size both pools, each independently of the other."""
    prefill, decode = _prefill_pool(load, pools, config), _decode_pool(load, pools, config)
    num_prefill, prefill_needs, prefill_reason = _size_pool(prefill, pools.now_seconds, config)
    num_decode, decode_needs, decode_reason = _size_pool(decode, pools.now_seconds, config)
    return PoolSizes(
        num_prefill,
        num_decode,
        f"{prefill_reason}; {decode_reason}",
        (*_alternatives(prefill, num_prefill), *_alternatives(decode, num_decode)),
        prefill_needs,
        decode_needs,
    )


def _prefill_pool(load: LoadForecast, pools: PoolCapacity, config: SizingConfig) -> _PoolDemand:
    speed = pools.prefill_tokens_per_second
    computed = load.requests_per_second * load.prompt_tokens * (1 - load.cached_share)
    computed += pools.queued_prompt_tokens / BACKLOG_SECONDS
    return _PoolDemand(
        "prefill",
        pools.num_prefill,
        max(_in_workers(computed, speed, pools.num_prefill, config), pools.late_prefill),
        math.ceil(pools.queued_prompt_tokens / (speed * config.ttft_slo_seconds))
        if speed
        else pools.num_prefill,
        config.min_prefill,
        config.max_prefill,
        pools.prefill_demand,
        is_measured=bool(speed),
    )


def _decode_pool(load: LoadForecast, pools: PoolCapacity, config: SizingConfig) -> _PoolDemand:
    """Compute the demand for decode workers from their speed and from their memory, and use the
    larger of the two. An answer is assumed to occupy memory for as long as the ITL SLO allows, with
    its prompt and, on average, half of its tokens."""
    generated = load.requests_per_second * load.answer_tokens
    resident = generated * config.itl_slo_seconds * (load.prompt_tokens + load.answer_tokens / 2)
    speed, memory = pools.decode_tokens_per_second, pools.decode_capacity_tokens
    by_speed = _in_workers(generated, speed, pools.num_decode, config)
    by_memory = _in_workers(resident, memory, pools.num_decode, config)
    return _PoolDemand(
        "decode",
        pools.num_decode,
        max(by_speed, by_memory, pools.late_decode),
        math.ceil(pools.projected_tokens / memory) if memory else pools.num_decode,
        config.min_decode,
        config.max_decode,
        pools.decode_demand,
        is_measured=bool(speed),
    )


def _in_workers(work: float, capacity: float, num_workers: int, config: SizingConfig) -> float:
    """Return how many fully used workers ``work`` needs. While the ``capacity`` of one worker is
    unknown (0), assume that the current workers are used exactly at the target utilisation."""
    return work / capacity if capacity else num_workers * config.utilisation


def _size_pool(
    pool: _PoolDemand, now_seconds: float, config: SizingConfig
) -> tuple[int, DemandPeaks, str]:
    """Return the pool's new size, its demand peaks, and the reason."""
    grown, shrunk = pool.needed(config.utilisation), pool.needed(config.shrink_utilisation)
    before = pool.demand or DemandPeaks(now_seconds)
    current = f"{pool.name} {pool.num_workers}"
    if not pool.is_measured and grown == pool.num_workers:
        return grown, before, f"{current} stay: the speed of its workers is not measured yet"
    demand = before.with_demand(now_seconds, shrunk, config.shrink_seconds)
    if grown > pool.num_workers:
        return grown, demand, f"{current} to {grown}: {_reason(pool, grown, config.utilisation)}"
    if shrunk >= pool.num_workers:
        return pool.num_workers, demand, f"{current} stay: load of {pool.load:.2f} workers"
    if demand.max_needed >= pool.num_workers:
        ago = f"{now_seconds - demand.peaks[0][0]:.0f} s ago"
        return pool.num_workers, demand, f"{current} stay: {demand.max_needed} were needed {ago}"
    observed = now_seconds - demand.since_seconds
    if observed < config.shrink_seconds:
        passed = f"{observed:.0f} of {config.shrink_seconds:.0f} s"
        reason = f"{demand.max_needed} would have been enough for {passed}"
        return pool.num_workers, demand, f"{current} stay: {reason}"
    fewer = max(demand.max_needed, pool.kept)
    if fewer == pool.num_workers:
        return fewer, demand, f"{current} stay: the admitted requests need them"
    reason = _reason(pool, fewer, config.shrink_utilisation)
    return fewer, demand, f"{current} to {fewer}: {reason}"


def _reason(pool: _PoolDemand, num_workers: int, utilisation: float) -> str:
    """Return a text that says what determined ``num_workers``: the load, the pool's maximum size,
    or the requests that were already admitted."""
    if num_workers == pool.max_workers:
        return f"load of {pool.load:.2f} workers, and {pool.max_workers} is the maximum"
    if num_workers == pool.committed > pool.needed(utilisation):
        return f"the admitted requests need {pool.committed}"
    return f"load of {pool.load:.2f} workers, at most {utilisation:.0%} utilised"


def _alternatives(pool: _PoolDemand, chosen: int) -> Iterator[PoolAlternative]:
    """Yield the pool's predicted utilisation for three sizes: one worker fewer than ``chosen``
    (unless none would be left), ``chosen``, and one more."""
    for count in range(max(chosen - 1, 1), chosen + 2):
        yield PoolAlternative(pool.name, count, pool.utilisation(count))
