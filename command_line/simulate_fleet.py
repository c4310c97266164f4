"""``baton simulate-fleet`` simulates a large fleet for a day, with an approximation of the
placement policy that places many requests at a time."""

import json
import math
import resource
import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from baton.clock import SystemClock
from baton.console import open_console
from baton.errors import Invalid
from baton.pools.scaling_policy import PoolBounds, ScalingConfig
from command_line.simulate_fleet_options import (
    FleetAutoscalingOptions,
    FleetOptions,
    FleetTrafficOptions,
)
from command_line.simulate_options import HardwareOptions
from conductor.planner import PlannerConfig
from conductor.policy.sizing import SizingConfig
from simulator.cluster_config import ClusterConfig
from simulator.flag_checks import check_at_least, check_positive
from simulator.large_fleet.cell import simulate_cell
from simulator.large_fleet.config import FleetAutoscaling, LargeFleetConfig, daily_rate
from simulator.large_fleet.failures import Topology, parse_failures
from simulator.large_fleet.sample import RequestSample
from simulator.large_fleet.simulation import LargeFleetSimulation
from simulator.large_fleet.statistics import HOUR_SECONDS, FleetResult
from simulator.scenario import Traffic


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What a simulation took: wall time, processor time, the process's largest resident memory, and
    rates per second of wall time."""

    wall_seconds: float
    cpu_seconds: float
    max_resident_bytes: int
    events: int
    events_per_second: float
    requests_per_second: float


def run_simulate_fleet(
    load: FleetTrafficOptions,
    machines: HardwareOptions,
    fleet: FleetOptions,
    scaling: FleetAutoscalingOptions,
    as_json: bool,
) -> None:
    """Simulate a fleet and print the results by hour. Raises Invalid for a wrong option, before the
    simulation begins."""
    config = fleet_config(load, machines, fleet, scaling)
    print(f"simulating {load.cell_workers} workers exactly", file=sys.stderr)
    sample = simulate_cell(
        _traffic(load), config.cluster, config.rate.mean_per_second, load.cell_workers
    )
    simulation = LargeFleetSimulation(config, sample)
    figures = run_with_progress(simulation, config.duration_seconds)
    if as_json:
        print(json.dumps(_object(simulation, figures, sample)))
    else:
        _print(simulation, figures)


def fleet_config(
    load: FleetTrafficOptions,
    machines: HardwareOptions,
    fleet: FleetOptions,
    scaling: FleetAutoscalingOptions,
) -> LargeFleetConfig:
    for flag, value in {"--requests": load.requests, "--hours": load.hours}.items():
        check_positive(flag, value)
    if not 1 <= load.tide < math.inf:
        raise Invalid(f"--tide is {load.tide:g}; it must be finite and at least 1")
    topology = Topology(fleet.racks, fleet.zones)
    seconds = load.hours * HOUR_SECONDS
    hardware = machines.hardware(fleet.report_seconds, fleet.conductors)
    cluster = hardware.config(fleet.prefill, fleet.decode)
    return LargeFleetConfig(
        cluster=cluster,
        topology=topology,
        rate=daily_rate(load.requests, load.tide, seconds),
        duration_seconds=seconds,
        slice_seconds=fleet.slice_seconds,
        failures=parse_failures(fleet.fail or [], topology),
        autoscaling=_autoscaling(scaling, cluster) if scaling.autoscale else None,
        seed=load.seed,
    )


def _autoscaling(options: FleetAutoscalingOptions, cluster: ClusterConfig) -> FleetAutoscaling:
    check_positive("--start-seconds", options.start_seconds)
    check_at_least("--max-step-workers", options.max_step_workers, 1)
    sizing = SizingConfig(
        max_prefill=cluster.num_prefill,
        max_decode=cluster.num_decode,
        ttft_slo_seconds=cluster.ttft_slo_seconds,
        itl_slo_seconds=cluster.itl_slo_seconds,
    )
    scaling = ScalingConfig(
        prefill=PoolBounds(1, cluster.num_prefill),
        decode=PoolBounds(1, cluster.num_decode),
        max_workers=cluster.num_prefill + cluster.num_decode,
        max_step_workers=options.max_step_workers,
    )
    planner = PlannerConfig(sizing=sizing, start_seconds=options.start_seconds)
    return FleetAutoscaling(planner=planner, scaling=scaling, start_seconds=options.start_seconds)


def _traffic(load: FleetTrafficOptions) -> Traffic:
    return Traffic(
        trace=load.trace,
        kind=load.kind,
        requests=load.cell_requests,
        rate=None,
        burstiness=1.0,
        rate_factor=1.0,
        jitter_seconds=load.jitter_seconds,
        seed=load.seed,
    )


def run_with_progress(simulation: LargeFleetSimulation, duration_seconds: float) -> RunFigures:
    """Run a simulation. Prints a line on stderr after each hour of virtual time."""
    clock = SystemClock()
    began, cpu_before, shown = clock.monotonic(), _cpu_seconds(), 0
    for now in simulation.run():
        hour = int(now / HOUR_SECONDS)
        if hour > shown and now <= duration_seconds:
            shown = hour
            seconds = clock.monotonic() - began
            print(
                f"{hour} of {duration_seconds / HOUR_SECONDS:g} hours, "
                f"{simulation.events.arrivals:,} requests, {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    seconds = clock.monotonic() - began
    events = simulation.events
    # In kilobytes on Linux.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return RunFigures(
        seconds,
        _cpu_seconds() - cpu_before,
        resident,
        events.total,
        events.total / seconds,
        events.arrivals / seconds,
    )


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# -- output --------------------------------------------------------------------------------


def _object(
    simulation: LargeFleetSimulation, figures: RunFigures, sample: RequestSample
) -> dict[str, Any]:
    steps = simulation.autoscaler.steps if simulation.autoscaler is not None else []
    return {
        **simulation.statistics.total().as_dict(),
        "hours": [hour.as_dict() for hour in simulation.statistics.by_hour()],
        "run": asdict(figures),
        "sample_requests": len(sample),
        "scaling_steps": [{"at_seconds": at, **_sizes(step.sizes)} for at, step in steps],
    }


def _sizes(sizes: Any) -> dict[str, int]:
    return {role.value: size for role, size in sizes.items()}


def _print(simulation: LargeFleetSimulation, figures: RunFigures) -> None:
    table = Table(
        "hour", "requests/s", "within SLO", "rejected", "restarts", "TTFT p50 p90 p99 (s)",
        "ITL p50 p99 (ms)", "prefill", "busy", "decode", "KV memory", box=None,
    )  # fmt: skip
    for number, hour in enumerate(simulation.statistics.by_hour()):
        table.add_row(str(number), *_cells(hour))
    table.add_row("all", *_cells(simulation.statistics.total()))
    open_console().print(table)
    print(
        f"{simulation.events.arrivals:,} requests, {figures.events:,} events in "
        f"{figures.wall_seconds:.1f} s ({figures.cpu_seconds:.1f} s of processor time): "
        f"{figures.requests_per_second:,.0f} requests and {figures.events_per_second:,.0f} events "
        f"a second; at most {figures.max_resident_bytes / 2**20:.0f} MiB of memory"
    )


def _cells(result: FleetResult) -> list[str]:
    ttfts = (result.ttft_p50_seconds, result.ttft_p90_seconds, result.ttft_p99_seconds)
    itls = (result.itl_p50_seconds, result.itl_p99_seconds)
    return [
        f"{result.rate_rps:.1f}",
        _share(result.attainment),
        _share(result.rejected_ratio),
        f"{result.restarts:,}",
        " ".join("-" if value is None else f"{value:.3g}" for value in ttfts),
        " ".join("-" if value is None else f"{value * 1e3:.3g}" for value in itls),
        f"{result.prefill_workers:.0f}",
        _share(result.prefill_utilisation),
        f"{result.decode_workers:.0f}",
        _share(result.decode_memory),
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
