"""The options of ``baton simulate`` and ``baton plan``."""

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Trace = Annotated[
    Path | None, typer.Option(help="A trace file in Mooncake's, Azure's or Baton's format.")
]
Kind = Annotated[
    str | None,
    typer.Option(
        help="Synthetic load, instead of a trace: chat (default), rag, agents, reasoning, "
        "few_shot, mixed."
    ),
]
Requests = Annotated[int, typer.Option(help="Number of synthetic requests.")]
Burstiness = Annotated[float, typer.Option(help="Burstiness of synthetic arrivals; 1 is Poisson.")]
RateFactor = Annotated[float, typer.Option(help="Speed up arrivals by this factor.")]
JitterSeconds = Annotated[
    float,
    typer.Option(
        help="Spread a trace's arrivals over so many seconds; Mooncake's have a granularity of 3 s."
    ),
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same run.")]
SimulatedModel = Annotated[str, typer.Option("--model", help="Name of the simulated model.")]
Gpu = Annotated[str, typer.Option(help="Name of every worker's GPU.")]
GpusPerWorker = Annotated[
    int, typer.Option(help="GPUs of each worker; they share its work and memory evenly.")
]
Costs = Annotated[
    Path | None,
    typer.Option(help="A JSON table of measured step times, instead of --model and --gpu."),
]
LinkGbytes = Annotated[float, typer.Option(help="Bandwidth between hosts, in GB/s each way.")]
HostGbytes = Annotated[
    float, typer.Option(help="Bandwidth from a host's KV store to its workers, in GB/s.")
]
DeviceTokens = Annotated[
    int | None, typer.Option(help="KV capacity of a worker's memory, in tokens.")
]
NodeTokens = Annotated[int | None, typer.Option(help="KV capacity of a host's store, in tokens.")]
Hosts = Annotated[
    int, typer.Option(help="Number of hosts that workers are spread over; 0: one per worker.")
]
Order = Annotated[str, typer.Option(help="Order in which waiting prompts are prefilled.")]
ReportSeconds = Annotated[
    float,
    typer.Option(help="Seconds between a worker's reports; 0: its state is always known."),
]
Conductors = Annotated[
    int, typer.Option(help="Number of conductors; each places an equal part of the requests.")
]
TtftSlo = Annotated[
    float,
    typer.Option(help="TTFT SLO in seconds, on top of the prefill time on an idle worker."),
]
TbtSlo = Annotated[
    float, typer.Option(help="SLO of an answer's mean inter-token latency, in seconds.")
]
Plots = Annotated[Path | None, typer.Option(help="A folder to write figures to.")]


def simulate(
    trace: Trace = None,
    kind: Kind = None,
    requests: Requests = 2000,
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    burstiness: Burstiness = 1.0,
    rate_factor: RateFactor = 1.0,
    jitter_seconds: JitterSeconds = 0.0,
    seed: Seed = 0,
    model: SimulatedModel = "qwen3-8b",
    gpu: Gpu = "H100",
    gpus_per_worker: GpusPerWorker = 1,
    costs: Costs = None,
    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 2,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 2,
    policy: Annotated[
        str, typer.Option(help="Placement policies, separated by commas; or all.")
    ] = "baton",
    as_deployed: Annotated[
        bool,
        typer.Option(
            "--as-deployed", help="Simulate other policies without Baton's additions, as published."
        ),
    ] = False,
    link_gbytes: LinkGbytes = 50.0,
    host_gbytes: HostGbytes = 50.0,
    device_tokens: DeviceTokens = None,
    node_tokens: NodeTokens = None,
    hosts: Hosts = 0,
    order: Order = "deadline",
    report_seconds: ReportSeconds = 0.0,
    conductors: Conductors = 1,
    ttft_slo: TtftSlo = 2.0,
    tbt_slo: TbtSlo = 0.05,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORKER@SECOND:SECONDS",
            help="Kill a worker at this second, for so many seconds. Repeatable.",
        ),
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORKERxFACTOR", help="Slow a worker down by this factor. Repeatable."
        ),
    ] = None,
    find_goodput: Annotated[
        bool,
        typer.Option("--find-goodput", help="Also search for the highest rate within the SLO."),
    ] = False,
    seeds: Annotated[int, typer.Option(help="Number of seeds that --find-goodput tries.")] = 1,
    plots: Plots = None,
    as_json: AsJson = False,
) -> None:
    """Run Baton's real placement code over simulated workers, in virtual time."""
    from command_line.simulate import run_simulate
    from simulator.scenario import (
        Scenario,
        SimulatedHardware,
        Traffic,
        parse_faults,
        parse_policies,
    )

    traffic = Traffic(
        trace=trace,
        kind=kind,
        requests=requests,
        rate=rate,
        burstiness=burstiness,
        rate_factor=rate_factor,
        jitter_seconds=jitter_seconds,
        seed=seed,
    )
    hardware = SimulatedHardware(
        model=model,
        gpu=gpu,
        gpus_per_worker=gpus_per_worker,
        costs=costs,
        link_gbytes=link_gbytes,
        host_gbytes=host_gbytes,
        device_tokens=device_tokens,
        node_tokens=node_tokens,
        hosts=hosts,
        order=order,
        report_seconds=report_seconds,
        conductors=conductors,
        ttft_slo=ttft_slo,
        tbt_slo=tbt_slo,
    )
    cluster = hardware.config(prefill, decode)
    faults = parse_faults(kill or [], slow or [], cluster)
    scenario = Scenario(config=cluster, faults=faults, as_deployed=as_deployed)
    run_simulate(traffic, scenario, parse_policies(policy), seeds, find_goodput, plots, as_json)


