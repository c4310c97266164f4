"""``baton plan`` finds the best split of GPUs into prefill and decode workers, by simulation."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from baton.console import open_console
from baton.errors import BatonError, Invalid
from baton.plots import plot_pareto, prepare_plots
from command_line.simulate import show_progress
from conductor.policy.policies import DEFAULT_POLICY
from simulator.cluster import SimulatedCluster
from simulator.hardware import get_gpu
from simulator.result import Percentiles, summarize
from simulator.scenario import Scenario, SimulatedHardware, Traffic

MAX_PLANNED_WORKERS = 256
"""The maximum number of workers. It is limited because each possible split takes a simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSplit:
    """The simulated performance of one split. ``dollars_per_million_tokens`` is the price of all
    GPUs for the duration of the trace, divided by the tokens (in millions) of the answers within
    their SLO; it is None if there are no such tokens. ``tokens_per_second_per_user`` is the median
    over requests."""

    prefill: int
    decode: int
    meets_target: bool
    attainment: float
    goodput_rps: float
    rejected_ratio: float
    dollars_per_million_tokens: float | None
    tokens_per_second_per_user: float | None
    ttft_seconds: Percentiles
    tbt_seconds: Percentiles

    @property
    def name(self) -> str:
        return f"{self.prefill}+{self.decode}"


def run_plan(
    traffic: Traffic,
    hardware: SimulatedHardware,
    num_gpus: int,
    target: float,
    plots: Path | None,
    as_json: bool,
) -> None:
    """Simulate every split and print the results, best first. Raises Invalid for a wrong option,
    before the first simulation begins, and BatonError if no split meets the target."""
    prepare_plots(plots)
    num_workers = _num_workers(num_gpus, hardware.gpus_per_worker)
    if not 0 < target <= 1:
        raise Invalid(f"--target is {target:g}; it must be above 0 and at most 1")
    config = hardware.config(1, num_workers - 1)
    dollars_per_hour = (
        num_workers * hardware.gpus_per_worker * get_gpu(hardware.gpu).dollars_per_hour
    )
    trace, splits = traffic.trace_at_requested_rate, list[PoolSplit]()
    with show_progress() as show:
        for prefill in range(1, num_workers):
            show(f"{prefill} prefill and {num_workers - prefill} decode workers")
            config = hardware.config(prefill, num_workers - prefill)
            cluster = Scenario(config=config).run(trace, DEFAULT_POLICY)
            splits.append(_evaluate_split(cluster, dollars_per_hour, target))
    splits.sort(key=_sort_key)
    if plots is not None:
        _plot(plots, splits)
    if as_json:
        print(
            json.dumps(
                {
                    "meets": splits[0].meets_target,
                    "target": target,
                    "rate_rps": traffic.rate,
                    "best": asdict(splits[0]),
                    "splits": [asdict(each) for each in splits],
                }
            )
        )
    else:
        open_console().print(_table(splits))
    if not splits[0].meets_target:
        raise BatonError(_miss_message(splits[0], num_workers, target))


def _num_workers(num_gpus: int, gpus_per_worker: int) -> int:
    if gpus_per_worker < 1:
        raise Invalid(f"--gpus-per-worker is {gpus_per_worker}; it must be at least 1")
    num_workers = num_gpus // gpus_per_worker
    if not 2 <= num_workers <= MAX_PLANNED_WORKERS:
        raise Invalid(
            f"--gpus {num_gpus} with {gpus_per_worker} GPUs per worker makes "
            f"{max(num_workers, 0)} worker(s); there must be 2 to {MAX_PLANNED_WORKERS} workers"
        )
    return num_workers


def _evaluate_split(cluster: SimulatedCluster, dollars_per_hour: float, target: float) -> PoolSplit:
    outcome = summarize(cluster)
    jobs, median_itl = cluster.jobs, outcome.tbt_seconds["p50"]
    hours = (jobs[-1].arrival.arrival_seconds - jobs[0].arrival.arrival_seconds) / 3600
    slo = cluster.config.itl_slo_seconds
    tokens = sum(job.arrival.num_answer_tokens for job in jobs if job.meets_slo(slo))
    return PoolSplit(
        prefill=cluster.config.num_prefill,
        decode=cluster.config.num_decode,
        meets_target=outcome.attainment >= target,
        attainment=outcome.attainment,
        goodput_rps=outcome.goodput_rps,
        rejected_ratio=outcome.rejected_ratio,
        dollars_per_million_tokens=dollars_per_hour * hours / tokens * 1e6 if tokens else None,
        tokens_per_second_per_user=1 / median_itl if median_itl else None,
        ttft_seconds=outcome.ttft_seconds,
        tbt_seconds=outcome.tbt_seconds,
    )


def _sort_key(split: PoolSplit) -> tuple[float, float]:
    """Return a key that sorts splits by attainment, highest first, since all splits cost the same;
    then by token rate."""
    return -split.attainment, -(split.tokens_per_second_per_user or 0.0)


def _miss_message(best: PoolSplit, num_workers: int, target: float) -> str:
    return (
        f"no split of {num_workers} workers has {target:.0%} of the requests within their SLO; the "
        f"best is {best.prefill} prefill and {best.decode} decode with {best.attainment:.1%}"
    )


def _table(splits: Sequence[PoolSplit]) -> Table:
    table = Table(
        "prefill", "decode", "within SLO", "goodput", "rejected", "TTFT p99 (s)", "ITL p99 (s)",
        "tokens/s per user", "$ per million tokens", box=None,
    )  # fmt: skip
    for split in splits:
        table.add_row(
            str(split.prefill),
            str(split.decode),
            f"{split.attainment:.1%}{'' if split.meets_target else ' *'}",
            f"{split.goodput_rps:.2f}/s",
            f"{split.rejected_ratio:.1%}",
            _format_or_dash(split.ttft_seconds["p99"], ".2f"),
            _format_or_dash(split.tbt_seconds["p99"], ".4f"),
            _format_or_dash(split.tokens_per_second_per_user, ".1f"),
            _format_or_dash(split.dollars_per_million_tokens, ".2f"),
        )
    return table


def _format_or_dash(value: float | None, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)


def _plot(folder: Path, splits: Sequence[PoolSplit]) -> None:
    """Plot the splits that have at least one answer within its SLO."""
    points = []
    for split in splits:
        speed, dollars = split.tokens_per_second_per_user, split.dollars_per_million_tokens
        if speed is not None and dollars is not None:
            points.append((speed, dollars, split.name))
    plot_pareto(folder / "pareto.png", points)
