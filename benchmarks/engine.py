"""Compare prefill and decode on a CPU: Baton's kernels, vLLM, llama.cpp, torch and transformers.

    python -m benchmarks.engine [--shape 50m|0.6b] [--layers N] [--dtype bfloat16|float32]
                                [--threads N] [--rounds N] [--contexts …] [--batches …]
                                [--decode-contexts …]
                                [--llama PYTHON] [--vllm PYTHON [--vllm-eager]]
                                [--without torch transformers] [--most-gib G]
                                [--quantized int8 int4] [--instructions avx512|avx2|…]

All contenders have the same random weights, which is checked by comparing their logits. They take
turns in each round; the figures are medians. Two times are reported: the wall-clock time, for which
a user waits, and the CPU seconds of all threads, which other load on the machine distorts less.
Before a decode, Baton's kernels and transformers fill the context with random KV, vLLM and
llama.cpp with the KV of prompts; the values do not affect the time. Two ceilings are measured in
the same run with the same number of threads, and are printed too: the fastest matrix product that
we know, and sequential memory reads (baton/engine/bench/ceilings.py).

``--llama`` is the interpreter of another environment that has llama-cpp-python and gguf
(benchmarks/peers/llama.py), ``--vllm`` one of an environment that has vLLM for CPUs
(benchmarks/peers/vllm_steps.py), whose engine is measured with its scheduler. ``--most-gib`` limits
the memory for the weights and KV of all contenders together: contenders that don't fit are left out
of a case, beginning with the last one listed above, and a case in which no contender fits is
skipped. ``--instructions`` limits Baton's kernels to the instruction set of a smaller processor, or
to the emulated tiles. Prints a table, and JSON as the last line.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from baton.checkpoints.checkpoint import ModelConfig, load_model_config
from baton.engine.bench.bench_case import BenchCase, bench_cases
from baton.engine.bench.bench_case_result import BenchCaseResult
from baton.engine.bench.bench_runner import max_blocks
from baton.engine.bench.ceilings import MeasuredCeilings, measure_ceilings
from baton.engine.bench.memory_fit import GIB, kv_bytes
from baton.engine.bench.roofline_demand import ElementSizes, num_weights, roofline_demand
from baton.engine.bench.stopwatch import ElapsedTime, median_time
from baton.engine.native.processor import (
    EMULATED_AMX,
    INSTRUCTION_SETS,
    limit_instruction_set,
)
from benchmarks.contenders import BLOCK_TOKENS, EngineContender, contenders
from testkit.machine import describe

SHAPES = {
    "50m": (8, 512, 1536, 8, 4, 64, 32_000),
    "0.6b": (28, 1024, 3072, 16, 8, 128, 151_936),
}
"""Each shape: layers, hidden and intermediate size, heads, KV heads, head size, vocabulary."""

MAX_LOGITS_DIFFERENCE = {"bfloat16": 0.03, "float32": 1e-4}
"""The largest allowed difference of logits: the norm of the difference relative to our logits'
norm. llama.cpp keeps KV in FP16, and rounds in other places."""

MAX_QUANTIZED_DIFFERENCE = {"int8": 0.1, "int4": 0.5}
"""The largest allowed difference for our quantized weights. Random weights lose more by
quantization than trained weights."""

TURN_SECONDS = 0.2
"""The time of one turn of our kernels, in which short steps are repeated, since the first step
finds cold caches."""

PROMPT = [1 + 37 * n % 1000 for n in range(48)]


@dataclass(frozen=True)
class EngineComparison:
    """The results of one case. ``ways`` maps each contender that has several methods to the one
    that was used. ``left_out`` are the contenders that did not fit into memory."""

    figures: dict[str, BenchCaseResult]
    ways: dict[str, str]
    left_out: tuple[str, ...]

    @property
    def ours(self) -> BenchCaseResult:
        return self.figures["kernels"]

    def as_dict(self) -> dict[str, object]:
        spent = {name: asdict(figure.elapsed) for name, figure in self.figures.items()}
        return {
            **self.ours.as_dict(),
            "cpu_share_of_roof": self.ours.cpu_roofline_share,
            "ceilings": asdict(self.ours.ceilings),
            "quantized_shares_of_roof": {
                name: {"wall": each.roofline_share, "cpu": each.cpu_roofline_share}
                for name, each in self.figures.items()
                if name in MAX_QUANTIZED_DIFFERENCE
            },
            "seconds_by_contender": spent,
            "times_as_fast": {
                name: {"wall": wall, "cpu": cpu} for name, (wall, cpu) in self.ratios().items()
            },
            "ways": self.ways,
            "left_out": self.left_out,
        }

    def ratios(self) -> dict[str, tuple[float, float]]:
        """Return the time of each other contender divided by the time of Baton's kernels, by wall
        clock and by CPU time."""
        ours = self.ours.elapsed
        return {
            name: (each.elapsed.wall / ours.wall, each.elapsed.cpu / ours.cpu)
            for name, each in self.figures.items()
            if name != "kernels"
        }


def run(path: Path, options: argparse.Namespace) -> Iterator[EngineComparison]:
    config = load_model_config(path)
    dtype = getattr(torch, options.dtype)
    budget = int(options.most_gib * GIB)
    weights = num_weights(config) * dtype.itemsize
    cases = [
        *bench_cases([1], [], options.contexts),
        *bench_cases([], options.batches, options.decode_contexts or options.contexts),
    ]
    possible = [work for work in cases if weights + kv_bytes(work, config, dtype) <= budget]
    if not possible:
        raise SystemExit(f"no case fits into --most-gib {options.most_gib}")
    with contenders(path, options, max_blocks(possible, BLOCK_TOKENS)) as everybody:
        check_logits(everybody, options.dtype)
        room = budget - len(everybody) * weights
        for work in possible:
            some = contenders_that_fit(everybody, kv_bytes(work, config, dtype), room)
            yield measure_line(work, some, config, options, tuple(everybody.keys() - some.keys()))


def contenders_that_fit(
    everybody: dict[str, EngineContender], kv: int, room: float
) -> dict[str, EngineContender]:
    """Select, in order, each contender whose KV still fits into ``room`` bytes. Baton's pool takes
    the first ``kv`` bytes, so the contenders that share it always fit; each other contender takes
    another ``kv`` bytes."""
    found, used = {}, kv
    for name, each in everybody.items():
        needed = 0 if each.shares_pool else kv
        if each.shares_pool or used + needed <= room:
            found[name] = each
            used += needed
    return found


def measure_line(
    work: BenchCase,
    some: dict[str, EngineContender],
    config: ModelConfig,
    options: argparse.Namespace,
    left_out: tuple[str, ...],
) -> EngineComparison:
    ways = {name: each.prepare(work) for name, each in some.items()}
    times: dict[str, list[ElapsedTime]] = {name: [] for name in some}
    count = max(1, int(TURN_SECONDS / some["kernels"].run_steps(1).wall))
    for _ in range(options.rounds):
        for name, each in some.items():
            times[name].append(each.run_steps(count))
    for each in some.values():
        each.free()
    dtype = getattr(torch, options.dtype)
    ceilings: MeasuredCeilings = measure_ceilings(torch.device("cpu"), dtype, options.threads)
    widths = {
        name: ElementSizes.for_formats(dtype, name if name in MAX_QUANTIZED_DIFFERENCE else "none")
        for name in times
    }
    figures = {
        name: BenchCaseResult(
            work, median_time(each), roofline_demand(work, config, widths[name]), ceilings
        )
        for name, each in times.items()
    }
    return EngineComparison(
        figures, {name: choice for name, choice in ways.items() if choice}, left_out
    )


def check_logits(everybody: dict[str, EngineContender], dtype: str) -> None:
    """Check that all contenders compute the same model. Exits if one does not."""
    found = {name: each.logits(PROMPT) for name, each in everybody.items()}
    ours = found.pop("kernels")
    for name, theirs in found.items():
        apart = ((ours - theirs).norm() / ours.norm()).item()
        best, their_best = int(ours.argmax()), int(theirs.argmax())
        most = MAX_QUANTIZED_DIFFERENCE.get(name, MAX_LOGITS_DIFFERENCE[dtype])
        print(
            f"logits of {name}: {apart:.1e} apart from ours, best token {their_best} (ours {best})"
        )
        near = (ours[best] - ours[their_best]).item() <= most * ours[best].abs().item()
        if not (apart <= most and near):
            raise SystemExit(f"the logits of {name} differ too much from those of Baton's kernels")


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
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):  # ones, so swapped norms would go unnoticed
                weight.mul_(1 + 0.2 * torch.randn(weight.shape))
    model.save_pretrained(path)


def show(line: EngineComparison) -> None:
    ours = line.ours
    parts = [
        f"{ours.case!s:22} {ours.tokens_per_second:9,.1f} tokens/s "
        f"({ours.case.num_tokens / ours.elapsed.cpu:9,.1f} a CPU second)"
    ]
    parts += [f"÷ {n} {wall:5.2f} ({cpu:5.2f})" for n, (wall, cpu) in line.ratios().items()]
    parts.append(
        f"{ours.roofline_share:4.0%} ({ours.cpu_roofline_share:4.0%}) of what {ours.bound} allow"
    )
    parts += [
        f"{name} {each.roofline_share:4.0%} ({each.cpu_roofline_share:4.0%}) of its own"
        for name, each in line.figures.items()
        if name in MAX_QUANTIZED_DIFFERENCE
    ]
    parts += [f"{name}: {choice}" for name, choice in line.ways.items()]
    if line.left_out:
        parts.append(f"no memory for {', '.join(line.left_out)}")
    print("  ".join(parts), flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="50m")
    parser.add_argument(
        "--layers", type=int, default=0, help="layers of the model; fewer take less time, 0: all"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--decode-contexts", type=int, nargs="+", help="for decode only; default: --contexts"
    )
    parser.add_argument("--llama", type=Path, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--vllm", type=Path, help="an interpreter that has vLLM for CPUs")
    parser.add_argument(
        "--vllm-eager", action="store_true", help="don't let vLLM compile the model"
    )
    parser.add_argument("--without", nargs="+", choices=["torch", "transformers"], default=[])
    parser.add_argument("--quantized", nargs="+", choices=MAX_QUANTIZED_DIFFERENCE, default=[])
    parser.add_argument(
        "--instructions",
        choices=[*INSTRUCTION_SETS, EMULATED_AMX],
        default=next(iter(INSTRUCTION_SETS)),
    )
    parser.add_argument("--most-gib", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    peers = {name: str(getattr(options, name) or "") for name in ("llama", "vllm")}
    header = {**describe(), **vars(options), **peers}
    print(header, "by the wall clock, and in CPU seconds in brackets", sep="\n", flush=True)
    lines = []
    with tempfile.TemporaryDirectory() as folder, limit_instruction_set(options.instructions):
        write_model(Path(folder), options)
        for line in run(Path(folder), options):
            lines.append(line)
            show(line)
    ceilings = lines[-1].ours.ceilings
    print(f"ceilings: {asdict(ceilings)}")
    print(json.dumps({**header, "lines": [line.as_dict() for line in lines]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
