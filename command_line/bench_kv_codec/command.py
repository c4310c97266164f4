"""The options of the command ``baton bench kv-codec``."""

from pathlib import Path
from typing import Annotated

import typer

from command_line.common_options import DType, SettingSources
from command_line.option_groups import with_option_groups


@with_option_groups
def bench_kv_codec(
    model: Annotated[
        str | None,
        typer.Option(help="Model directory, hub id, or demo. Default: the setting `model`."),
    ] = None,
    dtype: DType = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text of the prompts. Default: Baton's README."),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=16, help="Tokens whose KV passes through the codec.")
    ] = 512,
    continuation_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens after the prompt that are predicted.")
    ] = 64,
    prompts: Annotated[
        int, typer.Option(min=1, max=1000, help="Prompts, as far as the text goes.")
    ] = 16,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="A file to write the JSON output to; -: stdout."
        ),
    ] = None,
    sources: SettingSources = SettingSources(),
) -> None:
    """Measure the codecs of KV blocks on a CPU core: the ratio and the speed for the KV of a model
    and for random values, and how the model predicts a text if the KV before it passed through the
    codec."""
    from baton.config import set_thread_environment
    from command_line.bench_kv_codec.config import KvCodecBenchConfig

    settings = sources.load({"model": model, "device": "cpu", "dtype": dtype})
    config = KvCodecBenchConfig(
        settings=settings,
        text=text,
        prompt_tokens=prompt_tokens,
        continuation_tokens=continuation_tokens,
        prompts=prompts,
        json_file=json_file,
    )
    set_thread_environment(settings.threads)  # before torch is imported
    from command_line.bench_kv_codec.run import run_kv_codec_bench

    run_kv_codec_bench(config)
