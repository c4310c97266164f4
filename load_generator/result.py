"""Summarizes the result of a load: throughput, goodput, latency percentiles and errors."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from load_generator.record import LatencyHistogram, RequestRecord

PERCENTILES = (50, 90, 95, 99)
QUARTILES = 4

MAX_LAG_SECONDS = 0.01
"""The load generator has kept up if the 99th percentile of its lateness is at most this. Timers are
accurate to a millisecond."""

MAX_CPU_SHARE = 0.9
"""The load generator has kept up if each process uses at most this share of a core."""

Summary = dict[str, float | None]
"""``mean``, ``p50``, ``p90``, ``p95``, ``p99``, ``max``; None when there are no values."""


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Latency targets in seconds, for the TTFT and for an answer's mean inter-token latency; None
    if there is no target."""

    ttft_seconds: float | None
    mean_itl_seconds: float | None

    @property
    def has_target(self) -> bool:
        return self.ttft_seconds is not None or self.mean_itl_seconds is not None


@dataclass(frozen=True, slots=True)
class GeneratorUsage:
    """The load generator's own resource usage. ``wall_seconds`` is the duration of the longest
    process, ``cpu_seconds`` the sum over all ``processes``."""

    cpu_seconds: float
    wall_seconds: float
    processes: int
    num_sent: int
    max_inflight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """The result over all measured requests. ``tbt_seconds`` summarizes each answer's mean
    inter-token latency, ``itl_seconds`` the individual times between two events. ``goodput_rps`` is
    the rate of requests that met the SLO. ``lag_seconds`` is how late the generator sent
    requests."""

    num_requests: int
    completed: int
    seconds: float
    throughput_rps: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    goodput_rps: float | None
    attainment: float | None
    attainment_by_length_quartile: list[float | None] | None
    rejected_ratio: float
    failed_ratio: float
    hit_ratio_tokens: float | None
    ttft_seconds: Summary
    tbt_seconds: Summary
    itl_seconds: Summary
    e2e_seconds: Summary
    prompt_tokens: Summary
    answer_tokens: Summary
    errors: list[dict[str, Any]]
    lag_seconds: Summary
    cpu_seconds_per_request: float
    cpu_share: float
    most_at_once: int
    kept_up: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    records: Sequence[RequestRecord],
    inter_token_latencies: LatencyHistogram,
    seconds: float,
    slo: LatencyTargets,
    usage: GeneratorUsage,
) -> BenchResult:
    """Summarize the records. Rates are the counts divided by ``seconds``."""
    good = [record for record in records if record.ok]
    met = sum(record.meets_slo(slo.ttft_seconds, slo.mean_itl_seconds) for record in records)
    lag = summarize_values([record.lag_seconds for record in records])
    cpu_share = _ratio(usage.cpu_seconds, usage.wall_seconds * usage.processes)
    return BenchResult(
        num_requests=len(records),
        completed=len(good),
        seconds=seconds,
        throughput_rps=_ratio(len(good), seconds),
        input_tokens_per_second=_ratio(sum(each.prompt_tokens for each in good), seconds),
        output_tokens_per_second=_ratio(sum(each.answer_tokens for each in records), seconds),
        goodput_rps=_ratio(met, seconds) if slo.has_target else None,
        attainment=_ratio(met, len(records)) if slo.has_target else None,
        attainment_by_length_quartile=_by_length(records, slo) if slo.has_target else None,
        rejected_ratio=_ratio(sum(each.status == 429 for each in records), len(records)),
        failed_ratio=_ratio(len(records) - len(good), len(records)),
        hit_ratio_tokens=_hit_ratio(good),
        ttft_seconds=summarize_values([e.ttft_seconds for e in good if e.ttft_seconds is not None]),
        tbt_seconds=summarize_values([e.tbt_seconds for e in good if e.tbt_seconds is not None]),
        itl_seconds=_summary_of(inter_token_latencies),
        e2e_seconds=summarize_values([each.e2e_seconds for each in good]),
        prompt_tokens=summarize_values([each.prompt_tokens for each in good]),
        answer_tokens=summarize_values([each.answer_tokens for each in good]),
        errors=_errors(records),
        lag_seconds=lag,
        cpu_seconds_per_request=_ratio(usage.cpu_seconds, usage.num_sent),
        cpu_share=cpu_share,
        most_at_once=usage.max_inflight,
        kept_up=(lag["p99"] or 0.0) <= MAX_LAG_SECONDS and cpu_share <= MAX_CPU_SHARE,
    )


def summarize_values(values: Sequence[float]) -> Summary:
    """Return mean, percentiles (linearly interpolated) and maximum; None for each if there are no
    values."""
    if not values:
        return dict.fromkeys(("mean", *(f"p{percent}" for percent in PERCENTILES), "max"))
    found = np.percentile(values, PERCENTILES).tolist()
    named = {f"p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(max(values))}


def _summary_of(gaps: LatencyHistogram) -> Summary:
    if not len(gaps):
        return summarize_values([])
    named = {f"p{percent}": gaps.percentile(percent) for percent in PERCENTILES}
    return {"mean": gaps.mean, **named, "max": gaps.percentile(100)}


def _by_length(records: Sequence[RequestRecord], slo: LatencyTargets) -> list[float | None]:
    """Return the share of requests that met the SLO in each quartile of prompt lengths, shortest
    first. Among equally long prompts, earlier ones count as shorter."""
    ordered = sorted(records, key=lambda record: record.prompt_tokens)
    edges = [len(records) * quarter // QUARTILES for quarter in range(QUARTILES + 1)]
    quarters = [ordered[start:end] for start, end in pairwise(edges)]
    return [
        _ratio(
            sum(each.meets_slo(slo.ttft_seconds, slo.mean_itl_seconds) for each in quarter),
            len(quarter),
        )
        if quarter
        else None
        for quarter in quarters
    ]


def _hit_ratio(good: Sequence[RequestRecord]) -> float | None:
    """Return the share of prompt tokens that were cached; None if the server does not report cached
    tokens."""
    reported = [each for each in good if each.cached_tokens is not None]
    if not reported:
        return None
    cached = sum(each.cached_tokens or 0 for each in reported)
    return _ratio(cached, sum(each.prompt_tokens for each in reported))


def _errors(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Return the kinds of errors, most frequent first, each with the message of its first error."""
    counts: Counter[tuple[int, str]] = Counter()
    messages: dict[tuple[int, str], str] = {}
    for record in records:
        if record.code is not None:
            kind = record.status, record.code
            counts[kind] += 1
            messages.setdefault(kind, record.message)
    return [
        {"status": kind[0], "code": kind[1], "count": count, "message": messages[kind]}
        for kind, count in counts.most_common()
    ]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
