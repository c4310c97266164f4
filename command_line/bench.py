"""The command ``baton bench``: its options, and what is below it."""

from pathlib import Path
from typing import Annotated

import typer

from baton.errors import Invalid
from command_line.bench_engine.command import bench_engine

app = typer.Typer(invoke_without_command=True)

Url = Annotated[str, typer.Option(help="Of any server with OpenAI's API; /v1 may be left out.")]
Endpoint = Annotated[
    str | None, typer.Option(help="chat, or completions; default: chat, but for tokens.")
]
Form = Annotated[
    str, typer.Option("--prompts", help="text, or tokens: ids, of exact length (completions only).")
]


@app.callback()
def bench(
    context: typer.Context,
    url: Url = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the server's first.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second: an open loop.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Users that wait for their answers: a closed loop.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A trace: Mooncake's, Azure's, or Baton's own.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="plain (default), chat, rag, agents, reasoning, few_shot, mixed."),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="How many.")] = None,
    duration: Annotated[float | None, typer.Option(help="For so many seconds.")] = None,
    warm_up: Annotated[
        float | None, typer.Option(help="Seconds that don't count; default: the first tenth.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Of arrivals: 1 is Poisson, 0 even, more comes in bursts.")
    ] = 1.0,
    rate_factor: Annotated[float, typer.Option(help="A trace so many times as fast.")] = 1.0,
    jitter_seconds: Annotated[
        float, typer.Option(help="Spreads a trace's arrivals; Mooncake's clock ticks every 3 s.")
    ] = 0.0,
    think_seconds: Annotated[
        float, typer.Option(help="Mean pause of a user between two turns of a conversation.")
    ] = 0.0,
    input_tokens: Annotated[int, typer.Option(help="Of a plain request, in the mean.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Of its answer, at most.")] = 128,
    input_spread: Annotated[
        float, typer.Option(help="Sigma of log-normal lengths; 0: all alike.")
    ] = 0.0,
    output_spread: Annotated[float, typer.Option(help="The same of answers.")] = 0.0,
    shared_tokens: Annotated[int, typer.Option(help="That all plain prompts begin with.")] = 0,
    endpoint: Endpoint = None,
    prompts: Form = "text",
    extra: Annotated[
        str, typer.Option(metavar="JSON", help="Fields that every body gets, as an object.")
    ] = "{}",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of full length; vLLM's extension.")
    ] = False,
    slo_ttft: Annotated[float | None, typer.Option(help="Seconds to the first token.")] = None,
    slo_tbt: Annotated[
        float | None, typer.Option(help="Seconds between tokens, in the mean of an answer.")
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="BENCH_API_KEY", help="Better by environment.", show_envvar=True)
    ] = "",
    ca: Annotated[Path | None, typer.Option(help="Certificates to trust, in PEM.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Any certificate will do.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for a request, at most.")] = 600.0,
    at_once: Annotated[int, typer.Option(help="Requests under way, at most.")] = 10_000,
    processes: Annotated[int, typer.Option(help="That the load is spread over.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same load.")] = 0,
    salt: Annotated[
        str | None,
        typer.Option(help="What prompts begin with; default: another text in every run."),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="A folder for figures.")] = None,
    output: Annotated[Path | None, typer.Option(help="A file for the JSON object.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Load on a server, and what its users would see; exit code 1 if nothing is answered. Below it:
    the engine alone."""
    if context.invoked_subcommand is not None:
        _refuse_options(context, context.invoked_subcommand)
        return
    from load_generator.config import BenchConfig, parse_extra, parse_form, prompt_salt
    from load_generator.driver import DriverLimits
    from load_generator.load_spec import LoadSpec, RequestLengths
    from load_generator.result import SloTargets
    from load_generator.run import run_bench
    from load_generator.target import parse_target
    from simulator.scenario import check_at_least, check_positive

    check_positive("--timeout", timeout)
    check_at_least("--at-once", at_once, 1)
    for flag, seconds in (("--slo-ttft", slo_ttft), ("--slo-tbt", slo_tbt)):
        if seconds is not None:
            check_positive(flag, seconds)
    chat, as_tokens = parse_form(endpoint, prompts)
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
    question = BenchConfig(
        target=parse_target(url, api_key, ca, insecure),
        model=model,
        chat=chat,
        as_tokens=as_tokens,
        salt=prompt_salt(salt),
        extra=parse_extra(extra, ignore_eos),
        load=load,
        limits=DriverLimits(timeout, at_once),
        slo=SloTargets(slo_ttft, slo_tbt),
        processes=processes,
        plots=plots,
        output=output,
        as_json=as_json,
    )
    run_bench(question)


app.command("engine")(bench_engine)


def _refuse_options(context: typer.Context, command: str) -> None:
    """They are the load's. Raises Invalid."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{name.replace('_', '-')}"
            raise Invalid(f"{flag} is of baton bench; options of {command} go behind its name")
