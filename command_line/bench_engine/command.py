"""The options of the command ``baton bench engine``."""

from pathlib import Path
from typing import Annotated, Any

import typer

Counts = Annotated[str | None, typer.Option(metavar="N,N,…")]


def bench_engine(
    model: Annotated[
        str | None,
        typer.Option(help="Model directory, hub id, or demo. Default: the setting `model`."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=0, help="Number of CPU threads; 0: all cores.")
    ] = None,
    batches: Annotated[
        str, typer.Option(metavar="N,N,…", help="Decode batch sizes, in sequences.")
    ] = "1,8,32",
    prefill_batches: Annotated[
        str, typer.Option(metavar="N,N,…", help="Prefill batch sizes, in prompts.")
    ] = "1",
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…",
            help="Context lengths in tokens: of a prompt, or before the decoded token. Default: "
            "512,4096, as far as the model allows.",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds per figure; the median is reported.")
    ] = 5,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="After so many seconds, no new round of a figure starts.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of the order of KV blocks in memory.")] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="A file to write the JSON output to; -: stdout."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a roofline plot; the file's suffix selects its format."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any setting, by name. Repeatable."),
    ] = None,
) -> None:
    """Measure prefill and decode of the engine alone, in this process, by batch and context, and
    compare with the most that this machine could do."""
    from baton.config import load_settings, set_thread_environment
    from command_line.bench_engine.config import EngineBenchConfig, parse_counts
    from command_line.main import merge_settings

    flags: dict[str, Any] = {"device": device, "dtype": dtype, "threads": threads}
    settings = load_settings(config, **merge_settings({"model": _model(model), **flags}, set_))
    bench_config = EngineBenchConfig(
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

    run_engine_bench(bench_config)


def _model(name: str | None) -> str | None:
    from baton.config import DEMO_MODEL

    return str(DEMO_MODEL) if name == "demo" else name
