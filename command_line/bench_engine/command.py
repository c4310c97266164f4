"""The command ``baton bench engine``: its options."""

from pathlib import Path
from typing import Annotated, Any

import typer

Counts = Annotated[str | None, typer.Option(metavar="N,N,…")]


def bench_engine(
    model: Annotated[
        str | None, typer.Option(help="A directory, a hub id, or demo; default: the setting.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    threads: Annotated[int | None, typer.Option(min=0, help="Of a CPU; 0: all cores.")] = None,
    batches: Annotated[
        str, typer.Option(metavar="N,N,…", help="Answers that are written at once.")
    ] = "1,8,32",
    prefill_batches: Annotated[
        str, typer.Option(metavar="N,N,…", help="Prompts that are read in one go.")
    ] = "1",
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…",
            help="Tokens of a prompt, or before an answer's next; default: "
            "512,4096, as far as the model goes.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the median is told.")] = 5,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="For one figure; then no new round begins.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the order in which blocks lie.")] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="A file for the JSON object; -: stdout."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A roofline; the name's ending is its format."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any setting by its name; repeatable."),
    ] = None,
) -> None:
    """The engine alone, in this process: prompts read and answers written by batch and context,
    beside what this machine could do at most."""
    from baton.config import load_settings, set_thread_environment
    from command_line.bench_engine.config import EngineBenchConfig, parse_counts
    from command_line.main import merge_settings

    flags: dict[str, Any] = {"device": device, "dtype": dtype, "threads": threads}
    settings = load_settings(config, **merge_settings({"model": _model(model), **flags}, set_))
    question = EngineBenchConfig(
        settings=settings,
        prefill_batches=parse_counts("--prefill-batches", prefill_batches),
        decode_batches=parse_counts("--batches", batches),
        contexts=parse_counts("--contexts", contexts) if contexts is not None else None,
        rounds=rounds,
        seconds=seconds,
        seed=seed,
        json_file=json_file,
        plot=plot,
    )
    set_thread_environment(settings.threads)  # before torch is imported
    from command_line.bench_engine.run import run_engine_bench

    run_engine_bench(question)


def _model(name: str | None) -> str | None:
    from baton.config import DEMO_MODEL

    return str(DEMO_MODEL) if name == "demo" else name