def plan(
    rate: Annotated[float, typer.Option(help="Requests per second to serve.")],
    gpus: Annotated[int, typer.Option(help="Number of GPUs in both pools together.")],
    trace: Trace = None,
    kind: Kind = None,
    requests: Requests = 2000,
    burstiness: Burstiness = 1.0,
    jitter_seconds: JitterSeconds = 0.0,
    seed: Seed = 0,
    model: SimulatedModel = "qwen3-8b",
    gpu: Gpu = "H100",
    gpus_per_worker: GpusPerWorker = 1,
    costs: Costs = None,
    link_gbytes: LinkGbytes = 50.0,
    host_gbytes: HostGbytes = 50.0,
    device_tokens: DeviceTokens = None,
    node_tokens: NodeTokens = None,
    hosts: Hosts = 0,
    order: Order = "deadline",
    ttft_slo: TtftSlo = 2.0,
    tbt_slo: TbtSlo = 0.05,
    target: Annotated[
        float, typer.Option(help="Share of requests that must be within their SLO.")
    ] = 0.9,
    plots: Plots = None,
    as_json: AsJson = False,
) -> None:
    """Find the best split into prefill and decode workers; exit code 1 if none meets --target."""
    from command_line.plan import run_plan
    from simulator.scenario import SimulatedHardware, Traffic

    traffic = Traffic(
        trace=trace,
        kind=kind,
        requests=requests,
        rate=rate,
        burstiness=burstiness,
        rate_factor=1.0,
        jitter_seconds=jitter_seconds,
        seed=seed,
    )
    hardware = SimulatedHardware(
        model=model,
        gpu=gpu,
        gpus_per_worker=gpus_per_worker,
        costs=costs,
        link_gbytes=link_gbytes,
        host_gbytes=host_gbytes,
        device_tokens=device_tokens,
        node_tokens=node_tokens,
        hosts=hosts,
        order=order,
        report_seconds=0.0,
        conductors=1,
        ttft_slo=ttft_slo,
        tbt_slo=tbt_slo,
    )
    run_plan(traffic, hardware, gpus, target, plots, as_json)
