"""Build all kernels for CUDA, compare their results with the CPU's, and time them.

    python -m tools.gpu_check [--rounds 10] [--only PART …] [--quick] [--list] [--json FILE]

Needs a GPU, and the packages torch, triton, transformers and safetensors with their dependencies.
Prints a table, and JSON as the last line. A part that raises an error gets a row with the error,
and the other parts still run. Exits with 1 if a result is wrong or a part failed, and with 2 if
there is no GPU.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import Attention, pack_batch
from baton.engine.attention.reference import ReferenceAttention
from baton.engine.kv_pool import KvPool
from baton.engine.kv_scale import KvScale
from baton.engine.plan import Plan, Row
from baton.engine.runner import ModelRunner, make_attention
from baton.engine.runner_options import RunnerOptions
from baton.engine.sampler import sample
from tests.unit import cuda_cases
from tests.unit.attention_cases import (
    CASES,
    TOLERANCE,
    make_rows,
    poison,
    random_pool,
    same_bytes,
)
from tools import gpu_fp8, gpu_speed
from tools.gpu_determinism import determinism
from tools.gpu_ipc import kv_transfer
from tools.gpu_speed import GREEDY, DevicePool
from tools.gpu_timing import GpuTableRow, device, rows_or_error

DEMO = Path(__file__).parents[1] / "baton" / "models" / "demo"
PROMPT = "def read(path):\n"
Parts = dict[str, Callable[[], Iterable[GpuTableRow]]]


def attention_is_right() -> Iterator[GpuTableRow]:
    """Run every attention case of the unit tests, and compare the output and every byte of the pool
    with the reference on the CPU. Blocks that no row may read contain NaN."""
    for seed, case in enumerate(CASES):
        chance = torch.Generator().manual_seed(seed)
        pool, rows = random_pool(case, chance), make_rows(case, seed)
        poison(pool, rows)
        shapes = [(case.heads, case.dim), *[(case.kv_heads, case.dim)] * 2]
        total = sum(row.num_tokens for row in rows)
        qkv = [torch.randn(total, *s, generator=chance).to(case.dtype) for s in shapes]
        here = torch.device("cpu")
        wanted, wanted_pool = answer(ReferenceAttention, here, pool, rows, qkv, case.scales)
        got, got_pool = answer(make_attention, device(), pool, rows, qkv, case.scales)
        worst = float((got - wanted).abs().max())
        written = "" if same_bytes(got_pool, wanted_pool) else ", KV written wrongly"
        ok = worst <= TOLERANCE[case.dtype] and not written  # false for NaN
        result = f"within {worst:.1e} of the reference{written}"
        yield GpuTableRow(f"KV write and attention: {case.name}", result, ok=ok)


def answer(
    backend: Callable[[KvPool], Attention],
    place: torch.device,
    pool: torch.Tensor,
    rows: Sequence[Row],
    qkv: Sequence[torch.Tensor],
    scales: Sequence[KvScale],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one layer's attention on the device ``place``; return its output and the pool afterwards,
    both as CPU tensors."""
    held = DevicePool(pool.clone().to(place), scales)
    attention = backend(held)  # type: ignore[arg-type]
    attention.prepare(pack_batch(rows, held.block_tokens, torch.device("cpu")))
    attended = attention.attend(1, *(part.to(place) for part in qkv))
    return attended.cpu().float(), held.tensor.cpu()


def layers_are_right() -> Iterator[GpuTableRow]:
    """Run the unit tests' cases of all layers other than attention, with real CUDA graphs, and also
    in BF16."""
    from baton.engine.cuda.graphs import CudaCapture

    with torch.inference_mode():
        checks = cuda_cases.all_checks(cuda_cases.GPU, CudaCapture(device()))
        for name, check in checks.items():
            lines = (GpuTableRow(f"{name}: {what}", result) for what, result in map(_cut, check))
            yield from rows_or_error(name, lines)


def _cut(text: str) -> tuple[str, str]:
    what, _, result = text.partition(": ")
    return what, result


def sampling_is_right() -> Iterator[GpuTableRow]:
    """Compare the GPU's samples with the CPU's, from the same logits over a large vocabulary."""
    from baton.engine.cuda.sampler import sample_batch

    plain = SamplingParams(1)
    every = {
        "greedy": replace(plain, temperature=0.0),
        "temperature": replace(plain, temperature=0.7),
        "top-k": replace(plain, top_k=40),
        "top-p": replace(plain, top_p=0.9, temperature=1.5),
        "min-p": replace(plain, min_p=0.05),
        "all of them": replace(plain, top_k=100, top_p=0.8, min_p=0.01, temperature=1.2),
        "penalties": replace(plain, repetition_penalty=1.3, presence_penalty=0.4),
    }
    logits = torch.randn(24, 151_936, generator=torch.Generator().manual_seed(1)) * 3
    history = tuple(TokenId(n * n % 1000) for n in range(300))
    for name, params in every.items():
        history_fields = (
            {"history": history, "num_prompt_tokens": 200} if params.needs_history else {}
        )
        rows = [
            Row(RequestId(""), (TokenId(0),), 299, (BlockId(0),), True,
                replace(params, seed=n), **history_fields)  # type: ignore[arg-type]
            for n in range(len(logits))
        ]  # fmt: skip
        got, wanted = sample_batch(logits.to(device()), rows), sample(logits, rows)
        equal = sum(ours == theirs for ours, theirs in zip(got, wanted, strict=True))
        result = f"{equal} of {len(rows)} tokens equal the CPU's"
        yield GpuTableRow(f"sampling: {name}", result, ok=equal == len(rows))


