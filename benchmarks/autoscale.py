"""Compare autoscaled pools with the best fixed pools, in simulation.

    python -m benchmarks.autoscale [--trace FILE] [--only NAME …] [--processes 2] [--seed 1]

Workers are L40S GPUs with Qwen3-8B (prefill at half of the peak FLOPS, decode at 0.7 of the memory
bandwidth) and take a minute to start. ``day`` is synthetic chat over two days, each shortened to an
hour, in which the rate rises from ``low`` to ``high`` requests per second and falls again.
``conversation`` is a trace (Mooncake's) at half its speed. ``tide`` has the same requests in the
same order, with the arrival times of a synthetic day. SLO: a TTFT of 2 s plus the prompt's own
prefill time, and a mean inter-token latency of 50 ms.

Each run begins with the pools that the first minutes need. Autoscaled pools are compared with the
best fixed pools that cost no more, and with the cheapest fixed pools in which at least as many
requests meet the SLO. A worker's hours count from when it is requested until it has stopped. All
figures except the measured run time are the same in every run. Prints a table, and JSON as the last
line.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from baton.core.worker_kinds import WORKER_KINDS
from baton.pools.scaling_policy import PoolBounds, ScalingConfig
from baton.traces.diurnal import DiurnalRate, with_diurnal_rate
from baton.traces.files import add_jitter, read_trace, scale_rate
from baton.traces.synthetic import TRACE_GENERATORS
from baton.traces.trace import Trace
from conductor.planner import PlannerConfig
from conductor.policy.policies import get_policy
from conductor.policy.sizing import SizingConfig
from conductor.policy.snapshot import LinkSpeed
from simulator.autoscaling import SimulatedAutoscalingConfig
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.hardware import get_gpu
from simulator.model_shapes import get_model_shape
from simulator.result import summarize
from simulator.roofline import roofline
from testkit.machine import SYSTEM_CLOCK, describe

PERIOD_SECONDS = 3600.0
REPORT_SECONDS = 1.0
MAX_WORKERS = 16
"""The maximum size of each pool."""


@dataclass(frozen=True, slots=True)
class AutoscaleScenario:
    """A load. ``kind`` names a kind of synthetic traffic; if it is empty, the trace is used.
    ``tide`` is the request rate over time; if it is None, requests arrive as in the trace, but
    ``factor`` times as fast. ``start`` has the numbers of prefill and decode workers at the
    beginning."""

    name: str
    num_requests: int
    start: tuple[int, int]
    tide: DiurnalRate | None = None
    kind: str = ""
    factor: float = 1.0

    def traffic(self, file: Path | None, seed: int) -> Trace:
        if self.kind:
            assert self.tide is not None
            trace = TRACE_GENERATORS[self.kind](
                self.num_requests, self.tide.mean_per_second, seed, 1.0
            )
            return with_diurnal_rate(trace, self.tide)
        assert file is not None
        known = _jittered(file, seed)
        known = replace(known, requests=known.requests[: self.num_requests])
        return (
            with_diurnal_rate(known, self.tide)
            if self.tide is not None
            else scale_rate(known, self.factor)
        )


SCENARIOS = {
    each.name: each
    for each in (
        AutoscaleScenario(
            "day", 28_800, (1, 3), DiurnalRate(1.0, 7.0, PERIOD_SECONDS), kind="chat"
        ),
        AutoscaleScenario("conversation", 12_000, (8, 6), factor=0.5),
        AutoscaleScenario("tide", 12_000, (3, 2), DiurnalRate(0.5, 3.5, PERIOD_SECONDS)),
    )
}


@dataclass(frozen=True, slots=True)
class AutoscaleRow:
    """One row of the table. ``prefill`` and ``decode`` are pool sizes, or mean sizes."""

    name: str
    prefill: float
    decode: float
    attainment: float
    rejected: float
    worker_hours: float
    ttft_p99: float | None
    num_steps: int = 0


@cache
def _jittered(file: Path, seed: int) -> Trace:
    return add_jitter(read_trace(file), seed)


@cache
def _traffic(scenario: AutoscaleScenario, file: Path | None, seed: int) -> Trace:
    return scenario.traffic(file, seed)


def cluster_config(prefill: int, decode: int) -> ClusterConfig:
    costs = roofline(get_gpu("L40S"), get_model_shape("qwen3-8b"))
    return ClusterConfig(
        num_prefill=prefill,
        num_decode=decode,
        prefill_cost=costs.prefill,
        decode_cost=costs.decode,
        kv_bytes_per_token=costs.kv_bytes_per_token,
        device_tokens=costs.kv_capacity_tokens,
        node_tokens=1_500_000,
        link=LinkSpeed(12.5e9, 25e9),
        report_seconds=REPORT_SECONDS,
    )


def elastic_config(sizing: SizingConfig, scaling: ScalingConfig) -> SimulatedAutoscalingConfig:
    planner = PlannerConfig(sizing=sizing)
    return SimulatedAutoscalingConfig(planner=planner, scaling=scaling)


def default_elastic() -> SimulatedAutoscalingConfig:
    return elastic_config(
        SizingConfig(max_prefill=MAX_WORKERS, max_decode=MAX_WORKERS),
        ScalingConfig(prefill=PoolBounds(1, MAX_WORKERS), decode=PoolBounds(1, MAX_WORKERS)),
    )


def elastic(
    scenario: AutoscaleScenario, file: Path | None, seed: int, config: SimulatedAutoscalingConfig
) -> AutoscaleRow:
    traffic = _traffic(scenario, file, seed)
    cluster = SimulatedCluster(
        replace(cluster_config(*scenario.start), autoscaling=config), traffic, get_policy("baton")
    )
    cluster.run()
    assert cluster.autoscaler is not None
    end = traffic.requests[-1].arrival_seconds
    paid = cluster.autoscaler.worker_seconds(end)
    means = [paid[role] / end for role in WORKER_KINDS]
    return _row(cluster, "follows the load", means, len(cluster.autoscaler.steps))


def fixed(
    scenario: AutoscaleScenario,
    file: Path | None,
    seed: int,
    split: tuple[int, int],
    most_misses: int,
) -> AutoscaleRow | None:
    """Simulate pools of fixed sizes. If more than ``most_misses`` requests miss their SLO, stop and
    return None."""
    traffic = _traffic(scenario, file, seed)
    cluster = SimulatedCluster(cluster_config(*split), traffic, get_policy("baton"))
    cluster.run(most_misses + 1)
    return None if cluster.stopped_early else _row(cluster, "fixed", split, 0)


def _row(
    cluster: SimulatedCluster, name: str, sizes: Sequence[float], num_steps: int
) -> AutoscaleRow:
    outcome = summarize(cluster)
    hours = sum(sizes) * cluster.jobs[-1].arrival.arrival_seconds / 3600
    return AutoscaleRow(
        name,
        sizes[0],
        sizes[1],
        outcome.attainment,
        outcome.rejected_ratio,
        hours,
        outcome.ttft_seconds["p99"],
        num_steps,
    )


def compared(
    scenario: AutoscaleScenario,
    file: Path | None,
    seed: int,
    config: SimulatedAutoscalingConfig,
    processes: int,
) -> Iterator[AutoscaleRow]:
    """Yield the autoscaled pools, then the best fixed pools that cost no more, then the cheapest
    fixed pools in which at least as many requests meet the SLO, if there are any."""
    follows = elastic(scenario, file, seed, config)
    yield follows
    num_requests = len(_traffic(scenario, file, seed).requests)
    misses = round((1 - follows.attainment) * num_requests)
    mean = max(math.floor(follows.prefill + follows.decode), 2)
    with ProcessPoolExecutor(processes) as pool:

        def best(total: int, most_misses: int) -> AutoscaleRow | None:
            splits = _splits(total, follows)
            run = partial(fixed, scenario, file, seed, most_misses=most_misses)
            found = [row for row in pool.map(run, splits) if row is not None]
            return max(found, key=_by_attainment, default=None)

        as_cheap = best(mean, num_requests)
        assert as_cheap is not None
        yield replace(as_cheap, name="best fixed as cheap")
        cheapest = _cheapest(partial(best, most_misses=misses), mean)
        if cheapest is not None:
            yield replace(cheapest, name="cheapest fixed as good")


def _cheapest(good_enough: Callable[[int], AutoscaleRow | None], total: int) -> AutoscaleRow | None:
    """Find the smallest total number of workers for which ``good_enough`` returns a row; return
    that row. If ``total`` is good enough, search downwards from there, else upwards. Return None if
    no number is good enough."""
    found = good_enough(total)
    if found is None:
        totals = range(total + 1, 2 * MAX_WORKERS + 1)
        return next((row for row in map(good_enough, totals) if row is not None), None)
    for fewer in range(total - 1, 1, -1):
        row = good_enough(fewer)
        if row is None:
            break
        found = row
    return found


def _by_attainment(row: AutoscaleRow) -> float:
    return row.attainment


def _splits(total: int, follows: AutoscaleRow) -> list[tuple[int, int]]:
    """Return up to five ways to split ``total`` workers into (prefill, decode): those closest to
    the mean ratio of the autoscaled pools."""
    middle = total * follows.prefill / (follows.prefill + follows.decode)
    ranked = sorted(range(1, total), key=lambda prefill: abs(prefill - middle))
    return [(prefill, total - prefill) for prefill in sorted(ranked[:5])]


HEADER = (
    f"{'':26}{'prefill':>8}{'decode':>8}{'attained':>10}{'refused':>9}{'TTFT p99':>10}"
    f"{'worker-hours':>14}{'changes':>9}"
)


def format_row(row: AutoscaleRow) -> str:
    ttft = f"{row.ttft_p99:.2f}" if row.ttft_p99 is not None else "-"
    return (
        f"{row.name:26}{row.prefill:8.2f}{row.decode:8.2f}{row.attainment:10.4f}"
        f"{row.rejected:9.4f}{ttft:>10}{row.worker_hours:14.2f}{row.num_steps:9}"
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(SCENARIOS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine, f"seed {options.seed}")
    result: dict[str, Any] = {"benchmark": "autoscale", "machine": machine, "seed": options.seed}
    for name in options.only or SCENARIOS:
        scenario = SCENARIOS[name]
        if not scenario.kind and options.trace is None:
            continue
        began = SYSTEM_CLOCK()
        print(f"\n{name}\n{HEADER}", flush=True)
        rows = []
        config = default_elastic()
        for row in compared(scenario, options.trace, options.seed, config, options.processes):
            rows.append(asdict(row))
            print(format_row(row), flush=True)
        result[name] = rows
        print(f"{SYSTEM_CLOCK() - began:.0f} s", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
