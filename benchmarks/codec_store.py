"""Measure how many tokens the store's DRAM holds by codec, and what that is worth on a trace.

    python -m benchmarks.codec_store [--trace FILE] [--model DIR] [--arena-mib 1024]

Blocks of real KV (of the given model, the demo model unless given, in BF16 and FP32; the text is
README.md) and of synthetic KV in the shape of an 8B model (normal values) are encoded and stored in
a DRAM tier until it is full, in slots of the sizes that the store uses. With a lossy codec, the
first block of each chain of 64 blocks is lossless, as workers publish it. Then a trace is replayed
through the store's eviction policy, with the capacity in blocks that 10,000 raw blocks' worth of
memory has. Prints tables, and JSON as the last line.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from baton.checkpoint import DEMO_MODEL
from baton.clock import SystemClock
from baton.config import Settings
from baton.core.ids import BlockKey
from baton.core.kv_codec import KvCodecName
from baton.engine.runner import ModelRunner
from baton.engine_settings import runner_options
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import BlockFormat, parse_layout
from baton.kv_codec.registry import open_codecs
from baton.text.tokenizer import Tokenizer
from benchmarks.eviction import read_trace, replay
from benchmarks.machine import describe
from command_line.bench_kv_codec.codec_quality import QualityMeter
from kvstore.block_encoding import BlockEncoding
from kvstore.dram_tier import DramTier
from kvstore.eviction import new_eviction_policy

Blocks = npt.NDArray[np.uint8]
MIB = 1024 * 1024
RAW_BLOCKS = 10_000
CHAIN_BLOCKS = 64
LARGE_FORMAT = BlockFormat("bfloat16", 36, 16, 8, 128)
MAX_BLOCKS = 64
"""Different blocks per format; they are stored again and again."""


def real_blocks(model: Path, dtype: str) -> tuple[BlockFormat, Blocks]:
    """Compute the KV of text, and return its full blocks, [num_blocks, size_bytes]."""
    settings = Settings.model_validate(
        {"id": "bench", "device": "cpu", "model": str(model), "dtype": dtype}
    )
    length = 16 * settings.kv_block_tokens
    tokens = Tokenizer.load(model, clock=SystemClock()).encode(Path("README.md").read_text())
    texts = [tokens[first : first + length] for first in range(0, len(tokens), length)]
    texts = [text for text in texts if len(text) == length][:4]
    runner = ModelRunner.load(
        model, replace(runner_options(settings), num_blocks=length, staging_bytes=0)
    )
    block_format = parse_layout(runner.kv_layout)
    assert block_format is not None, runner.kv_layout
    meter = QualityMeter(runner, texts, length - settings.kv_block_tokens)
    meter.measure("none", None)
    blocks = np.array(meter.blocks.reshape(-1, block_format.size_bytes))
    return block_format, blocks[:MAX_BLOCKS]


def synthetic_blocks(block_format: BlockFormat, seed: int) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    shape = (8, block_format.num_planes * block_format.plane_values)
    values = torch.randn(shape, generator=generator).to(torch.bfloat16)
    return np.array(values.view(torch.uint8).numpy())


def encoded_sizes(codec: BlockCodec, blocks: Blocks) -> list[int]:
    """Return the encoded size of each block; its own size if it does not become smaller."""
    target = np.empty(codec.max_encoded_bytes, np.uint8)
    sizes = [
        codec.encode([int(block.ctypes.data)], [int(target.ctypes.data)])[0] for block in blocks
    ]
    return [size or len(block) for size, block in zip(sizes, blocks, strict=True)]


def tokens_held(
    block_format: BlockFormat,
    sizes: Sequence[int],
    first_sizes: Sequence[int],
    codecs: tuple[KvCodecName, KvCodecName],
    arena_bytes: int,
) -> int:
    """Store blocks of these sizes until the tier is full; return the tokens that it holds. The
    first block of each chain has a size of ``first_sizes``. ``codecs``: of it, and of the rest."""
    dram, number = DramTier(arena_bytes), 0
    while True:
        is_first = number % CHAIN_BLOCKS == 0
        some = first_sizes if is_first else sizes
        size = some[number % len(some)]
        name = codecs[0] if is_first else codecs[1]
        if size == block_format.size_bytes:
            name = KvCodecName.NONE
        encoding = BlockEncoding(name, block_format)
        key = BlockKey(number.to_bytes(16, "little"))
        if dram.allocate(key, size, encoding) is None:
            return number * block_format.block_tokens
        number += 1


def measure(block_format: BlockFormat, blocks: Blocks, arena_bytes: int) -> dict[str, float]:
    """Return the tokens held with each codec, divided by those held with none."""
    codecs = open_codecs(block_format)
    raw_sizes = [block_format.size_bytes]
    none = (KvCodecName.NONE, KvCodecName.NONE)
    raw = tokens_held(block_format, raw_sizes, raw_sizes, none, arena_bytes)
    lossless = encoded_sizes(codecs[KvCodecName.LOSSLESS], blocks)
    held = {"none": 1.0}
    for name, codec in codecs.items():
        sizes = encoded_sizes(codec, blocks)
        of_both = (KvCodecName.LOSSLESS, name)
        held[name.value] = tokens_held(block_format, sizes, lossless, of_both, arena_bytes) / raw
    return held


def hit_shares(trace: Path, held: dict[str, float]) -> dict[str, float]:
    """Return the share of prompt tokens that a replay finds, by codec."""
    prompts = read_trace(trace)
    total = sum(prompt.num_tokens for prompt in prompts)
    shares = {}
    for name, ratio in held.items():
        hits = replay(prompts, new_eviction_policy("baton"), int(RAW_BLOCKS * ratio))
        shares[name] = hits.tokens / total
    return shares


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--arena-mib", type=int, default=1024)
    options = parser.parse_args(arguments)
    machine, arena_bytes = describe(), options.arena_mib * MIB
    print(machine)
    rows: dict[str, dict[str, float]] = {}
    for dtype in ("bfloat16", "float32"):
        name = f"{options.model.name}, {dtype}"
        rows[name] = measure(*real_blocks(options.model, dtype), arena_bytes)
    large = measure(LARGE_FORMAT, synthetic_blocks(LARGE_FORMAT, 1), arena_bytes)
    rows["8B shape, bfloat16, synthetic"] = large
    for name, held in rows.items():
        print(f"{name}: " + ", ".join(f"{codec} {ratio:.2f} x" for codec, ratio in held.items()))
    shares = {}
    if options.trace:
        shares = hit_shares(options.trace, large)
        print("found in the trace: " + ", ".join(f"{k} {v:.3f}" for k, v in shares.items()))
    print(json.dumps({"machine": machine, "held": rows, "hit_shares": shares}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
