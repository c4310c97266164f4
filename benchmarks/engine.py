"""The engine on a CPU: prefill and decode, on our kernels, on torch, and transformers beside them.

    python -m benchmarks.engine [--shape 50m|0.6b] [--layers N] [--dtype bfloat16|float32]
                                [--threads N] [--rounds N] [--without transformers] [--contexts …]

All have the same random weights and take turns, one after the other, in each round; the figures are
medians. Times are CPU seconds of the whole process, so that what else the machine does costs as
little of the truth as can be; with one thread that is how long it takes on a quiet machine. KV of a
decode's context is noise: what it says takes no time. Beside the figures stand the ceilings of the
same run: products that stay in registers, and reads of memory that lies in order. Prints a
table, and JSON as the last line.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.native.library import KINDS, load
from baton.engine.plan import Plan, Row
from baton.engine.runner import ModelRunner
from benchmarks.machine import describe

SHAPES = {
    "50m": (8, 512, 1536, 8, 4, 64, 32_000),
    "0.6b": (28, 1024, 3072, 16, 8, 128, 151_936),
}
"""Layers, hidden and intermediate size, heads, KV heads, head size, vocabulary."""

BLOCK_TOKENS = 16
CHUNK = 512
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
BATCHES = (1, 8, 32)
MAX_KV_BYTES = 3 * 2**30
"""Beyond it a decode is left out: all contenders' KV must fit into the machine."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """``context`` tokens of each of ``batch`` requests: prompts to read, or a token more each."""

    kind: str
    batch: int
    context: int

    @property
    def tokens(self) -> int:
        return self.context if self.kind == "prefill" else self.batch


