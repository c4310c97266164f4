"""What came of a simulated run, in the numbers that the field compares."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from simulator.cluster import SimulatedCluster
from simulator.request import SimulatedRequest

PERCENTILES = (50, 90, 99)
QUARTILES = 4

Percentiles = dict[str, float | None]
"""``p50``, ``p90``, ``p99``; None where there is nothing to tell of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """A request meets its SLO when its first token is in time, and the mean gap between its tokens
    short enough; who is rejected meets nothing.

    ``goodput_rps`` counts those that met it, per second between the first arrival and the last; 0
    when all came at once. ``attainment`` is their share, also of each quarter of the requests by
    the length of their prompts, shortest first (None where there are fewer than four).
    ``hit_ratio_tokens`` is of the accepted requests' prompts. ``ttft_seconds`` is of those that got
    a first token, ``tbt_seconds`` of the mean gaps of those with two tokens or more.
    ``load_imbalance`` is the busiest prefill worker's time over the mean, ``decode_imbalance`` the
    same for tokens made; ``prefill_utilisation`` is the mean share of the time until the last first
    token. ``worst_slo_ratio`` is the longest TTFT of an accepted request by what it was allowed."""

    num_requests: int
    rate_rps: float
    goodput_rps: float
    attainment: float
    attainment_by_length_quartile: list[float | None]
    rejected_ratio: float
    hit_ratio_tokens: float
    hit_tokens_by_tier: dict[str, int]
    ttft_seconds: Percentiles
    tbt_seconds: Percentiles
    worst_slo_ratio: float
    load_imbalance: float
    decode_imbalance: float
    prefill_utilisation: float
    restarts: int
    preemptions: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(cluster: SimulatedCluster) -> SimulationResult:
    """Of a cluster that has run, and to its end."""
    assert cluster.jobs and not cluster.gave_up, "a run that was given up has no outcome"
    jobs, gap = cluster.jobs, cluster.config.token_gap_seconds
    accepted = [job for job in jobs if not job.rejected]
    duration = jobs[-1].arrival.at_seconds - jobs[0].arrival.at_seconds
    num_met = sum(job.meets(gap) for job in jobs)
    busy = [worker.busy_seconds for worker in cluster.prefills]
    ttfts = [job.ttft_seconds for job in accepted]
    return SimulationResult(
        num_requests=len(jobs),
        rate_rps=_ratio(len(jobs), duration),
        goodput_rps=_ratio(num_met, duration),
        attainment=num_met / len(jobs),
        attainment_by_length_quartile=_by_length(jobs, gap),
        rejected_ratio=1 - len(accepted) / len(jobs),
        hit_ratio_tokens=_hit_ratio(accepted),
        hit_tokens_by_tier=_hits(accepted),
        ttft_seconds=percentiles(ttfts),
        tbt_seconds=percentiles(inter_token_latencies(jobs)),
        worst_slo_ratio=max(map(_slo_ratio, accepted), default=0.0),
        load_imbalance=_imbalance(busy),
        decode_imbalance=_imbalance([worker.num_made_tokens for worker in cluster.decodes]),
        prefill_utilisation=_utilisation(busy, accepted),
        restarts=sum(job.num_restarts for job in jobs),
        preemptions=sum(worker.num_preempted for worker in cluster.decodes),
    )


def inter_token_latencies(jobs: Sequence[SimulatedRequest]) -> list[float]:
    """Seconds between two tokens, of each answer that has two or more."""
    answered = (job for job in jobs if not job.rejected and job.arrival.num_answer_tokens > 1)
    return [job.tbt_seconds for job in answered]


def percentiles(seconds: Sequence[float]) -> Percentiles:
    """Between two values, a line is drawn."""
    if not seconds:
        return {f"p{percent}": None for percent in PERCENTILES}
    found = np.percentile(seconds, PERCENTILES).tolist()
    return {f"p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}


def _by_length(jobs: Sequence[SimulatedRequest], gap: float) -> list[float | None]:
    """Of equally long prompts, those that came first count as shorter."""
    ordered = sorted(jobs, key=lambda job: job.arrival.num_prompt_tokens)
    edges = [len(jobs) * quarter // QUARTILES for quarter in range(QUARTILES + 1)]
    quarters = [ordered[start:end] for start, end in pairwise(edges)]
    return [
        sum(job.meets(gap) for job in quarter) / len(quarter) if quarter else None
        for quarter in quarters
    ]


def _hit_ratio(accepted: Sequence[SimulatedRequest]) -> float:
    prompts = sum(job.arrival.num_prompt_tokens for job in accepted)
    return _ratio(sum(job.cached_tokens for job in accepted), prompts)


def _hits(accepted: Sequence[SimulatedRequest]) -> dict[str, int]:
    hits = Counter({"device": 0, "dram": 0, "peer": 0})
    for job in accepted:
        hits.update(job.tier_tokens)
    return dict(hits)


def _slo_ratio(job: SimulatedRequest) -> float:
    return job.ttft_seconds / (job.deadline_seconds - job.arrival.at_seconds)


def _imbalance(loads: Sequence[float]) -> float:
    """1 when nobody has any."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def _utilisation(busy: Sequence[float], accepted: Sequence[SimulatedRequest]) -> float:
    end = max((job.first_token_seconds for job in accepted), default=0.0)
    return _ratio(sum(busy), end * len(busy))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
