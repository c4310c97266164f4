"""``baton plan`` finds the best use of GPUs by simulation: as mixed workers, which do everything,
as prefill and decode workers, or as both (hybrid)."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, product
from pathlib import Path

from rich.table import Table

from baton.clock import SystemClock
from baton.core.cost import PrefillCost
from baton.errors import BatonError, Invalid
from baton.reports.console import open_console
from baton.reports.plots import plot_prices, prepare_plots
from command_line.pareto import ParetoSweep
from command_line.simulate import show_progress
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.hardware import get_gpu
from simulator.parallelism import POOLS
from simulator.planned_workers import (
    SizeOptions,
    Workers,
    between,
    first_splits,
    hybrids,
)
from simulator.rate_search import HighestRate, RateSearch
from simulator.result import Percentiles, summarize
from simulator.running_costs import RunningCosts, parse_prices, running_costs
from simulator.scenario import Traffic, mean_rate
from simulator.simulated_hardware import SimulatedHardware
from simulator.simulation_pool import Simulation, SimulationPool, choose_num_processes
from simulator.sweep import (
    MAX_CONFIGURATIONS,
    SweptConfiguration,
    check_sweep_size,
    thin_out,
)

MAX_PLANNED_WORKERS = 256
"""The maximum number of workers. It is limited because each split takes a simulation."""

MAX_ROWS = 24
"""The maximum number of rows of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSplit:
    """The simulated performance of a number of prefill, decode and mixed workers.
    ``dollars_per_million_tokens`` is the price of their GPUs for the duration of the trace, divided
    by the tokens (in millions) of the answers within their SLO; it is None if there are no such
    tokens. ``tokens_per_second_per_user`` is the median over requests."""

    workers: Workers
    meets_target: bool
    attainment: float
    goodput_rps: float
    rejected_ratio: float
    dollars_per_million_tokens: float | None
    tokens_per_second_per_user: float | None
    ttft_seconds: Percentiles
    tbt_seconds: Percentiles

    def as_dict(self) -> dict[str, object]:
        figures = {each.name: getattr(self, each.name) for each in fields(self)}
        workers = figures.pop("workers")
        return {"kind": workers.kind, **workers.as_dict(), **figures}


def run_plan(
    traffic: Traffic,
    hardware: SimulatedHardware,
    num_gpus: int,
    target: float,
    plots: Path | None,
    as_json: bool,
    pareto: Path | None = None,
    prices: Sequence[str] = (),
    processes: int | None = None,
) -> None:
    """Simulate splits, mixed workers, and some hybrids, find the highest rate of each kind, and
    print the results, best first. With ``pareto``, sweep them over rates, and write the results to
    this folder. ``prices`` are prices per hour, like ``H100=1.99``. ``processes`` is the number of
    simulations at a time, which changes no result; if None, see
    :func:`simulator.simulation_pool.choose_num_processes`. Raises Invalid for a wrong option,
    before the first simulation begins, and BatonError if nothing meets the target."""
    prepare_plots(plots)
    prepare_plots(pareto, "--pareto")
    if not 0 < target <= 1:
        raise Invalid(f"--target is {target:g}; it must be above 0 and at most 1")
    costs = running_costs(get_gpu(hardware.gpu), parse_prices(prices))
    clusters = PlannedClusters.of(hardware, num_gpus, costs)
    trace = traffic.trace_at_requested_rate
    if pareto is not None:
        check_sweep_size(MAX_CONFIGURATIONS, len(trace.requests))
    num_processes = choose_num_processes(processes, len(trace.requests))
    with show_progress() as show, SimulationPool(trace, num_processes) as pool:
        splits, highest = _simulate_all(pool, clusters, target, show)
        if pareto is not None:
            highest_rps = max(each.rate_rps for each in highest) or mean_rate(trace)
            sweep = ParetoSweep(pareto, traffic, hardware, num_gpus, target, costs, highest_rps)
            options = [_swept(clusters, each) for each in _to_sweep(splits, highest)]
            sweep.run(options, pool, show, SystemClock())
    advice = _advice(splits[0], highest, target)
    if plots is not None:
        _plot(plots, splits)
    if as_json:
        print(json.dumps(_object(splits, highest, advice, target, traffic.rate)))
    else:
        open_console().print(_table(splits))
        if len(splits) > MAX_ROWS:
            print(f"and {len(splits) - MAX_ROWS} others, which --json has")
        print(advice)
        if pareto is not None:
            print(f"{pareto} has the trade-off between throughput and speed.")
    if not splits[0].meets_target:
        raise BatonError(_miss_message(splits[0], num_gpus, target))