class Baton:
    def __init__(self, path: Path, options: argparse.Namespace, kernels: str) -> None:
        most = max(work.batch * work.context for work in works(options))
        self._runner = ModelRunner.load(
            path,
            device="cpu",
            dtype=options.dtype,
            num_blocks=most // BLOCK_TOKENS + 1,
            block_tokens=BLOCK_TOKENS,
            cpu_kernels=kernels,
        )
        self._runner.pool.tensor.normal_()
        chance = torch.Generator().manual_seed(options.seed)
        self._blocks = torch.randperm(self._runner.num_blocks, generator=chance).tolist()

    def step(self, work: Work) -> Step:
        if work.kind == "prefill":
            starts = range(0, work.context, CHUNK)
            plans = [
                self._plan([0], start, min(CHUNK, work.context - start), work.context)
                for start in starts
            ]
        else:
            plans = [self._plan(range(work.batch), work.context - 1, 1, work.context)]
        return lambda: [self._runner.run(plan) for plan in plans]

    def _plan(self, requests: Any, start: int, count: int, context: int) -> Plan:
        each = -(-context // BLOCK_TOKENS)
        rows = tuple(
            Row(
                RequestId(str(n)),
                tuple(TokenId(1 + (n + token) % 1000) for token in range(start, start + count)),
                start,
                tuple(BlockId(block) for block in self._blocks[n * each : (n + 1) * each]),
                sample=start + count == context,
                sampling=GREEDY,
            )
            for n in requests
        )
        return Plan(0, rows)


class Transformers:
    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        dtype = getattr(torch, options.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self._dtype = dtype

    def step(self, work: Work) -> Step:
        if work.kind == "prefill":
            tokens = torch.arange(1, work.context + 1).remainder(1000).unsqueeze(0)
            return lambda: self._call(tokens, DynamicCache())
        cache, tokens = self._noise(work), torch.ones(work.batch, 1, dtype=torch.int64)

        def decode() -> None:
            self._call(tokens, cache)
            cache.crop(-1)

        return decode

    @torch.inference_mode()
    def _call(self, tokens: torch.Tensor, cache: DynamicCache) -> None:
        logits = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        logits[:, -1].argmax(dim=-1)

    def _noise(self, work: Work) -> DynamicCache:
        config, cache = self._model.config, DynamicCache()
        shape = (work.batch, config.num_key_value_heads, work.context - 1, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(*(torch.randn(shape).to(self._dtype) for _ in range(2)), layer)
        return cache


@dataclass(frozen=True)
class Ceilings:
    """Of one core."""

    gflops: float
    gbytes_per_second: float


def measure_ceilings(dtype: str, rounds: int) -> Ceilings:
    library, kind = load(), KINDS[getattr(torch, dtype)]
    steps, lanes = 500_000, 24 * 16 * (2 if dtype == "bfloat16" else 1)
    size = 256 * 2**20
    memory = torch.zeros(size // 4 + 16)
    start = -(-memory.data_ptr() // 64) * 64
    products = median(lambda: library.baton_products_only(kind, steps), rounds)
    reads = median(lambda: library.baton_reads_only(start, size), rounds)
    return Ceilings(2 * steps * lanes / products / 1e9, size / reads / 1e9)


def cpu_seconds(action: Step) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def median(action: Step, rounds: int) -> float:
    action()
    return statistics.median(cpu_seconds(action) for _ in range(rounds))


def works(options: argparse.Namespace) -> Iterator[Work]:
    layers, _, _, _, kv_heads, dim, _ = shape_of(options)
    token_bytes = 2 * layers * kv_heads * dim * getattr(torch, options.dtype).itemsize
    for context in options.contexts:
        yield Work("prefill", 1, context)
    for context in options.contexts:
        for batch in BATCHES:
            if batch * context * token_bytes <= MAX_KV_BYTES:
                yield Work("decode", batch, context)


def shape_of(options: argparse.Namespace) -> tuple[int, ...]:
    layers, *rest = SHAPES[options.shape]
    return (options.layers or layers, *rest)


def write_model(path: Path, options: argparse.Namespace) -> None:
    layers, hidden, size, heads, kv_heads, dim, vocabulary = shape_of(options)
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=size, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim,
        vocab_size=vocabulary, max_position_embeddings=8192, tie_word_embeddings=True,
        eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path)


def shares(work: Work, seconds: float, ceilings: Ceilings, options: argparse.Namespace) -> float:
    """Of the ceiling: of products for a prompt, of memory (weights and KV, once) for a decode."""
    layers, hidden, size, heads, kv_heads, dim, vocabulary = shape_of(options)
    width = 2 if options.dtype == "bfloat16" else 4
    layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * size
    if work.kind == "prefill":
        pairs = work.context * (work.context + 1) / 2
        flops = 2 * work.context * layers * layer + 4 * pairs * layers * heads * dim
        return (flops + 2 * hidden * vocabulary) / seconds / 1e9 / ceilings.gflops
    kv = 2 * layers * kv_heads * dim * work.batch * work.context
    read = (layers * layer + hidden * vocabulary + kv) * width
    return read / seconds / 1e9 / ceilings.gbytes_per_second


def run(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_model(path, options)
        contenders: dict[str, Any] = {
            "kernels": Baton(path, options, "on"),
            "torch": Baton(path, options, "off"),
        }
        if options.without != "transformers":
            contenders["transformers"] = Transformers(path, options)
        for work in works(options):
            steps = {name: each.step(work) for name, each in contenders.items()}
            for step in steps.values():
                step()
            times: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(options.rounds):
                for name, step in steps.items():
                    times[name].append(cpu_seconds(step))
            ceilings = measure_ceilings(options.dtype, 3)
            medians = {name: statistics.median(each) for name, each in times.items()}
            yield {
                **asdict(work),
                "tokens_per_cpu_second": {n: work.tokens / each for n, each in medians.items()},
                "share": shares(work, medians["kernels"], ceilings, options),
                **asdict(ceilings),
            }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="50m")
    parser.add_argument("--layers", type=int, default=0, help="fewer, to be done sooner; 0: all")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--without", choices=["transformers"])
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    told = {**describe(), **vars(options)}
    print(told, "tokens per CPU second; share of the ceiling for our kernels", sep="\n")
    lines = []
    for line in run(options):
        lines.append(line)
        rates = line["tokens_per_cpu_second"]
        assert isinstance(rates, dict)
        columns = [
            f"{name} {rate:9.1f} ({rates['kernels'] / rate:5.2f}×)" for name, rate in rates.items()
        ]
        print(
            f"{line['kind']:8} batch {line['batch']:2} context {line['context']:5}  "
            f"{'  '.join(columns)}  {line['share']:5.0%} of {line['gflops']:.0f} GFLOP/s, "
            f"{line['gbytes_per_second']:.1f} GB/s",
            flush=True,
        )
    print(json.dumps({**told, "lines": lines}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
