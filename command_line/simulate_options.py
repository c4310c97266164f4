"""The options of ``baton simulate`` and ``baton plan``."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.core.worker_kinds import WORKER_KINDS, WorkerKind, list_kinds
from command_line.common_options import AsJson
from command_line.option_groups import option_per_kind, with_option_groups

if TYPE_CHECKING:
    from simulator.scenario import Traffic
    from simulator.simulated_hardware import SimulatedHardware

DEFAULT_POOL = 2
"""The number of prefill, and of decode workers, if no numbers are given."""

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
        help="Delay each arrival of a trace by a random time of up to this many seconds; "
        "those in Mooncake's traces are multiples of 3 s."
    ),
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same run.")]
SimulatedModel = Annotated[str, typer.Option("--model", help="Name of the simulated model.")]
Gpu = Annotated[str, typer.Option(help="Name of every worker's GPU.")]
GpusPerWorker = Annotated[
    int | None,
    typer.Option(
        help="GPUs of each worker; they share its model by tensor parallelism. Default: 1; plan "
        "tries 1, 2, 4 and 8."
    ),
]
PrefillTp = Annotated[
    int | None, typer.Option(help="Tensor-parallel size of prefill workers, in GPUs.")
]
DecodeTp = Annotated[
    int | None, typer.Option(help="Tensor-parallel size of decode workers, in GPUs.")
]
MixedTp = Annotated[
    int | None, typer.Option(help="Tensor-parallel size of mixed workers, in GPUs.")
]
PrefillEp = Annotated[
    int | None,
    typer.Option(
        help="Expert-parallel size of prefill workers, in GPUs; attention is replicated if it "
        "exceeds --prefill-tp."
    ),
]
DecodeEp = Annotated[
    int | None, typer.Option(help="Expert-parallel size of decode workers, in GPUs.")
]
MixedEp = Annotated[
    int | None, typer.Option(help="Expert-parallel size of mixed workers, in GPUs.")
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


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    trace: Trace = None
    kind: Kind = None
    requests: Requests = 2000
    burstiness: Burstiness = 1.0
    jitter_seconds: JitterSeconds = 0.0
    seed: Seed = 0

    def traffic(self, rate: float | None, rate_factor: float = 1.0) -> "Traffic":
        """Return the traffic at ``rate`` requests per second. If ``rate`` is None, a trace file
        keeps its own rate, and a synthetic trace gets the default rate. ``rate_factor`` multiplies
        the rate in each case. Raises Invalid for wrong options."""
        from simulator.scenario import Traffic

        return Traffic(rate=rate, rate_factor=rate_factor, **vars(self))


@dataclass(frozen=True, kw_only=True)
class HardwareOptions:
    """Options for the workers, the links and memory of their hosts, and the SLO to meet."""

    model: SimulatedModel = "qwen3-8b"
    gpu: Gpu = "H100"
    gpus_per_worker: GpusPerWorker = None
    prefill_tp: PrefillTp = None
    decode_tp: DecodeTp = None
    mixed_tp: MixedTp = None
    prefill_ep: PrefillEp = None
    decode_ep: DecodeEp = None
    mixed_ep: MixedEp = None
    costs: Costs = None
    link_gbytes: LinkGbytes = 50.0
    host_gbytes: HostGbytes = 50.0
    device_tokens: DeviceTokens = None
    node_tokens: NodeTokens = None
    hosts: Hosts = 0
    order: Order = "deadline"
    ttft_slo: TtftSlo = 2.0
    tbt_slo: TbtSlo = 0.05

    def hardware(self, report_seconds: float = 0.0, conductors: int = 1) -> "SimulatedHardware":
        from simulator.simulated_hardware import SimulatedHardware

        return SimulatedHardware(report_seconds=report_seconds, conductors=conductors, **vars(self))


def _pool_size(kind: WorkerKind) -> object:
    if kind.serves_alone:
        text = "Workers that compute prompts and answers in the same steps."
    else:
        alone = list_kinds("--{}", "or", can=lambda each: each.serves_alone)
        text = f"{kind.role.value.capitalize()} workers. Default: 2, or none with {alone}."
    return Annotated[int | None, typer.Option(help=text)]


@dataclass(frozen=True, kw_only=True)
@option_per_kind(_pool_size)
class PoolOptions:
    """The numbers of workers of each kind."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of workers that only compute prompts, that only write answers, and that serve
        whole requests. The simulator has a pool of each, with workers of all kinds that do so."""

        def count(can: Callable[[WorkerKind], bool], default: int) -> int:
            given = [getattr(self, role.value) for role, kind in WORKER_KINDS.items() if can(kind)]
            counts = [count for count in given if count is not None]
            return sum(counts) if counts else default

        alone = count(lambda kind: kind.serves_alone, 0)
        pool = 0 if alone else DEFAULT_POOL
        prefill = count(lambda kind: kind.exports_kv, pool)
        return prefill, count(lambda kind: kind.imports_kv, pool), alone


@dataclass(frozen=True, kw_only=True)
class ScenarioOptions:
    """Options for the policies of the cluster and its faults."""

    policy: Annotated[
        str, typer.Option(help="Placement policies, separated by commas; or all.")
    ] = "baton"
    as_deployed: Annotated[
        bool,
        typer.Option(
            "--as-deployed", help="Simulate other policies without Baton's additions, as published."
        ),
    ] = False
    max_short_prompt_advantage: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="As the setting of this name (docs/placement.md)."),
    ] = 0.02
    shared_speeds: Annotated[
        str | None,
        typer.Option(
            metavar="SPEED,SPEED,…",
            help="Workers share the cores of their host (--hosts): the speed of each while 1, 2, … "
            "of them are busy, like 1,0.6.",
        ),
    ] = None
    report_seconds: ReportSeconds = 0.0
    conductors: Conductors = 1
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORKER@SECOND:SECONDS",
            help="Kill a worker at this second, for this many seconds. Repeatable.",
        ),
    ] = None
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORKERxFACTOR", help="Slow a worker down by this factor. Repeatable."
        ),
    ] = None


@with_option_groups
def simulate(
    load: TrafficOptions,
    machines: HardwareOptions,
    pools: PoolOptions,
    cluster: ScenarioOptions,
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    rate_factor: RateFactor = 1.0,
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
    from conductor.policy.config import BatonPolicyConfig
    from simulator.host_cores import parse_shared_speeds
    from simulator.scenario import Scenario, parse_faults, parse_policies

    traffic = load.traffic(rate, rate_factor)
    hardware = machines.hardware(cluster.report_seconds, cluster.conductors)
    config = hardware.config(*pools.sizes)
    if cluster.shared_speeds is not None:
        speeds = parse_shared_speeds(cluster.shared_speeds, machines.hosts)
        config = replace(config, shared_speeds=speeds)
    faults = parse_faults(cluster.kill or [], cluster.slow or [], config)
    policy = BatonPolicyConfig(max_short_prompt_advantage=cluster.max_short_prompt_advantage)
    scenario = Scenario(
        config=config, faults=faults, as_deployed=cluster.as_deployed, policy_config=policy
    )
    policies = parse_policies(cluster.policy)
    run_simulate(traffic, scenario, policies, seeds, find_goodput, plots, as_json)


@with_option_groups
def plan(
    rate: Annotated[float, typer.Option(help="Requests per second to serve.")],
    gpus: Annotated[int, typer.Option(help="Number of GPUs of all workers in total.")],
    load: TrafficOptions,
    machines: HardwareOptions,
    target: Annotated[
        float, typer.Option(help="Share of requests that must be within their SLO.")
    ] = 0.9,
    plots: Plots = None,
    pareto: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Also sweep the rate, and write tokens per second per GPU against those per user, "
            "with prices and energy, to this folder: a page, figures, and JSON.",
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPU=USD", help="Price of a GPU per hour, like H100=1.99. Repeatable."
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Simulations at a time, each in a process of its own. Default: one per core, or 1 "
            "with few requests. The results are the same."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best use of GPUs: workers that do everything, prefill and decode workers, or both,
    with how many GPUs each; exit code 1 if none meets --target."""
    from command_line.plan import run_plan

    traffic, hardware = load.traffic(rate), machines.hardware()
    run_plan(traffic, hardware, gpus, target, plots, as_json, pareto, price or [], processes)
