"""Latencies, rates and hit rates of the answers that ended recently, for the console."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.ids import TenantId
from router.console.worker_rows import Row, Rows
from router.generation.record import GenerationRecord
from router.generation.ring_placer import RING_POLICY
from router.telemetry.slo import SloOutcome, SloTargets

WINDOW_SECONDS = 60.0
"""How far back answers count."""

TIERS = ("device", "dram", "disk")


@dataclass(frozen=True, slots=True)
class RecentAnswers:
    """The answers that ended in the last ``seconds``, newest first. ``seconds`` is at most
    :data:`WINDOW_SECONDS`; it is less if the router keeps fewer answers than ended in that time, or
    has not run for that long."""

    records: Sequence[GenerationRecord]
    seconds: float

    @property
    def per_second(self) -> float:
        return len(self.records) / self.seconds if self.seconds > 0 else 0.0


def find_recent_answers(
    finished: Sequence[GenerationRecord], max_kept: int, now: float
) -> RecentAnswers:
    """Return the answers of the last :data:`WINDOW_SECONDS` among ``finished``, which are ordered
    by their ends. ``max_kept`` is the number of answers after which the oldest is dropped; ``now``
    is the monotonic time."""
    recent: list[GenerationRecord] = []
    for record in reversed(finished):
        if _ended_at(record) < now - WINDOW_SECONDS:
            return RecentAnswers(recent, WINDOW_SECONDS)
        recent.append(record)
    is_cut = len(recent) == max_kept
    seconds = now - _ended_at(recent[-1]) if is_cut else WINDOW_SECONDS
    return RecentAnswers(recent, max(seconds, 1e-3))


def _ended_at(record: GenerationRecord) -> float:
    return record.arrived_at + (record.total_seconds or 0.0)


def summarize(recent: RecentAnswers, slo: SloTargets) -> Row:
    """Summarize the answers: percentiles of their latencies beside the SLO, how many met it, how
    many were placed by the ring because no conductor answered, and hit rates by tier."""
    records = recent.records
    outcomes = [outcome for record in records if (outcome := slo.judge(record)) is not None]
    return {
        "window_seconds": round(recent.seconds, 1),
        "num_answers": len(records),
        "answers_per_second": round(recent.per_second, 2),
        "ttft": percentiles(record.ttft_seconds for record in records),
        "itl": percentiles(record.mean_itl_seconds for record in records),
        "queue": percentiles(record.queue_seconds for record in records),
        "ttft_slo_seconds": slo.ttft_seconds,
        "itl_slo_seconds": slo.itl_seconds,
        "outcomes": {each.value: outcomes.count(each) for each in SloOutcome},
        "placed_by_ring": sum(map(_was_placed_by_ring, records)),
        "failovers": sum(max(len(record.placements) - 1, 0) for record in records),
        "hits": _hits(records),
    }


def percentiles(values: Iterable[float | None]) -> dict[str, float | None]:
    """Return the 50th, 95th and 99th percentile (nearest rank) of the values that are not None."""
    known = sorted(value for value in values if value is not None)
    return {f"p{rank}": _nearest_rank(known, rank / 100) for rank in (50, 95, 99)}


def _nearest_rank(ordered: Sequence[float], quantile: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[max(math.ceil(quantile * len(ordered)) - 1, 0)], 5)


def _was_placed_by_ring(record: GenerationRecord) -> bool:
    return bool(record.placements) and record.placements[-1].placement.policy == RING_POLICY


def _hits(records: Sequence[GenerationRecord]) -> Row:
    """Return the number of prompt tokens whose KV came from each tier, and the number of all tokens
    of these prompts."""
    computed = [record for record in records if record.cached_tokens is not None]
    tiers = {tier: sum(r.cached_by_tier.get(tier, 0) for r in computed) for tier in TIERS}
    return {"prompt_tokens": sum(record.num_prompt_tokens for record in computed), **tiers}


@dataclass(slots=True)
class _TenantSums:
    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    met: int = 0
    missed: int = 0
    inflight: int = 0
    ttfts: list[float | None] = field(default_factory=list)


def tenant_sums(
    recent: RecentAnswers, inflight: Iterable[GenerationRecord], slo: SloTargets
) -> Rows:
    """Return what each tenant used in the window, and its answers in progress, by tenant."""
    sums: dict[TenantId, _TenantSums] = {}
    for record in recent.records:
        tenant = sums.setdefault(record.tenant, _TenantSums())
        tenant.answers += 1
        tenant.prompt_tokens += record.num_prompt_tokens
        tenant.cached_tokens += record.cached_tokens or 0
        tenant.completion_tokens += record.num_tokens
        tenant.ttfts.append(record.ttft_seconds)
        outcome = slo.judge(record)
        tenant.met += outcome is SloOutcome.MET
        tenant.missed += outcome not in (None, SloOutcome.MET)
    for record in inflight:
        sums.setdefault(record.tenant, _TenantSums()).inflight += 1
    return {str(tenant): _tenant_row(each) for tenant, each in sums.items()}


def _tenant_row(sums: _TenantSums) -> dict[str, Any]:
    names = ("answers", "prompt_tokens", "cached_tokens", "completion_tokens", "met", "missed")
    counts = {name: getattr(sums, name) for name in (*names, "inflight")}
    return {**counts, "ttft_p95": percentiles(sums.ttfts)["p95"]}
