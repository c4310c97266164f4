"""The command ``baton bench``: its options and its subcommand."""

from pathlib import Path
from typing import Annotated

import typer

from baton.errors import Invalid
from command_line.bench_engine.command import bench_engine

app = typer.Typer(invoke_without_command=True)

Url = Annotated[str, typer.Option(help="URL of any server with OpenAI's API; /v1 may be left out.")]
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


@app.callback()
def bench(
    context: typer.Context,
    url: Url = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Name of the model. Default: the first on the server's list.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, in an open loop.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Users who each wait for their answer: a closed loop.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A trace file in Mooncake's, Azure's or Baton's format.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="Synthetic load: plain (default), chat, rag, agents, reasoning, few_shot, mixed."
        ),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Number of requests.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds to send requests for.")] = None,
    warm_up: Annotated[
        float | None,
        typer.Option(help="First seconds that are not measured. Default: the first tenth."),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(help="Burstiness of arrivals: 0 is even, 1 is Poisson, more is burstier."),
    ] = 1.0,
    rate_factor: Annotated[
        float, typer.Option(help="Speed up a trace's arrivals by this factor.")
    ] = 1.0,
    jitter_seconds: Annotated[
        float,
        typer.Option(
            help="Spread a trace's arrivals over so many seconds; Mooncake's have a granularity "
            "of 3 s."
        ),
    ] = 0.0,
    think_seconds: Annotated[
        float, typer.Option(help="Mean pause of a user between two turns of a conversation.")
    ] = 0.0,
    input_tokens: Annotated[
        int, typer.Option(help="Mean prompt length of plain requests, in tokens.")
    ] = 512,
    output_tokens: Annotated[int, typer.Option(help="Mean max_tokens of plain requests.")] = 128,
    input_spread: Annotated[
        float,
        typer.Option(help="Sigma of the log-normal prompt lengths; 0: all have the same length."),
    ] = 0.0,
    output_spread: Annotated[float, typer.Option(help="Sigma of the log-normal max_tokens.")] = 0.0,
    shared_tokens: Annotated[
        int, typer.Option(help="Length of the prefix that all plain prompts share, in tokens.")
    ] = 0,
    endpoint: Endpoint = None,
    prompts: Form = "text",
    extra: Annotated[
        str,
        typer.Option(metavar="JSON", help="More fields for every request body, as a JSON object."),
    ] = "{}",
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Request answers of full length (vLLM's extension)."),
    ] = False,
    slo_ttft: Annotated[float | None, typer.Option(help="TTFT SLO, in seconds.")] = None,
    slo_tbt: Annotated[
        float | None, typer.Option(help="SLO of an answer's mean inter-token latency, in seconds.")
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            envvar="BENCH_API_KEY",
            help="API key. The environment variable keeps it out of the process list.",
            show_envvar=True,
        ),
    ] = "",
    ca: Annotated[Path | None, typer.Option(help="Certificates to trust, in PEM.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Don't verify the server's certificate.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Timeout of a request, in seconds.")] = 600.0,
    at_once: Annotated[
        int, typer.Option(help="Maximum number of requests in flight at a time.")
    ] = 10_000,
    processes: Annotated[int, typer.Option(help="Number of processes that send the load.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same load.")] = 0,
    salt: Annotated[
        str | None,
        typer.Option(
            help="Text that every prompt begins with. Default: a new one per run, so that nothing "
            "is cached."
        ),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="A folder to write figures to.")] = None,
    output: Annotated[Path | None, typer.Option(help="A file to write the JSON output to.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Send load to a server and report the latencies that its users see; exit code 1 if no request
    is answered. The subcommand measures the engine alone."""
    if context.invoked_subcommand is not None:
        _refuse_options(context, context.invoked_subcommand)
        return
    from load_generator.config import BenchConfig, parse_extra, parse_prompt_format, prompt_salt
    from load_generator.driver import DriverLimits
    from load_generator.load_spec import LoadSpec, RequestLengths
    from load_generator.result import LatencyTargets
    from load_generator.run import run_bench
    from load_generator.target import parse_target
    from simulator.scenario import check_at_least, check_positive

    check_positive("--timeout", timeout)
    check_at_least("--at-once", at_once, 1)
    for flag, seconds in (("--slo-ttft", slo_ttft), ("--slo-tbt", slo_tbt)):
        if seconds is not None:
            check_positive(flag, seconds)
    chat, as_tokens = parse_prompt_format(endpoint, prompts)
    lengths = RequestLengths(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        input_spread=input_spread,
        output_spread=output_spread,
        shared_tokens=shared_tokens,
    )
    load = LoadSpec(
        trace=trace,
        kind=kind,
        lengths=lengths,
        requests=requests,
        duration=duration,
        rate=rate,
        concurrency=concurrency,
        burstiness=burstiness,
        rate_factor=rate_factor,
        jitter_seconds=jitter_seconds,
        think_seconds=think_seconds,
        warm_up=warm_up,
        seed=seed,
    )
    config = BenchConfig(
        target=parse_target(url, api_key, ca, insecure),
        model=model,
        chat=chat,
        as_tokens=as_tokens,
        salt=prompt_salt(salt),
        extra=parse_extra(extra, ignore_eos),
        load=load,
        limits=DriverLimits(timeout, at_once),
        slo=LatencyTargets(slo_ttft, slo_tbt),
        processes=processes,
        plots=plots,
        output=output,
        as_json=as_json,
    )
    run_bench(config)


app.command("engine")(bench_engine)


def _refuse_options(context: typer.Context, command: str) -> None:
    """Raise Invalid if options of ``baton bench`` itself are given before a subcommand."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{name.replace('_', '-')}"
            raise Invalid(
                f"{flag} is an option of baton bench; options of {command} go after its name"
            )
