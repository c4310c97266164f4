"""Compare the batched simulation of large fleets with the exact one.

    python -m benchmarks.fleet [--trace FILE] [--workers 16 1024] [--loads 10 15] [--seconds 30]

For each size and load (requests per second per 16 workers), the exact simulator runs the trace, or
synthetic RAG traffic without one. For more than 16 workers, that is copies of the trace with other
blocks, each shifted by a random time. The batched simulation then draws requests from those of the
exact run, at the same rate. So the comparison shows the errors of queues, placement and decoding,
not those of a sample from a smaller cluster. Runs with more than 16 workers last ``--seconds`` of
virtual time and begin empty; in them, three conductors get reports every second. Times are
processor time. Prints a table, and JSON as the last line.
"""

import argparse
import json
import resource
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from baton.traces.diurnal import DiurnalRate
from baton.traces.files import add_jitter, read_trace, scale_rate
from baton.traces.synthetic import TRACE_GENERATORS
from baton.traces.trace import Trace
from benchmarks.machine import describe
from conductor.policy.snapshot import LinkSpeed
from simulator.cluster_config import ClusterConfig
from simulator.hardware import get_gpu
from simulator.large_fleet.cell import run_cell
from simulator.large_fleet.config import LargeFleetConfig
from simulator.large_fleet.failures import Topology
from simulator.large_fleet.sample import WARM_UP_SHARE, sample_of
from simulator.large_fleet.simulation import LargeFleetSimulation
from simulator.model_shapes import get_model_shape
from simulator.result import summarize
from simulator.roofline import roofline
from simulator.scenario import mean_rate

CELL_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Figures:
    attainment: float
    rejected: float
    ttft_p50_seconds: float
    ttft_p90_seconds: float
    itl_p50_seconds: float
    requests: int
    cpu_seconds: float


def cluster_config(num_workers: int) -> ClusterConfig:
    costs = roofline(get_gpu("H100"), get_model_shape("qwen3-8b"))
    is_cell = num_workers <= CELL_WORKERS
    return ClusterConfig(
        num_prefill=num_workers // 2,
        num_decode=num_workers // 2,
        prefill_cost=costs.prefill,
        decode_cost=costs.decode,
        kv_bytes_per_token=costs.kv_bytes_per_token,
        device_tokens=350_000,
        node_tokens=3_000_000,
        link=LinkSpeed(50e9, 50e9),
        num_conductors=1 if is_cell else 3,
        report_seconds=0.0 if is_cell else 1.0,
    )


def base_trace(path: Path | None) -> Trace:
    if path is None:
        return TRACE_GENERATORS["rag"](12_000, 100.0, 0, 1.0)
    return add_jitter(read_trace(path), 0, 3.0)


def superposed(trace: Trace, num_copies: int, seconds: float) -> Trace:
    """Return the first ``seconds`` of ``num_copies`` copies of a trace with blocks of their own,
    each shifted by a random time; what goes beyond the end comes at the start."""
    generator = np.random.default_rng(0)
    span = trace.requests[-1].arrival_seconds
    num_blocks = 1 + max(max(each.block_ids, default=0) for each in trace.requests)
    requests = []
    for copy in range(num_copies):
        shift = generator.random() * span
        for each in trace.requests:
            at = (each.arrival_seconds + shift) % span
            if at < seconds:
                blocks = tuple(block + copy * num_blocks for block in each.block_ids)
                requests.append(replace(each, arrival_seconds=at, block_ids=blocks))
    requests.sort(key=lambda each: each.arrival_seconds)
    return Trace(f"{num_copies} x {trace.name}", trace.block_tokens, tuple(requests))


def compare(
    base: Trace, num_workers: int, load: float, seconds: float, slice_seconds: float
) -> tuple[Figures, Figures]:
    """Return the figures of the exact and of the batched simulation."""
    config = cluster_config(num_workers)
    trace = scale_rate(base, load / mean_rate(base))
    if num_workers > CELL_WORKERS:
        trace = superposed(trace, num_workers // CELL_WORKERS, seconds)
    began = cpu_seconds()
    cluster = run_cell(config, trace)
    exact_seconds = cpu_seconds() - began
    sample = sample_of(cluster, trace.block_tokens)
    num_requests = len(cluster.jobs)
    cluster.jobs = cluster.jobs[int(num_requests * WARM_UP_SHARE) :]
    exact = summarize(cluster)
    duration = trace.requests[-1].arrival_seconds
    rate = num_requests / duration
    fleet = LargeFleetConfig(
        cluster=config,
        topology=Topology(1, 1),
        rate=DiurnalRate(rate, rate, duration),
        duration_seconds=duration,
        slice_seconds=slice_seconds,
    )
    simulation = LargeFleetSimulation(fleet, sample)
    began = cpu_seconds()
    for _ in simulation.run():
        pass
    total = simulation.statistics.total()
    return (
        Figures(
            exact.attainment,
            exact.rejected_ratio,
            exact.ttft_seconds["p50"] or 0.0,
            exact.ttft_seconds["p90"] or 0.0,
            exact.tbt_seconds["p50"] or 0.0,
            num_requests,
            exact_seconds,
        ),
        Figures(
            total.attainment or 0.0,
            total.rejected_ratio or 0.0,
            total.ttft_p50_seconds or 0.0,
            total.ttft_p90_seconds or 0.0,
            total.itl_p50_seconds or 0.0,
            total.num_requests,
            cpu_seconds() - began,
        ),
    )


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def line(name: str, figures: Figures) -> str:
    return (
        f"  {name:8} within SLO {figures.attainment:6.1%}, rejected {figures.rejected:6.1%}, "
        f"TTFT p50 {figures.ttft_p50_seconds:6.3f} p90 {figures.ttft_p90_seconds:6.3f} s, "
        f"ITL p50 {figures.itl_p50_seconds * 1e3:5.1f} ms, "
        f"{figures.requests / figures.cpu_seconds:8,.0f} requests per processor second"
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[16])
    parser.add_argument("--loads", type=float, nargs="+", default=[10, 15, 19, 21, 23.3])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--slice-seconds", type=float, default=0.5)
    options = parser.parse_args(arguments)
    machine, base = describe(), base_trace(options.trace)
    print(machine)
    rows: list[dict[str, Any]] = []
    for workers in options.workers:
        for load in options.loads:
            exact, batched = compare(base, workers, load, options.seconds, options.slice_seconds)
            rate = load * workers / CELL_WORKERS
            print(f"{workers} workers, {rate:g} requests/s")
            print(f"{line('exact', exact)}\n{line('batched', batched)}", flush=True)
            values = {"exact": asdict(exact), "batched": asdict(batched)}
            rows.append({"workers": workers, "rate_rps": rate, **values})
    print(json.dumps({"machine": machine, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
