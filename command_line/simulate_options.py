"""The commands ``baton simulate`` and ``baton plan``: their options."""

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Trace = Annotated[Path | None, typer.Option(help="A trace: Mooncake's, Azure's, or Baton's own.")]
Kind = Annotated[
    str | None,
    typer.Option(help="Made up instead: chat (default), rag, agents, reasoning, few_shot, mixed."),
]
Requests = Annotated[int, typer.Option(help="How many are made up.")]
Burstiness = Annotated[float, typer.Option(help="Of made-up arrivals; 1 is Poisson.")]
RateFactor = Annotated[float, typer.Option(help="Arrivals come so many times as fast.")]
JitterSeconds = Annotated[
    float, typer.Option(help="Spreads a trace's arrivals; Mooncake's clock ticks every 3 s.")
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same run.")]
SimulatedModel = Annotated[str, typer.Option("--model", help="A model's shape by name.")]
Gpu = Annotated[str, typer.Option(help="Of every worker, by name.")]
GpusPerWorker = Annotated[int, typer.Option(help="They share its work and memory evenly.")]
Costs = Annotated[
    Path | None, typer.Option(help="A JSON table of measurements, instead of model and GPU.")
]
LinkGbytes = Annotated[float, typer.Option(help="GB/s between hosts, each way.")]
HostGbytes = Annotated[float, typer.Option(help="GB/s from a host's store to its workers.")]
DeviceTokens = Annotated[int | None, typer.Option(help="KV that a worker's memory holds.")]
NodeTokens = Annotated[int | None, typer.Option(help="KV that a host's store holds.")]
Hosts = Annotated[int, typer.Option(help="That workers are spread over; 0: one each.")]
Order = Annotated[str, typer.Option(help="Whose prompt is read next.")]
ReportSeconds = Annotated[float, typer.Option(help="Between two reports; 0: all is known at once.")]
Conductors = Annotated[int, typer.Option(help="Each places every so many-th request.")]
TtftSlo = Annotated[
    float, typer.Option(help="Seconds to the first token, beyond reading it on an idle worker.")
]
TbtSlo = Annotated[float, typer.Option(help="Seconds between tokens, in the mean of an answer.")]
Plots = Annotated[Path | None, typer.Option(help="A folder for figures.")]


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
    policy: Annotated[str, typer.Option(help="By name, with commas between; or all.")] = "baton",
    as_deployed: Annotated[
        bool, typer.Option("--as-deployed", help="Rivals without what Baton's workers add.")
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
        typer.Option(metavar="WORKER@SECOND:SECONDS", help="Dies, for so long; repeatable."),
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(metavar="WORKERxFACTOR", help="Takes so many times as long; repeatable."),
    ] = None,
    find_goodput: Annotated[
        bool, typer.Option("--find-goodput", help="Also the highest rate within the SLO.")
    ] = False,
    seeds: Annotated[int, typer.Option(help="That --find-goodput tries.")] = 1,
    plots: Plots = None,
    as_json: AsJson = False,
) -> None:
    """The real placement over simulated workers, in virtual time."""
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
    machines = SimulatedHardware(
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
    cluster = machines.config(prefill, decode)
    faults = parse_faults(kill or [], slow or [], cluster)
    scenario = Scenario(config=cluster, faults=faults, as_deployed=as_deployed)
    run_simulate(traffic, scenario, parse_policies(policy), seeds, find_goodput, plots, as_json)


def plan(
    rate: Annotated[float, typer.Option(help="Requests per second that are to be served.")],
    gpus: Annotated[int, typer.Option(help="All GPUs, of both pools.")],
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
    target: Annotated[float, typer.Option(help="Share of requests within their SLO.")] = 0.9,
    plots: Plots = None,
    as_json: AsJson = False,
) -> None:
    """How many workers should read and how many write; exit code 1 if no split will do."""
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
    machines = SimulatedHardware(
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
    run_plan(traffic, machines, gpus, target, plots, as_json)