@dataclass(frozen=True, slots=True)
class PlannedClusters:
    """Clusters on a number of GPUs. All of them have the same TTFT SLO: on top of the prefill time
    on the smallest worker, whatever sizes a cluster has."""

    hardware: SimulatedHardware
    num_gpus: int
    sizes: SizeOptions
    deadline_cost: PrefillCost
    costs: RunningCosts

    @classmethod
    def of(
        cls, hardware: SimulatedHardware, num_gpus: int, costs: RunningCosts
    ) -> "PlannedClusters":
        """Raises Invalid for wrong options, for sizes that don't fit the model or into memory, and
        if there are too few or too many workers."""
        hardware.check()
        sizes = SizeOptions.of(hardware, num_gpus)
        for size in {*sizes.prefill, *sizes.decode, *sizes.mixed}:
            hardware.worker_costs(size)
        _check_num_workers(num_gpus, sizes)
        deadline_cost = hardware.worker_costs(sizes.smallest).prefill
        return cls(hardware, num_gpus, sizes, deadline_cost, costs)

    def config(self, workers: Workers) -> ClusterConfig:
        hardware = self.hardware
        if not hardware.fixes_gpus_per_worker:
            hardware = hardware.with_parallelism(workers.parallelism)
        config = hardware.config(*workers.counts.values())
        return replace(config, deadline_cost=self.deadline_cost)

    def dollars_per_hour(self, workers: Workers) -> float:
        return workers.num_gpus * self.costs.dollars_per_gpu_hour


def _simulate_all(
    pool: SimulationPool, clusters: PlannedClusters, target: float, show: Callable[[str], None]
) -> tuple[list[PoolSplit], list[HighestRate]]:
    """Return all simulated clusters, best first, and the one of each kind with the highest rate."""
    sizes, num_gpus = clusters.sizes, clusters.num_gpus

    def simulation(workers: Workers) -> Simulation[PoolSplit]:
        judge = partial(_evaluate, workers, clusters.dollars_per_hour(workers), target)
        return Simulation(label=f"{workers} workers", config=clusters.config(workers), judge=judge)

    def evaluate_all(options: Iterable[Workers]) -> list[PoolSplit]:
        return sorted(pool.run_all([*map(simulation, options)], show), key=_sort_key)

    pools = sizes.splits(num_gpus)
    splits = evaluate_all(first_splits(pools))
    while more := between(pools, {each.workers for each in splits}, splits[0].workers):
        splits = sorted((*splits, *evaluate_all(more)), key=_sort_key)
    mixed = evaluate_all(sizes.mixed_workers(num_gpus))
    search = RateSearch(pool, clusters.config, clusters.hardware.tbt_slo, target, show)
    highest = search.best_of_each([_to_search(mixed), _to_search(splits)])
    models = product(
        dict.fromkeys((splits[0].workers, highest[1].workers)),
        dict.fromkeys((mixed[0].workers, highest[0].workers)),
    )
    options = list(chain.from_iterable(hybrids(split, like, num_gpus) for split, like in models))
    if not options:  # the workers of the best are too large
        ranked = product(splits, mixed)
        found = (list(hybrids(split.workers, like.workers, num_gpus)) for split, like in ranked)
        options = next(filter(None, found), [])
    both = evaluate_all(dict.fromkeys(options))
    if both:
        highest += search.best_of_each([_to_search(both)])
    return sorted((*splits, *mixed, *both), key=_sort_key), highest


def _to_search(evaluated: Sequence[PoolSplit]) -> list[Workers]:
    """Return the workers that meet the target at the requested rate, or all if none do."""
    meeting = [each.workers for each in evaluated if each.meets_target]
    return meeting or [each.workers for each in evaluated]


def _to_sweep(splits: Sequence[PoolSplit], highest: Sequence[HighestRate]) -> list[Workers]:
    """Return the workers with the highest rates and, evenly spread, as many others as a sweep may
    have."""
    best = list(dict.fromkeys(each.workers for each in highest))
    others = sorted({each.workers for each in splits}.difference(best), key=str)
    return [*best, *thin_out(others, MAX_CONFIGURATIONS - len(best))]


