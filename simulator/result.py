"""The results of a simulated run: goodput, SLO attainment, latencies, hit ratios, balance."""

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
"""``p50``, ``p90``, ``p99``; None if there are no values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """A request meets its SLO if its first token comes before its deadline and its mean inter-token
    latency is within the limit. A rejected request never meets its SLO.

    ``goodput_rps`` is the number of requests that met their SLO, divided by the seconds between the
    first and the last arrival; it is 0 if all requests arrived at once. ``attainment`` is the share
    of requests that met their SLO. ``attainment_by_length_quartile`` is the same share for each
    quartile of prompt lengths, shortest first (None for an empty quartile). ``hit_ratio_tokens`` is
    the cached share of the accepted requests' prompt tokens. ``ttft_seconds`` has percentiles over
    the accepted requests; ``tbt_seconds`` has percentiles of the mean inter-token latencies of
    answers with two tokens or more. ``load_imbalance`` is the busiest prefill worker's busy time
    divided by the mean of all prefill workers; ``decode_imbalance`` is the same ratio for the
    tokens that decode workers generated. ``prefill_utilisation`` is the mean share of time for
    which prefill workers are busy, until the last request's first token. ``worst_slo_ratio`` is the
    highest ratio of an accepted request's TTFT to the allowed TTFT."""

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
    """Summarize a cluster's run, which must not have stopped early."""
    assert cluster.jobs and not cluster.stopped_early, "a run that stopped early has no result"
    jobs, itl_slo = cluster.jobs, cluster.config.itl_slo_seconds
    accepted = [job for job in jobs if not job.rejected]
    duration = jobs[-1].arrival.arrival_seconds - jobs[0].arrival.arrival_seconds
    num_met = sum(job.meets_slo(itl_slo) for job in jobs)
    busy = [worker.busy_seconds for worker in cluster.prefills]
    ttfts = [job.ttft_seconds for job in accepted]
    return SimulationResult(
        num_requests=len(jobs),
        rate_rps=_ratio(len(jobs), duration),
        goodput_rps=_ratio(num_met, duration),
        attainment=num_met / len(jobs),
        attainment_by_length_quartile=_by_length(jobs, itl_slo),
        rejected_ratio=1 - len(accepted) / len(jobs),
        hit_ratio_tokens=_hit_ratio(accepted),
        hit_tokens_by_tier=_hits(accepted),
        ttft_seconds=percentiles(ttfts),
        tbt_seconds=percentiles(inter_token_latencies(jobs)),
        worst_slo_ratio=max(map(_slo_ratio, accepted), default=0.0),
        load_imbalance=_imbalance(busy),
        decode_imbalance=_imbalance([worker.num_generated_tokens for worker in cluster.decodes]),
        prefill_utilisation=_utilisation(busy, accepted),
        restarts=sum(job.num_restarts for job in jobs),
        preemptions=sum(worker.num_preempted for worker in cluster.decodes),
    )


def inter_token_latencies(jobs: Sequence[SimulatedRequest]) -> list[float]:
    """Return the mean inter-token latency of each accepted request whose answer has two tokens or
    more."""
    answered = (job for job in jobs if not job.rejected and job.arrival.num_answer_tokens > 1)
    return [job.itl_seconds for job in answered]


def percentiles(seconds: Sequence[float]) -> Percentiles:
    """Return percentiles, linearly interpolated; None for each if there are no values."""
    if not seconds:
        return {f"p{percent}": None for percent in PERCENTILES}
    found = np.percentile(seconds, PERCENTILES).tolist()
    return {f"p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}


def _by_length(jobs: Sequence[SimulatedRequest], itl_slo: float) -> list[float | None]:
    """Return the SLO attainment per quartile of prompt length. Prompts of equal length are ordered
    by arrival."""
    ordered = sorted(jobs, key=lambda job: job.arrival.num_prompt_tokens)
    edges = [len(jobs) * number // QUARTILES for number in range(QUARTILES + 1)]
    quartiles = [ordered[start:end] for start, end in pairwise(edges)]
    return [
        sum(job.meets_slo(itl_slo) for job in quartile) / len(quartile) if quartile else None
        for quartile in quartiles
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
    return job.ttft_seconds / (job.deadline_seconds - job.arrival.arrival_seconds)


def _imbalance(loads: Sequence[float]) -> float:
    """Return the highest load divided by the mean load; 1 if all loads are 0."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def _utilisation(busy: Sequence[float], accepted: Sequence[SimulatedRequest]) -> float:
    end = max((job.first_token_at_seconds for job in accepted), default=0.0)
    return _ratio(sum(busy), end * len(busy))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
