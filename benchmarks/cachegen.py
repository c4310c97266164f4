"""LMCache's CacheGen beside Baton's codecs: size, speed and quality for the same KV.

    python -m benchmarks.cachegen --lmcache-python PYTHON --text FILE [--model demo] [--prompts 10]

PYTHON is the interpreter of an environment with LMCache, in which
``benchmarks/peers/cachegen.py`` runs (its docstring says how to make one). Both get the KV of the
same prompts of 512 tokens, in BF16. CacheGen encodes chunks of 256 tokens with the bins that it
chooses for a model it does not know. On a CPU, LMCache runs its arithmetic coder in numba with a
thread per core; on a GPU it has kernels in CUDA, which are not measured here.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.checkpoints.hub import resolve_model
from baton.clock import SystemClock
from baton.config import load_settings
from baton.core.kv_codec import KvCodecName
from baton.engine.runner import ModelRunner
from baton.kv_codec.block_format import BlockFormat, parse_layout
from baton.kv_codec.host_memory import bytes_at
from baton.kv_codec.registry import open_codecs
from baton.text.tokenizer import Tokenizer
from baton.worker.engine_settings import runner_options
from command_line.bench_kv_codec.codec_quality import QualityMeter
from command_line.bench_kv_codec.codec_speed import measure_speeds
from testkit.machine import describe

PROMPT_TOKENS, CONTINUATION_TOKENS = 512, 64
Bits = npt.NDArray[np.uint16]


class RecordedCodec:
    """A codec whose results were computed elsewhere: it replaces each block by what was recorded
    for it."""

    name = KvCodecName.INT4

    def __init__(self, blocks: npt.NDArray[np.uint8], results: npt.NDArray[np.uint8]) -> None:
        self.max_encoded_bytes = blocks.shape[1]
        self._results = {
            block.tobytes(): result for block, result in zip(blocks, results, strict=True)
        }

    def encode(self, blocks: Sequence[int], targets: Sequence[int]) -> list[int]:
        size = self.max_encoded_bytes
        for block, target in zip(blocks, targets, strict=True):
            bytes_at(target, size)[:] = self._results[bytes_at(block, size).tobytes()]
        return [size] * len(blocks)

    def decode(
        self, sources: Sequence[int], sizes_bytes: Sequence[int], blocks: Sequence[int]
    ) -> list[bool]:
        for source, size, block in zip(sources, sizes_bytes, blocks, strict=True):
            bytes_at(block, size)[:] = bytes_at(source, size)
        return [True] * len(sources)


def as_prompts(blocks: npt.NDArray[np.uint8], form: BlockFormat) -> Bits:
    """Return the blocks [prompts, num_blocks, block_bytes] of prompts as bits of BF16
    [prompts, layers, 2, tokens, kv_heads, head_dim]."""
    shape = (form.num_layers, 2, form.block_tokens, form.kv_heads, form.head_dim)
    parts = blocks.view(np.uint16).reshape(*blocks.shape[:2], *shape)
    joined = np.moveaxis(parts, 1, 3)
    return np.ascontiguousarray(
        joined.reshape(len(blocks), form.num_layers, 2, -1, form.kv_heads, form.head_dim)
    )


def as_blocks(prompts: Bits, form: BlockFormat) -> npt.NDArray[np.uint8]:
    """The inverse of :func:`as_prompts`, as [prompts * num_blocks, block_bytes]."""
    parts = prompts.reshape(
        len(prompts), form.num_layers, 2, -1, form.block_tokens, form.kv_heads, form.head_dim
    )
    blocks = np.ascontiguousarray(np.moveaxis(parts, 3, 1))
    return blocks.view(np.uint8).reshape(-1, form.size_bytes)


def run_lmcache(python: str, prompts: Bits) -> tuple[Bits, dict[str, float]]:
    """Pass the prompts through CacheGen; return the decoded ones and its report."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source.npy", Path(folder) / "target.npy"
        np.save(source, prompts)
        worker = Path(__file__).parent / "peers" / "cachegen.py"
        done = subprocess.run(
            [python, str(worker), str(source), str(target)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"CacheGen failed:\n{done.stderr[-2000:]}")
        return np.load(target), json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lmcache-python", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=10)
    arguments = parser.parse_args()
    settings = load_settings(model=arguments.model, dtype="bfloat16")
    path = resolve_model(settings.model)
    length = PROMPT_TOKENS + CONTINUATION_TOKENS
    tokens = Tokenizer.load(path, clock=SystemClock()).encode(arguments.text.read_text())
    texts = [tokens[first : first + length] for first in range(0, len(tokens), length)]
    texts = [text for text in texts if len(text) == length][: arguments.prompts]
    num_blocks = -(-length // settings.block_tokens)
    runner = ModelRunner.load(
        path, replace(runner_options(settings), num_blocks=num_blocks, staging_bytes=0)
    )
    form = parse_layout(runner.kv_layout)
    assert form is not None, "the model's KV has no codecs"
    meter = QualityMeter(runner, texts, PROMPT_TOKENS)
    flat = meter.blocks.reshape(-1, form.size_bytes)
    decoded, report = run_lmcache(arguments.lmcache_python, as_prompts(meter.blocks, form))
    codecs = open_codecs(form)
    speeds = {each.name: each for each in measure_speeds(codecs, flat)}
    timed_bytes = flat.nbytes * report["timed_prompts"] / len(texts)
    rows: list[dict[str, object]] = []
    meter.measure("none", None)
    for name, codec in codecs.items():
        quality, speed = meter.measure(name.value, codec), speeds[name.value]
        rows.append(
            {
                "codec": name.value, "ratio": speed.ratio,
                "encode_gb_per_s": speed.encode_bytes_per_second / 1e9,
                "decode_gb_per_s": speed.decode_bytes_per_second / 1e9,
                "perplexity": quality.perplexity, "agreement": quality.agreement,
            }
        )  # fmt: skip
    quality = meter.measure("cachegen", RecordedCodec(flat, as_blocks(decoded, form)))
    rows.append(
        {
            "codec": "cachegen", "ratio": flat.nbytes / report["encoded_bytes"],
            "ratio_without_padding": flat.nbytes / report["needed_bytes"],
            "encode_gb_per_s": timed_bytes / report["encode_seconds"] / 1e9,
            "decode_gb_per_s": timed_bytes / report["decode_seconds"] / 1e9,
            "perplexity": quality.perplexity, "agreement": quality.agreement,
        }
    )  # fmt: skip
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    print(json.dumps({"machine": describe(), "layout": runner.kv_layout, "rows": rows}))


if __name__ == "__main__":
    main()
