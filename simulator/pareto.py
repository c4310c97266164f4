"""The trade-off between throughput per GPU and speed per user: points of simulated configurations
at several rates, and which of them are Pareto-optimal."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.pareto import on_frontier
from simulator.cluster import SimulatedCluster
from simulator.request import SimulatedRequest
from simulator.result import Percentiles, summarize
from simulator.running_costs import RunningCosts
from simulator.sweep import SweptConfiguration, SweptRun

FORMAT = "baton-pareto-1"

SIGNIFICANT_DIGITS = 6
"""Digits of the figures, so that a report with hundreds of points stays small. They are rounded
before the frontier is determined."""

TTFT_FACTORS = (1.0, 0.5, 0.25)
ITL_FACTORS = (1.0, 0.6, 0.4, 0.2)
"""The SLOs by which points are judged, as shares of the simulated ones. They are never looser,
since a cluster refuses what misses the simulated SLO."""


@dataclass(frozen=True, slots=True)
class Slo:
    """``ttft_seconds`` is allowed on top of the prompt's own prefill time; ``itl_seconds`` is the
    limit of an answer's mean inter-token latency."""

    ttft_seconds: float
    itl_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SloFigures:
    """What a point is worth under an SLO. Tokens are the output tokens of the answers within their
    SLO, per second between the first and the last arrival. Prices and energy are for all GPUs,
    whether they are busy or not; see :class:`RunningCosts`. ``on_frontier``: no other point that
    meets the target is at least as good in tokens per second per GPU and per user, and better in
    one of them."""

    attainment: float
    meets_target: bool
    tokens_per_second_per_gpu: float
    dollars_per_million_tokens: float | None
    max_kwh_per_million_tokens: float | None
    min_tokens_per_joule: float | None
    on_frontier: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """A configuration at a rate. ``tokens_per_second_per_user`` is the inverse of the median of the
    answers' mean inter-token latencies. ``by_slo`` has an element for each of the report's SLOs."""

    label: str
    kind: str
    workers: dict[str, int]
    num_gpus: int
    gpus_per_worker: dict[str, int]
    rate_rps: float
    tokens_per_second_per_user: float
    rejected_ratio: float
    ttft_seconds: Percentiles
    itl_seconds: Percentiles
    by_slo: tuple[SloFigures, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoReport:
    """``about`` says what was simulated. ``target`` is the share of requests that must meet an SLO.
    ``slos`` begins with the simulated SLO. ``deployments`` says, by the points' labels, how the
    configuration is deployed."""

    about: dict[str, Any]
    target: float
    costs: RunningCosts
    slos: tuple[Slo, ...]
    deployments: dict[str, dict[str, str | None]]
    points: tuple[ParetoPoint, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def stricter_slos(simulated: Slo) -> tuple[Slo, ...]:
    """Return the SLOs by which points are judged: the simulated one first, then stricter ones."""
    return tuple(
        Slo(simulated.ttft_seconds * ttft, simulated.itl_seconds * itl)
        for ttft in TTFT_FACTORS
        for itl in ITL_FACTORS
    )


def mark_frontiers(points: Sequence[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """Set ``on_frontier`` for each SLO, among the points that meet the target under it."""
    by_slo = [list(point.by_slo) for point in points]
    for number in range(len(by_slo[0]) if by_slo else 0):
        meeting = [i for i, figures in enumerate(by_slo) if figures[number].meets_target]
        values = [
            (points[i].tokens_per_second_per_user, by_slo[i][number].tokens_per_second_per_gpu)
            for i in meeting
        ]
        for i, optimal in zip(meeting, on_frontier(values), strict=True):
            by_slo[i][number] = replace(by_slo[i][number], on_frontier=optimal)
    return tuple(
        replace(point, by_slo=tuple(figures)) for point, figures in zip(points, by_slo, strict=True)
    )


def pareto_point(
    slos: Sequence[Slo], target: float, costs: RunningCosts, run: SweptRun
) -> ParetoPoint | None:
    """Evaluate a run. Return None without an answer of two tokens, since it has no speed. The point
    is on no frontier yet: see :func:`mark_frontiers`."""
    outcome, configuration = summarize(run.cluster), run.configuration
    median_itl = outcome.tbt_seconds["p50"]
    if not median_itl:
        return None
    answers = _Answers.of(run.cluster)
    return ParetoPoint(
        label=configuration.label,
        kind=configuration.kind,
        workers=configuration.workers,
        num_gpus=configuration.num_gpus,
        gpus_per_worker=configuration.gpus_per_worker,
        rate_rps=_rounded(run.rate_rps),
        tokens_per_second_per_user=_rounded(1 / median_itl),
        rejected_ratio=_rounded(outcome.rejected_ratio),
        ttft_seconds=_rounded_percentiles(outcome.ttft_seconds),
        itl_seconds=_rounded_percentiles(outcome.tbt_seconds),
        by_slo=tuple(_judge(answers, configuration, slo, target, costs) for slo in slos),
    )


@dataclass(frozen=True, slots=True)
class _Answers:
    """A run's answers, as arrays with an element per request. ``lateness`` is the time of the first
    token after its deadline under ``simulated``, infinite without an answer."""

    simulated: Slo
    seconds: float
    lateness: npt.NDArray[np.float64]
    itl: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]

    @staticmethod
    def of(cluster: SimulatedCluster) -> "_Answers":
        jobs = cluster.jobs
        return _Answers(
            Slo(cluster.config.ttft_slo_seconds, cluster.config.itl_slo_seconds),
            jobs[-1].arrival.arrival_seconds - jobs[0].arrival.arrival_seconds,
            np.array([_lateness(job) for job in jobs]),
            np.array([job.itl_seconds for job in jobs]),
            np.array([job.arrival.num_answer_tokens for job in jobs]),
        )

    def within(self, slo: Slo) -> npt.NDArray[np.bool_]:
        stricter = self.simulated.ttft_seconds - slo.ttft_seconds
        return (self.lateness <= -stricter) & (self.itl <= slo.itl_seconds)


def _lateness(job: SimulatedRequest) -> float:
    if job.rejected or job.finished_at_seconds < 0:
        return float("inf")
    return job.first_token_at_seconds - job.deadline_seconds


def _judge(
    answers: _Answers,
    configuration: SweptConfiguration,
    slo: Slo,
    target: float,
    costs: RunningCosts,
) -> SloFigures:
    within = answers.within(slo)
    attainment = float(np.mean(within))
    tokens = int(answers.tokens[within].sum())
    rate = tokens / answers.seconds / configuration.num_gpus
    return SloFigures(
        attainment=_rounded(attainment),
        meets_target=attainment >= target,
        tokens_per_second_per_gpu=_rounded(rate),
        dollars_per_million_tokens=_rounded_or_none(costs.dollars_per_million_tokens(rate)),
        max_kwh_per_million_tokens=_rounded_or_none(costs.max_kwh_per_million_tokens(rate)),
        min_tokens_per_joule=_rounded_or_none(costs.min_tokens_per_joule(rate)),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _rounded_or_none(value: float | None) -> float | None:
    return None if value is None else _rounded(value)


def _rounded_percentiles(values: Percentiles) -> Percentiles:
    return {name: _rounded_or_none(value) for name, value in values.items()}
