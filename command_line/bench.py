"""The command ``baton bench``: its options and its subcommand."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.errors import Invalid, NotFound
from command_line.bench_engine.command import bench_engine
from command_line.bench_kv_codec.command import bench_kv_codec
from command_line.common_options import AsJson
from command_line.option_groups import with_option_groups

if TYPE_CHECKING:
    from load_generator.driver import DriverLimits
    from load_generator.load_spec import LoadSpec, RequestLengths
    from load_generator.result import LatencyTargets
    from load_generator.target import BenchTarget

app = typer.Typer(invoke_without_command=True)

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[
    str | None,
    typer.Option(
        help="URL of any server with OpenAI's API; /v1 may be left out. Default: the router of the "
        f"cluster that `baton up` started, else {DEFAULT_URL}."
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(help="chat or completions. Default: chat, or completions for --prompts tokens."),
]
Form = Annotated[
    str,
    typer.Option(
        "--prompts", help="text, or tokens: token ids, of exact length (completions only)."
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options for the server and the connection to it."""

    url: Url = None
    model: Annotated[
        str | None, typer.Option(help="Name of the model. Default: the first on the server's list.")
    ] = None
    endpoint: Endpoint = None
    api_key: Annotated[
        str,
        typer.Option(
            envvar="BENCH_API_KEY",
            help="API key. The environment variable keeps it out of the process list.",
            show_envvar=True,
        ),
    ] = ""
    ca: Annotated[Path | None, typer.Option(help="Certificates to trust, in PEM.")] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Don't verify the server's certificate.")
    ] = False
    timeout: Annotated[float, typer.Option(help="Timeout of a request, in seconds.")] = 600.0
    at_once: Annotated[
        int, typer.Option(help="Maximum number of requests in flight at a time.")
    ] = 10_000

    @property
    def target(self) -> "BenchTarget":
        """The server that requests are sent to. Raises Invalid for wrong options."""
        from load_generator.target import parse_target

        url, ca = (self.url, self.ca) if self.url else default_target(self.ca)
        return parse_target(url, self.api_key, ca, self.insecure)

    @property
    def limits(self) -> "DriverLimits":
        """The timeout of a request and the maximum number of requests in flight. Raises Invalid for
        values that are too low."""
        from load_generator.driver import DriverLimits
        from simulator.flag_checks import check_at_least, check_positive

        check_positive("--timeout", self.timeout)
        check_at_least("--at-once", self.at_once, 1)
        return DriverLimits(self.timeout, self.at_once)


def default_target(ca: Path | None) -> tuple[str, Path | None]:
    """Return the URL of the running cluster's router, and the file of the certificates to trust:
    ``ca`` or, if that is None, the router's own. If no cluster is running, return the default
    URL."""
    from baton.config import baton_home
    from command_line.common_options import cluster_name
    from orchestrator.cluster_state import ClusterFolder

    try:
        state = ClusterFolder(baton_home(), cluster_name(None)).read_running()
    except NotFound:
        return DEFAULT_URL, ca
    own = state.tls_certificate
    return state.url, ca if ca is not None or own is None else Path(own)


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Prompt and answer lengths of synthetic requests of kind ``plain``, the default of ``--kind``.
    Other kinds, and traces, have lengths of their own."""

    input_tokens: Annotated[
        int, typer.Option(help="Mean prompt length of plain requests, in tokens.")
    ] = 512
    output_tokens: Annotated[int, typer.Option(help="Mean max_tokens of plain requests.")] = 128
    input_spread: Annotated[
        float,
        typer.Option(help="Sigma of the log-normal prompt lengths; 0: all have the same length."),
    ] = 0.0
    output_spread: Annotated[float, typer.Option(help="Sigma of the log-normal max_tokens.")] = 0.0
    shared_tokens: Annotated[
        int, typer.Option(help="Length of the prefix that all plain prompts share, in tokens.")
    ] = 0

    @property
    def lengths(self) -> "RequestLengths":
        """The lengths for requests of kind ``plain``. Raises Invalid for lengths that are out of
        range."""
        from load_generator.load_spec import RequestLengths

        return RequestLengths(**vars(self))


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options that determine which requests are sent, and when."""

    rate: Annotated[float | None, typer.Option(help="Requests per second, in an open loop.")] = None
    concurrency: Annotated[
        int | None, typer.Option(help="Users who each wait for their answer: a closed loop.")
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="A trace file in Mooncake's, Azure's or Baton's format.")
    ] = None
    kind: Annotated[
        str | None,
        typer.Option(
            help="Synthetic load: plain (default), chat, rag, agents, reasoning, few_shot, mixed."
        ),
    ] = None
    requests: Annotated[int | None, typer.Option(help="Number of requests.")] = None
    duration: Annotated[float | None, typer.Option(help="Seconds to send requests for.")] = None
    warm_up: Annotated[
        float | None,
        typer.Option(help="First seconds that are not measured. Default: the first tenth."),
    ] = None
    burstiness: Annotated[
        float,
        typer.Option(help="Burstiness of arrivals: 0 is even, 1 is Poisson, more is burstier."),
    ] = 1.0
    rate_factor: Annotated[
        float, typer.Option(help="Speed up a trace's arrivals by this factor.")
    ] = 1.0
    jitter_seconds: Annotated[
        float,
        typer.Option(
            help="Delay each arrival of a trace by a random time of up to this many seconds; "
            "those in Mooncake's traces are multiples of 3 s."
        ),
    ] = 0.0
    think_seconds: Annotated[
        float, typer.Option(help="Mean pause of a user between two turns of a conversation.")
    ] = 0.0
    seed: Annotated[int, typer.Option(help="The same seed gives the same load.")] = 0

    def spec(self, lengths: "RequestLengths") -> "LoadSpec":
        """Return the load. ``lengths`` applies to requests of kind ``plain`` only. Raises Invalid
        for wrong options."""
        from load_generator.load_spec import LoadSpec

        return LoadSpec(lengths=lengths, **vars(self))


