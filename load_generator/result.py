"""What came of a load, in the numbers that the field compares."""

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
"""In the 99th percentile, for a generator that has kept up; timers are right to a millisecond."""

MAX_CPU_SHARE = 0.9
"""Of a core, for each process of it."""

Summary = dict[str, float | None]
"""``mean``, ``p50``, ``p90``, ``p95``, ``p99``, ``max``; None where there is nothing to tell of."""


@dataclass(frozen=True, slots=True)
class SloTargets:
    """Seconds; None: nothing is asked for."""

    ttft: float | None
    tbt: float | None

    @property
    def given(self) -> bool:
        return self.ttft is not None or self.tbt is not None


@dataclass(frozen=True, slots=True)
class GeneratorUsage:
    """The generator's own. ``wall_seconds`` of each of ``processes``."""

    cpu_seconds: float
    wall_seconds: float
    processes: int
    num_sent: int
    most_at_once: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Of what was measured. ``tbt_seconds`` are the mean gaps of answers, ``itl_seconds`` all gaps
    between two events, one by one. ``goodput_rps`` counts requests within their SLO per second."""

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


def summarise(
    records: Sequence[RequestRecord],
    gaps: LatencyHistogram,
    seconds: float,
    slo: SloTargets,
    effort: GeneratorUsage,
) -> BenchResult:
    """``seconds`` is what rates are by."""
    good = [record for record in records if record.ok]
    met = sum(record.meets(slo.ttft, slo.tbt) for record in records)
    lag = summary([record.lag_seconds for record in records])
    cpu_share = _ratio(effort.cpu_seconds, effort.wall_seconds * effort.processes)
    return BenchResult(
        num_requests=len(records),
        completed=len(good),
        seconds=seconds,
        throughput_rps=_ratio(len(good), seconds),
        input_tokens_per_second=_ratio(sum(each.prompt_tokens for each in good), seconds),
        output_tokens_per_second=_ratio(sum(each.answer_tokens for each in records), seconds),
        goodput_rps=_ratio(met, seconds) if slo.given else None,
        attainment=_ratio(met, len(records)) if slo.given else None,
        attainment_by_length_quartile=_by_length(records, slo) if slo.given else None,
        rejected_ratio=_ratio(sum(each.status == 429 for each in records), len(records)),
        failed_ratio=_ratio(len(records) - len(good), len(records)),
        hit_ratio_tokens=_hit_ratio(good),
        ttft_seconds=summary([e.ttft_seconds for e in good if e.ttft_seconds is not None]),
        tbt_seconds=summary([e.tbt_seconds for e in good if e.tbt_seconds is not None]),
        itl_seconds=_summary_of(gaps),
        e2e_seconds=summary([each.e2e_seconds for each in good]),
        prompt_tokens=summary([each.prompt_tokens for each in good]),
        answer_tokens=summary([each.answer_tokens for each in good]),
        errors=_errors(records),
        lag_seconds=lag,
        cpu_seconds_per_request=_ratio(effort.cpu_seconds, effort.num_sent),
        cpu_share=cpu_share,
        most_at_once=effort.most_at_once,
        kept_up=(lag["p99"] or 0.0) <= MAX_LAG_SECONDS and cpu_share <= MAX_CPU_SHARE,
    )


def summary(values: Sequence[float]) -> Summary:
    """Between two values, a line is drawn."""
    if not values:
        return dict.fromkeys(("mean", *(f"p{percent}" for percent in PERCENTILES), "max"))
    found = np.percentile(values, PERCENTILES).tolist()
    named = {f"p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(max(values))}


def _summary_of(gaps: LatencyHistogram) -> Summary:
    if not len(gaps):
        return summary([])
    named = {f"p{percent}": gaps.percentile(percent) for percent in PERCENTILES}
    return {"mean": gaps.mean, **named, "max": gaps.percentile(100)}


def _by_length(records: Sequence[RequestRecord], slo: SloTargets) -> list[float | None]:
    """Shortest prompts first. Of equally long ones, those that came first count as shorter."""
    ordered = sorted(records, key=lambda record: record.prompt_tokens)
    edges = [len(records) * quarter // QUARTILES for quarter in range(QUARTILES + 1)]
    quarters = [ordered[start:end] for start, end in pairwise(edges)]
    return [
        _ratio(sum(each.meets(slo.ttft, slo.tbt) for each in quarter), len(quarter))
        if quarter
        else None
        for quarter in quarters
    ]


def _hit_ratio(good: Sequence[RequestRecord]) -> float | None:
    """None where the server does not tell."""
    told = [each for each in good if each.cached_tokens is not None]
    if not told:
        return None
    cached = sum(each.cached_tokens or 0 for each in told)
    return _ratio(cached, sum(each.prompt_tokens for each in told))


def _errors(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Most frequent first, with what the first of them said."""
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
