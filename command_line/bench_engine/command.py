"""The options of the command ``baton bench engine``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from command_line.common_options import Device, DType, SettingSources
from command_line.option_groups import with_option_groups


@dataclass(frozen=True, kw_only=True)
class MeasurementOptions:
    """Options that determine what is measured, how often, and where the figures are written."""

    batches: Annotated[
        str, typer.Option(metavar="N,N,…", help="Decode batch sizes, in sequences.")
    ] = "1,8,32"
    prefill_batches: Annotated[
        str, typer.Option(metavar="N,N,…", help="Prefill batch sizes, in prompts.")
    ] = "1"
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…",
            help="Context lengths in tokens: of a prompt, or before the decoded token. Default: "
            "512,4096, as far as the model allows.",
        ),
    ] = None
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds per figure; the median is reported.")
    ] = 5
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds after which no new round of a figure starts.")
    ] = 10.0
    seed: Annotated[int, typer.Option(help="Seed of the order of KV blocks in memory.")] = 0
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="A file to write the JSON output to; -: stdout."
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure steps of prompts, of answers and of both instead, and write a table of "
            "costs for `baton simulate --costs`.",
        ),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a roofline plot; the file's suffix selects its format."
        ),
    ] = None


@with_option_groups
def bench_engine(
    model: Annotated[
        str | None,
        typer.Option(help="Model directory, hub id, or demo. Default: the setting `model`."),
    ] = None,
    device: Device = None,
    dtype: DType = None,
    threads: Annotated[
        int | None, typer.Option(min=0, help="Number of CPU threads; 0: all cores.")
    ] = None,
    measurement: MeasurementOptions = MeasurementOptions(),
    sources: SettingSources = SettingSources(),
) -> None:
    """Measure prefill and decode of the engine alone, in this process, by batch and context, and
    compare them with the maximum that this machine could reach."""
    from baton.config import set_thread_environment
    from command_line.bench_engine.config import EngineBenchConfig, parse_counts

    settings = sources.load({"model": model, "device": device, "dtype": dtype, "threads": threads})
    contexts = measurement.contexts
    bench_config = EngineBenchConfig(
        settings=settings,
        prefill_batches=parse_counts("--prefill-batches", measurement.prefill_batches),
        decode_batches=parse_counts("--batches", measurement.batches),
        contexts=parse_counts("--contexts", contexts) if contexts is not None else None,
        rounds=measurement.rounds,
        seconds=measurement.seconds,
        seed=measurement.seed,
        json_file=measurement.json_file,
        plot=measurement.plot,
        profile=measurement.profile,
    )
    set_thread_environment(settings.threads)  # before torch is imported
    from command_line.bench_engine.run import run_engine_bench

    run_engine_bench(bench_config)