@dataclass(frozen=True, kw_only=True)
class BodyOptions:
    """Options for the prompts and the other fields of the requests' bodies."""

    prompts: Form = "text"
    extra: Annotated[
        str,
        typer.Option(metavar="JSON", help="More fields for every request body, as a JSON object."),
    ] = "{}"
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Request answers of full length (vLLM's extension)."),
    ] = False
    salt: Annotated[
        str | None,
        typer.Option(
            help="Text that every prompt begins with. Default: a new one per run, so that nothing "
            "is cached."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Options for the latencies that answers should have."""

    slo_ttft: Annotated[float | None, typer.Option(help="TTFT SLO, in seconds.")] = None
    slo_tbt: Annotated[
        float | None, typer.Option(help="SLO of an answer's mean inter-token latency, in seconds.")
    ] = None

    @property
    def latency_targets(self) -> "LatencyTargets":
        """The latencies that the SLO allows. Raises Invalid if one is not above 0."""
        from load_generator.result import LatencyTargets
        from simulator.flag_checks import check_positive

        for flag, seconds in (("--slo-ttft", self.slo_ttft), ("--slo-tbt", self.slo_tbt)):
            if seconds is not None:
                check_positive(flag, seconds)
        return LatencyTargets(self.slo_ttft, self.slo_tbt)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options that determine where the result is written, and in what form."""

    plots: Annotated[Path | None, typer.Option(help="A folder to write figures to.")] = None
    output: Annotated[Path | None, typer.Option(help="A file to write the JSON output to.")] = None
    as_json: AsJson = False


@app.callback()
@with_option_groups
def bench(
    context: typer.Context,
    server: ServerOptions,
    load: LoadOptions,
    plain: LengthOptions,
    body: BodyOptions,
    targets: TargetOptions,
    processes: Annotated[int, typer.Option(help="Number of processes that send the load.")] = 1,
    report: OutputOptions = OutputOptions(),
) -> None:
    """Send load to a server and report the latencies that its users see; exit code 1 if no request
    is answered. The subcommand `engine` measures the engine alone."""
    if context.invoked_subcommand is not None:
        _refuse_options(context, context.invoked_subcommand)
        return
    from load_generator.config import BenchConfig, parse_extra, parse_prompt_format, prompt_salt
    from load_generator.run import run_bench

    limits, slo = server.limits, targets.latency_targets
    chat, as_tokens = parse_prompt_format(server.endpoint, body.prompts)
    spec = load.spec(plain.lengths)
    config = BenchConfig(
        target=server.target,
        model=server.model,
        chat=chat,
        as_tokens=as_tokens,
        salt=prompt_salt(body.salt),
        extra=parse_extra(body.extra, body.ignore_eos),
        load=spec,
        limits=limits,
        slo=slo,
        processes=processes,
        plots=report.plots,
        output=report.output,
        as_json=report.as_json,
    )
    run_bench(config)


app.command("engine")(bench_engine)
app.command("kv-codec")(bench_kv_codec)


def _refuse_options(context: typer.Context, command: str) -> None:
    """Raise Invalid if options of ``baton bench`` itself are given before a subcommand."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{name.replace('_', '-')}"
            raise Invalid(
                f"{flag} is an option of baton bench itself; the options of baton bench {command} "
                f"go after the word {command}"
            )
