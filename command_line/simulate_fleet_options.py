"""The options of ``baton simulate-fleet``."""

from dataclasses import dataclass
from typing import Annotated

import typer

from command_line.common_options import AsJson
from command_line.option_groups import with_option_groups
from command_line.simulate_options import HardwareOptions, JitterSeconds, Kind, Seed, Trace


@dataclass(frozen=True, kw_only=True)
class FleetTrafficOptions:
    """Options for the requests and their rate."""

    requests: Annotated[
        float, typer.Option(help="Expected number of requests in all --hours together.")
    ] = 50e6
    hours: Annotated[float, typer.Option(help="Hours of virtual time: one period of the rate.")] = (
        24.0
    )
    tide: Annotated[
        float, typer.Option(help="The highest rate, at noon, as a multiple of the lowest.")
    ] = 3.0
    trace: Trace = None
    kind: Kind = None
    jitter_seconds: JitterSeconds = 0.0
    cell_workers: Annotated[
        int,
        typer.Option(
            help="Workers that are simulated exactly first, with the trace at their share of the "
            "mean rate; the fleet's requests are drawn from theirs."
        ),
    ] = 16
    cell_requests: Annotated[
        int, typer.Option(help="Number of synthetic requests of that exact simulation.")
    ] = 12_000
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Options for the fleet's workers and conductors."""

    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 512
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 512
    racks: Annotated[int, typer.Option(help="Racks over which both pools are spread.")] = 64
    zones: Annotated[int, typer.Option(help="Zones over which the racks are spread.")] = 4
    fail: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLACE@SECOND:SECONDS",
            help="Fail all workers of a rack or a zone at this second, for this many seconds, like "
            "rack:3@36000:600. Repeatable.",
        ),
    ] = None
    conductors: Annotated[
        int, typer.Option(help="Number of conductors; each places an equal part of the requests.")
    ] = 3
    report_seconds: Annotated[
        float,
        typer.Option(help="Seconds between a worker's reports; 0: its state is always known."),
    ] = 1.0
    slice_seconds: Annotated[
        float, typer.Option(help="Virtual time that is simulated at once.")
    ] = 0.5


@dataclass(frozen=True, kw_only=True)
class FleetAutoscalingOptions:
    """Options for the autoscaler."""

    autoscale: Annotated[
        bool,
        typer.Option("--autoscale", help="Let both pools follow the load, up to their sizes."),
    ] = False
    start_seconds: Annotated[
        float, typer.Option(help="Seconds from a worker's request until it serves.")
    ] = 60.0
    max_step_workers: Annotated[
        int, typer.Option(help="Maximum number of workers added or removed at once.")
    ] = 16


@with_option_groups
def simulate_fleet(
    load: FleetTrafficOptions,
    machines: HardwareOptions,
    fleet: FleetOptions,
    scaling: FleetAutoscalingOptions,
    as_json: AsJson = False,
) -> None:
    """Simulate a large fleet for a day: tides, failures of racks and zones, several conductors."""
    from command_line.simulate_fleet import run_simulate_fleet

    run_simulate_fleet(load, machines, fleet, scaling, as_json)
