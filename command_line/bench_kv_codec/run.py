"""Runs ``baton bench kv-codec``: loads the model, measures each codec, and reports the results."""

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from baton.checkpoints.hub import resolve_model
from baton.clock import SystemClock
from baton.engine.native.processor import model_name
from baton.engine.runner import ModelRunner
from baton.errors import Invalid
from baton.kv_codec.block_format import BlockFormat, parse_layout
from baton.kv_codec.registry import open_codecs
from baton.reports.console import open_console
from baton.text.tokenizer import Tokenizer
from baton.worker.engine_settings import runner_options
from command_line.bench_kv_codec.codec_quality import CodecQuality, QualityMeter
from command_line.bench_kv_codec.codec_speed import Blocks, CodecSpeed, measure_speeds
from command_line.bench_kv_codec.config import KvCodecBenchConfig

FORMAT = "baton-bench-kv-codec-1"
SPEED_BYTES = 64 * 2**20
"""The most bytes of blocks for a measurement of speed: more than the caches of a core have."""

RANDOM_SEED = 1
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class KvCodecBenchResult:
    """The results of a run. ``model_speeds`` are for the KV of the model, ``random_speeds`` for
    random normal values in the same format."""

    model: str
    layout: str
    machine: str
    prompts: int
    prompt_tokens: int
    model_speeds: tuple[CodecSpeed, ...]
    random_speeds: tuple[CodecSpeed, ...]
    qualities: tuple[CodecQuality, ...]

    def as_dict(self) -> dict[str, object]:
        return {"format": FORMAT, **asdict(self)}


def run_kv_codec_bench(config: KvCodecBenchConfig) -> None:
    """Measure and report all codecs. Raises Invalid for a wrong option, or a model whose KV has no
    codecs."""
    result = _measure(config)
    text = json.dumps(result.as_dict())
    if config.writes_to_stdout:
        print(text)
        return
    if config.json_file is not None:
        config.json_file.write_text(text + "\n", encoding="utf-8")
    _print(open_console(), result)


def _measure(config: KvCodecBenchConfig) -> KvCodecBenchResult:
    path = resolve_model(config.settings.model)
    length = config.prompt_tokens + config.continuation_tokens
    texts = _texts(config, Tokenizer.load(path, clock=SystemClock()), length)
    num_blocks = -(-length // config.settings.block_tokens)
    runner = ModelRunner.load(
        path, replace(runner_options(config.settings), num_blocks=num_blocks, staging_bytes=0)
    )
    if length > runner.limits.max_position_embeddings:
        raise Invalid(
            f"--prompt-tokens and --continuation-tokens are {length} together; the model has only "
            f"{runner.limits.max_position_embeddings:,} positions"
        )
    block_format = parse_layout(runner.kv_layout)
    codecs = open_codecs(block_format)
    if block_format is None or not codecs:
        raise Invalid(f"there are no codecs for KV of the layout {runner.kv_layout}")
    meter = QualityMeter(runner, texts, config.prompt_tokens)
    qualities = [meter.measure("none", None)]
    qualities += [meter.measure(name.value, codec) for name, codec in codecs.items()]
    blocks = meter.blocks.reshape(-1, block_format.size_bytes)
    blocks = blocks[: max(1, SPEED_BYTES // block_format.size_bytes)]
    return KvCodecBenchResult(
        model=path.name,
        layout=runner.kv_layout,
        machine=model_name(),
        prompts=len(texts),
        prompt_tokens=config.prompt_tokens,
        model_speeds=tuple(measure_speeds(codecs, blocks)),
        random_speeds=tuple(measure_speeds(codecs, _random_blocks(block_format, len(blocks)))),
        qualities=tuple(qualities),
    )


def _texts(config: KvCodecBenchConfig, tokenizer: Tokenizer, length: int) -> Sequence[list[int]]:
    """Cut the text into prompts with their continuations, ``length`` tokens each."""
    tokens = tokenizer.encode(_read_text(config.text))
    texts = [tokens[first : first + length] for first in range(0, len(tokens), length)]
    texts = [text for text in texts if len(text) == length][: config.prompts]
    if not texts:
        raise Invalid(
            f"the text has {len(tokens)} tokens, but a prompt and its continuation need {length}; "
            "name a longer one with --text, or lower --prompt-tokens"
        )
    return texts


def _read_text(path: Path | None) -> str:
    if path is None:
        return importlib.metadata.metadata("baton")["Description"]
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"--text {path} can't be read: {error}") from error


def _random_blocks(block_format: BlockFormat, count: int) -> Blocks:
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    shape = (count, block_format.num_planes * block_format.plane_values)
    values = torch.randn(shape, generator=generator).to(getattr(torch, block_format.dtype))
    return np.array(values.view(torch.uint8).numpy())


def _print(console: Console, result: KvCodecBenchResult) -> None:
    console.print(
        f"{result.model}, KV {result.layout}, on one core of {result.machine}",
        highlight=False, markup=False,
    )  # fmt: skip
    table = Table(box=None)
    for name in (
        "codec", "ratio", "encode GB/s", "decode GB/s", "random: ratio", "encode GB/s",
        "decode GB/s", "perplexity", "agreement",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    qualities = {each.name: each for each in result.qualities}
    for speed, random in zip(result.model_speeds, result.random_speeds, strict=True):
        quality = qualities.get("none" if speed.name == "copy" else speed.name)
        table.add_row(speed.name, *_speed_cells(speed), *_speed_cells(random), *_cells(quality))
    console.print(table)
    console.print(
        f"perplexity and likeliest tokens after {result.prompts} prompts of "
        f"{result.prompt_tokens} tokens, whose KV passed through the codec",
        highlight=False, markup=False,
    )  # fmt: skip


def _speed_cells(speed: CodecSpeed) -> list[str]:
    return [
        f"{speed.ratio:.3f}",
        f"{speed.encode_bytes_per_second / GIGA:.2f}",
        f"{speed.decode_bytes_per_second / GIGA:.2f}",
    ]


def _cells(quality: CodecQuality | None) -> list[str]:
    if quality is None:
        return ["", ""]
    return [f"{quality.perplexity:.3f}", f"{100 * quality.agreement:.2f} %"]