def _swept(clusters: PlannedClusters, workers: Workers) -> SweptConfiguration:
    return SweptConfiguration(
        label=str(workers),
        kind=workers.kind,
        workers=workers.counts,
        num_gpus=workers.num_gpus,
        gpus_per_worker={
            pool: size.num_gpus for pool, size in workers.parallelism._asdict().items()
        },
        parallelism=workers.parallelism,
        cluster=clusters.config(workers),
    )


def _advice(best: PoolSplit, highest: Sequence[HighestRate], target: float) -> str:
    """Say what is best at the requested rate, and up to which rate each kind meets the target."""
    lines = [
        f"{best.workers} is best at this rate, with {best.attainment:.1%} of the requests within "
        "their SLO."
    ]
    ranked = sorted(highest, key=lambda each: each.rate_rps)
    for each in ranked:
        more = " and more" if each.may_be_higher else ""
        rates = f"up to {each.rate_rps:.3g} requests/s{more}" if each.rate_rps else "at no rate"
        lines.append(f"{each.workers} keeps {target:.0%} within their SLO {rates}.")
    top, lower = ranked[-1], ranked[:-1]
    if top.rate_rps and lower and lower[-1].rate_rps and not lower[-1].may_be_higher:
        factor = top.rate_rps / lower[-1].rate_rps
        lines.append(
            f"Above {lower[-1].rate_rps:.3g} requests/s only {top.workers} does, up to "
            f"{factor:.2f} times that rate."
        )
    return "\n".join(lines)


def _object(
    splits: Sequence[PoolSplit],
    highest: Sequence[HighestRate],
    advice: str,
    target: float,
    rate: float | None,
) -> dict[str, object]:
    """Return the JSON output."""
    return {
        "meets": splits[0].meets_target,
        "target": target,
        "rate_rps": rate,
        "best": splits[0].as_dict(),
        "splits": [each.as_dict() for each in splits],
        "highest_rates": [each.as_dict() for each in highest],
        "advice": advice,
    }


def _check_num_workers(num_gpus: int, sizes: SizeOptions) -> None:
    """Raise Invalid if the smallest workers are too few or too many."""
    each = sizes.smallest.num_gpus
    num_workers = num_gpus // each
    if not 2 <= num_workers <= MAX_PLANNED_WORKERS:
        raise Invalid(
            f"--gpus {num_gpus} with {each} GPUs per worker makes {max(num_workers, 0)} worker(s); "
            f"there must be 2 to {MAX_PLANNED_WORKERS} workers"
        )
    least = min(size.num_gpus for size in sizes.prefill)
    least += min(size.num_gpus for size in sizes.decode)
    if num_gpus < least:
        raise Invalid(
            f"--gpus is {num_gpus}; a prefill and a decode worker need at least {least} GPUs"
        )


def _evaluate(
    workers: Workers, dollars_per_hour: float, target: float, cluster: SimulatedCluster
) -> PoolSplit:
    outcome = summarize(cluster)
    jobs, median_itl = cluster.jobs, outcome.tbt_seconds["p50"]
    hours = (jobs[-1].arrival.arrival_seconds - jobs[0].arrival.arrival_seconds) / 3600
    slo = cluster.config.itl_slo_seconds
    tokens = sum(job.arrival.num_answer_tokens for job in jobs if job.meets_slo(slo))
    return PoolSplit(
        workers=workers,
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
    """Return a key that sorts splits by attainment, highest first, since all splits have the same
    GPUs; then by token rate."""
    return -split.attainment, -(split.tokens_per_second_per_user or 0.0)


def _miss_message(best: PoolSplit, num_gpus: int, target: float) -> str:
    return (
        f"no use of {num_gpus} GPUs has {target:.0%} of the requests within their SLO; the "
        f"best is {best.workers} with {best.attainment:.1%}"
    )


def _table(splits: Sequence[PoolSplit]) -> Table:
    table = Table(
        *POOLS, "within SLO", "goodput", "rejected", "TTFT p99 (s)",
        "ITL p99 (s)", "tokens/s per user", "$ per million tokens", box=None,
    )  # fmt: skip
    shows_sizes = any(split.workers.has_parallelism for split in splits)
    for split in splits[:MAX_ROWS]:
        table.add_row(
            *split.workers.pool_texts(with_sizes=shows_sizes),
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
            points.append((speed, dollars, str(split.workers)))
    plot_prices(folder / "prices.png", points)