def demo_tokens_are_equal() -> Iterator[GpuTableRow]:
    """Compare the GPU's greedy tokens, with and without CUDA graphs, with transformers' on the CPU,
    in FP32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    reference = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    ids = tokenizer(PROMPT)["input_ids"]
    wanted = reference.generate(
        torch.tensor([ids]), max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=None
    )[0, len(ids) :].tolist()
    for mode in ("graphs", "no graphs"):
        runner = demo_runner("cuda", cuda_graphs=mode == "graphs")
        assert (runner._graphs is not None) == (mode == "graphs")
        got = generated(runner, ids)
        equal = sum(ours == theirs for ours, theirs in zip(got, wanted, strict=True))
        result = f"{equal} of {len(wanted)} tokens equal transformers'"
        yield GpuTableRow(f"demo model in FP32, greedy, {mode}", result, ok=got == wanted)


def tokens_in_fp8_are_equal() -> Iterator[GpuTableRow]:
    """Run the demo model with FP8 weights, and then with FP8 KV, on the GPU and on the CPU, and
    compare the tokens. Both compute in FP32; on the CPU, torch decodes the FP8 values first. Only
    the first quarter of the tokens must be equal: a key halfway between two FP8 values may be
    rounded to either, which may change a token."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(DEMO)(PROMPT)["input_ids"]
    for kind, given in (("weights", {"quantization": "fp8"}), ("KV", {"kv_dtype": "fp8"})):
        ours, theirs = (generated(demo_runner(at, **given), ids) for at in ("cuda", "cpu"))
        pairs = zip(ours, theirs, strict=True)
        equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        result = f"the first {equal} of {len(ours)} tokens equal the CPU's"
        yield GpuTableRow(f"demo model, FP8 {kind}, greedy", result, ok=equal >= len(ours) // 4)


def demo_runner(place: str, **given: Any) -> ModelRunner:
    return ModelRunner.load(
        DEMO, RunnerOptions(device=place, dtype="float32", num_blocks=64, **given)
    )


def generated(runner: ModelRunner, ids: Sequence[int]) -> list[int]:
    blocks = tuple(BlockId(n) for n in range(runner.num_blocks))
    tokens, start = tuple(TokenId(token) for token in ids), 0
    got: list[int] = []
    while len(got) < GREEDY.max_tokens:
        row = Row(RequestId("demo"), tokens, start, blocks, True, GREEDY)
        sampled = runner.run(Plan(0, (row,))).sampled[0]
        assert sampled is not None
        start += len(tokens)
        tokens = (sampled.token_id,)
        got.append(int(sampled.token_id))
    return got


QUICK = (
    "attention", "layers", "sampling", "demo model", "demo model in FP8", "determinism",
)  # fmt: skip
"""The parts that check correctness, without those that measure speed."""


def parts_of(rounds: int) -> Parts:
    """Return the parts in the order in which they run: correctness first, and the longest
    measurements last."""
    return {
        "attention": attention_is_right,
        "layers": layers_are_right,
        "sampling": sampling_is_right,
        "demo model": demo_tokens_are_equal,
        "demo model in FP8": tokens_in_fp8_are_equal,
        "determinism": determinism,
        "kv transfer": kv_transfer,
        "ceilings": gpu_speed.ceilings,
        "speed of layer kernels": lambda: gpu_speed.layer_kernels(rounds),
        "speed of fixed products": lambda: gpu_speed.products(rounds),
        "speed of prefill attention": lambda: gpu_speed.prefill_attention(rounds),
        "speed of decode attention": lambda: gpu_speed.decode_attention(rounds),
        "speed of sampling": lambda: gpu_speed.sampling(rounds),
        "speed of Qwen3-8B": lambda: gpu_speed.models(rounds),
        "speed of FP8 weights": lambda: gpu_fp8.weights(rounds),
        "speed of FP8 KV": lambda: gpu_fp8.kv(rounds),
    }


def run(parts: Parts, show: Callable[[str], None] = print) -> list[GpuTableRow]:
    """Run the parts of the check. Show each row of the results, and the time that each part took.
    Return all rows."""
    lines = []
    for name, part in parts.items():
        begun = time.perf_counter()
        for line in rows_or_error(name, _call_lazily(part)):
            show(str(line))
            lines.append(line)
        show(f"-- {name}: {time.perf_counter() - begun:.1f} s")
    return lines


def _call_lazily(part: Callable[[], Iterable[GpuTableRow]]) -> Iterator[GpuTableRow]:
    """Call ``part`` only when rows are requested, so that its errors are raised within
    ``rows_or_error``."""
    yield from part()


def chosen(parts: Parts, only: Sequence[str], *, quick: bool) -> Parts:
    """Return the parts to run. If ``only`` has an unknown part, raise SystemExit with the names of
    all parts."""
    if unknown := [name for name in only if name not in parts]:
        known = ", ".join(parts)
        raise SystemExit(f"gpu_check: unknown part {unknown[0]!r}; known parts: {known}")
    wanted = only or (QUICK if quick else parts)
    return {name: part for name, part in parts.items() if name in wanted}


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    parts = chosen(parts_of(options.rounds), options.only, quick=options.quick)
    if options.list:
        print("\n".join(parts))
        return 0
    if not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU here", file=sys.stderr)
        return 2
    about = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "rounds": options.rounds,
        "seed": cuda_cases.SEED,
    }
    print(about)
    lines = run(parts)
    ok = all(line.ok for line in lines)
    report = json.dumps({**about, "ok": ok, "lines": [asdict(line) for line in lines]})
    if options.json is not None:
        options.json.write_text(report + "\n")
    print(report)
    return 0 if ok else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="parts to run")
    parser.add_argument("--quick", action="store_true", help="check correctness only, not speed")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON to FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
