"""The trade-off between throughput per GPU and speed per user: points of simulated configurations
at several rates, and which of them are Pareto-optimal."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from baton.reports.plots import on_frontier
from simulator.result import Percentiles, summarize
from simulator.running_costs import RunningCosts
from simulator.sweep import SweptRun

FORMAT = "baton-pareto-2"

SIGNIFICANT_DIGITS = 6
"""Digits of the figures. They are rounded before the frontier is determined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """A configuration at a rate. ``tokens_per_second_per_user`` is the inverse of the median of the
    answers' mean inter-token latencies. Throughput counts the output tokens of the answers within
    their SLO, per second between the first and the last arrival. Prices and energy are for all
    GPUs, whether they are busy or not; see :class:`RunningCosts`. ``on_frontier``: no other point
    that meets the target is at least as good in tokens per second per GPU and per user, and better
    in one of them."""

    label: str
    kind: str
    workers: dict[str, int]
    num_gpus: int
    gpus_per_worker: dict[str, int]
    rate_rps: float
    tokens_per_second_per_user: float
    tokens_per_second_per_gpu: float
    attainment: float
    meets_target: bool
    rejected_ratio: float
    ttft_seconds: Percentiles
    itl_seconds: Percentiles
    dollars_per_million_tokens: float | None
    max_kwh_per_million_tokens: float | None
    on_frontier: bool = False

    @property
    def place(self) -> tuple[float, float]:
        """Tokens per second per user, and per GPU."""
        return self.tokens_per_second_per_user, self.tokens_per_second_per_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoReport:
    """``about`` says what was simulated. ``target`` is the share of requests that must meet the
    SLO: ``ttft_seconds`` on top of the prompt's own prefill time, and ``itl_seconds`` as the mean
    inter-token latency of an answer."""

    about: dict[str, Any]
    target: float
    ttft_seconds: float
    itl_seconds: float
    costs: RunningCosts
    points: tuple[ParetoPoint, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def mark_frontier(points: Sequence[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """Set ``on_frontier``, among the points that meet the target."""
    meeting = [point for point in points if point.meets_target]
    optimal = zip(meeting, on_frontier([point.place for point in meeting]), strict=True)
    best = {id(point) for point, is_optimal in optimal if is_optimal}
    return tuple(replace(point, on_frontier=id(point) in best) for point in points)


def pareto_point(target: float, costs: RunningCosts, run: SweptRun) -> ParetoPoint | None:
    """Evaluate a run. Return None without an answer of two tokens, since it has no speed. The point
    is not on the frontier yet: see :func:`mark_frontier`."""
    outcome, configuration, jobs = summarize(run.cluster), run.configuration, run.cluster.jobs
    median_itl = outcome.tbt_seconds["p50"]
    if not median_itl:
        return None
    slo = run.cluster.config.itl_slo_seconds
    tokens = sum(job.arrival.num_answer_tokens for job in jobs if job.meets_slo(slo))
    seconds = jobs[-1].arrival.arrival_seconds - jobs[0].arrival.arrival_seconds
    rate = tokens / seconds / configuration.num_gpus
    return ParetoPoint(
        label=configuration.label,
        kind=configuration.kind,
        workers=configuration.workers,
        num_gpus=configuration.num_gpus,
        gpus_per_worker=configuration.gpus_per_worker,
        rate_rps=_rounded(run.rate_rps),
        tokens_per_second_per_user=_rounded(1 / median_itl),
        tokens_per_second_per_gpu=_rounded(rate),
        attainment=_rounded(outcome.attainment),
        meets_target=outcome.attainment >= target,
        rejected_ratio=_rounded(outcome.rejected_ratio),
        ttft_seconds=_rounded_percentiles(outcome.ttft_seconds),
        itl_seconds=_rounded_percentiles(outcome.tbt_seconds),
        dollars_per_million_tokens=_rounded_or_none(costs.dollars_per_million_tokens(rate)),
        max_kwh_per_million_tokens=_rounded_or_none(costs.max_kwh_per_million_tokens(rate)),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _rounded_or_none(value: float | None) -> float | None:
    return None if value is None else _rounded(value)


def _rounded_percentiles(values: Percentiles) -> Percentiles:
    return {name: _rounded_or_none(value) for name, value in values.items()}
