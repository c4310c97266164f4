"""How many workers each pool should have: the rate of work against the rate of a worker.

A pool grows at once, by as much as the load needs. It shrinks to the most that were needed in the
last ``shrink_seconds``, and only as far as leaves ``shrink_utilisation``: so the load must grow by
the ratio of the two utilisations before what was let go is missed. Neither pool gets too small for
what was promised already. A queue makes a pool grow only by what it adds to the work of the next
minute: who starts now comes too late for what waits now.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from conductor.load_forecast import LoadForecast


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingConfig:
    """``utilisation`` is aimed at when a pool grows, ``shrink_utilisation`` when it shrinks.
    ``first_token_seconds`` and ``token_gap_seconds`` are the SLO."""

    min_prefill: int = 1
    max_prefill: int = 64
    min_decode: int = 1
    max_decode: int = 64
    utilisation: float = 0.7
    shrink_utilisation: float = 0.6
    shrink_seconds: float = 300.0
    first_token_seconds: float = 2.0
    token_gap_seconds: float = 0.05


BACKLOG_SECONDS = 60.0
"""In which what waits to be read is to be read, beside what comes."""


@dataclass(frozen=True, slots=True)
class DemandPeaks:
    """How many workers of a pool would have done, since ``since_seconds``: ``peaks`` are (when, how
    many) of the last ``shrink_seconds``, without those that were followed by as many or more."""

    since_seconds: float
    peaks: tuple[tuple[float, int], ...] = ()

    def then(self, now_seconds: float, num_needed: int, shrink_seconds: float) -> "DemandPeaks":
        recent = (peak for peak in self.peaks if peak[0] > now_seconds - shrink_seconds)
        higher = (peak for peak in recent if peak[1] > num_needed)
        return DemandPeaks(self.since_seconds, (*higher, (now_seconds, num_needed)))

    @property
    def most(self) -> int:
        return self.peaks[0][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCapacity:
    """What there is, and what one worker of each pool was measured to do: prompt tokens computed
    per second, answer tokens per second while it keeps the SLO, tokens of KV (0 is not measured
    yet). ``queued_prompt_tokens`` and ``promised_tokens`` of KV are owed already.
    ``prefill_needs`` and ``decode_needs`` are those of the last :class:`PoolSizes`."""

    now_seconds: float
    num_prefill: int
    num_decode: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    decode_capacity_tokens: int
    queued_prompt_tokens: int = 0
    promised_tokens: int = 0
    prefill_needs: DemandPeaks | None = None
    decode_needs: DemandPeaks | None = None


@dataclass(frozen=True, slots=True)
class PoolAlternative:
    """So many workers of a pool would be used so far."""

    pool: str
    num_workers: int
    utilisation: float


@dataclass(frozen=True, slots=True)
class PoolSizes:
    prefill: int
    decode: int
    reason: str
    alternatives: tuple[PoolAlternative, ...] = ()
    prefill_needs: DemandPeaks | None = None
    decode_needs: DemandPeaks | None = None


@dataclass(frozen=True, slots=True)
class _PoolDemand:
    """``load`` is in workers that would be busy all the time, ``owed`` in workers that the current
    promises need: of those that there are, so many stay."""

    name: str
    num_workers: int
    load: float
    owed: int
    least: int
    most: int
    needs: DemandPeaks | None

    def needed(self, utilisation: float) -> int:
        """By the load, within the bounds."""
        return min(max(math.ceil(self.load / utilisation - 1e-9), self.least), self.most)

    @property
    def kept(self) -> int:
        """Who is there for what is owed stays, whatever the bounds are."""
        return min(self.owed, self.num_workers)

    def utilisation(self, num_workers: int) -> float:
        return self.load / num_workers if num_workers else math.inf


def size_pools(load: LoadForecast, pools: PoolCapacity, config: SizingConfig) -> PoolSizes:
    """Both pools, each by itself."""
    prefill, decode = _prefill_pool(load, pools, config), _decode_pool(load, pools, config)
    num_prefill, prefill_needs, prefill_reason = _sized(prefill, pools.now_seconds, config)
    num_decode, decode_needs, decode_reason = _sized(decode, pools.now_seconds, config)
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
        _over(computed, speed, pools.num_prefill, config),
        math.ceil(pools.queued_prompt_tokens / (speed * config.first_token_seconds))
        if speed
        else pools.num_prefill,
        config.min_prefill,
        config.max_prefill,
        pools.prefill_needs,
    )


def _decode_pool(load: LoadForecast, pools: PoolCapacity, config: SizingConfig) -> _PoolDemand:
    """By its speed or its memory, whichever is scarcer: an answer stays as long as it may take, and
    has half of its tokens in the mean."""
    made = load.requests_per_second * load.answer_tokens
    resident = made * config.token_gap_seconds * (load.prompt_tokens + load.answer_tokens / 2)
    speed, memory = pools.decode_tokens_per_second, pools.decode_capacity_tokens
    by_speed = _over(made, speed, pools.num_decode, config)
    by_memory = _over(resident, memory, pools.num_decode, config)
    return _PoolDemand(
        "decode",
        pools.num_decode,
        max(by_speed, by_memory),
        math.ceil(pools.promised_tokens / memory) if memory else pools.num_decode,
        config.min_decode,
        config.max_decode,
        pools.decode_needs,
    )


def _over(work: float, capacity: float, num_workers: int, config: SizingConfig) -> float:
    """In workers. While nobody knows what one can do, those that are there are right."""
    return work / capacity if capacity else num_workers * config.utilisation


def _sized(
    pool: _PoolDemand, now_seconds: float, config: SizingConfig
) -> tuple[int, DemandPeaks, str]:
    grown, shrunk = pool.needed(config.utilisation), pool.needed(config.shrink_utilisation)
    needs = (pool.needs or DemandPeaks(now_seconds)).then(
        now_seconds, shrunk, config.shrink_seconds
    )
    there = f"{pool.name} {pool.num_workers}"
    if grown > pool.num_workers:
        return grown, needs, f"{there} to {grown}: {_why(pool, grown, config.utilisation)}"
    if shrunk >= pool.num_workers:
        return pool.num_workers, needs, f"{there} stay: {pool.load:.2f} would be busy"
    if needs.most >= pool.num_workers:
        ago = f"{now_seconds - needs.peaks[0][0]:.0f} s ago"
        return pool.num_workers, needs, f"{there} stay: {needs.most} were needed {ago}"
    watched = now_seconds - needs.since_seconds
    if watched < config.shrink_seconds:
        passed = f"{watched:.0f} of {config.shrink_seconds:.0f} s"
        return pool.num_workers, needs, f"{there} stay: {needs.most} have done for {passed}"
    fewer = max(needs.most, pool.kept)
    if fewer == pool.num_workers:
        return fewer, needs, f"{there} stay: what is promised needs them"
    why = _why(pool, fewer, config.shrink_utilisation)
    return fewer, needs, f"{there} to {fewer}: {why}"


def _why(pool: _PoolDemand, num_workers: int, utilisation: float) -> str:
    """What decided about this number."""
    if num_workers == pool.most:
        return f"{pool.load:.2f} would be busy, and {pool.most} is the most"
    if num_workers == pool.owed > pool.needed(utilisation):
        return f"what is promised needs {pool.owed}"
    return f"{pool.load:.2f} would be busy, at {utilisation:.0%} at most"


def _alternatives(pool: _PoolDemand, chosen: int) -> Iterator[PoolAlternative]:
    """One less, the chosen number, and one more."""
    for count in range(max(chosen - 1, 1), chosen + 2):
        yield PoolAlternative(pool.name, count, pool.utilisation(count))
