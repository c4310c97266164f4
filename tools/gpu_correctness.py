"""Compares what a GPU computes with the CPU's results; run by ``gpu_check``."""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from baton.checkpoint import DEMO_MODEL
from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.decoder_traits import DecoderTraits
from baton.engine.attention.base import Attention, pack_batch
from baton.engine.attention.reference import ReferenceAttention
from baton.engine.kv_pool import KvPool
from baton.engine.plan import Plan, Row
from baton.engine.runner import ModelRunner, make_attention
from baton.engine.runner_options import RunnerOptions
from baton.engine.sampler import sample
from tests.unit import cuda_cases
from tests.unit.attention_cases import (
    CASES,
    TOLERANCE,
    Case,
    make_rows,
    poison,
    random_pool,
    same_bytes,
)
from tools.gpu_speed import GREEDY, DevicePool
from tools.gpu_timing import GpuTableRow, device, rows_or_error

PROMPT = "def read(path):\n"
CHUNK_TOKENS = 37
"""Tokens of a prefill chunk in the check of architectures; not a multiple of a block's tokens."""


def attention_is_right() -> Iterator[GpuTableRow]:
    """Run every attention case of the unit tests, and compare the output and every byte of the pool
    with the reference on the CPU. Blocks that no row may read contain NaN."""
    for seed, case in enumerate(CASES):
        chance = torch.Generator().manual_seed(seed)
        pool, rows = random_pool(case, chance), make_rows(case, seed)
        poison(case, pool, rows)
        shapes = [(case.heads, case.dim), *[(case.kv_heads, case.dim)] * 2]
        total = sum(row.num_tokens for row in rows)
        qkv = [torch.randn(total, *s, generator=chance).to(case.dtype) for s in shapes]
        here, sinks = torch.device("cpu"), case.make_sinks(chance)
        wanted, wanted_pool = answer(ReferenceAttention, here, pool, rows, qkv, case, sinks)
        got, got_pool = answer(make_attention, device(), pool, rows, qkv, case, sinks)
        worst = float((got - wanted).abs().max())
        written = "" if same_bytes(got_pool, wanted_pool) else ", KV written wrongly"
        ok = worst <= TOLERANCE[case.dtype] and not written  # false for NaN
        result = f"within {worst:.1e} of the reference{written}"
        yield GpuTableRow(f"KV write and attention: {case.name}", result, ok=ok)


def answer(
    backend: Callable[[KvPool, DecoderTraits], Attention],
    place: torch.device,
    pool: torch.Tensor,
    rows: Sequence[Row],
    qkv: Sequence[torch.Tensor],
    case: Case,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one layer's attention on the device ``place``; return its output and the pool afterwards,
    both as CPU tensors."""
    held = DevicePool(pool.clone().to(place), case.scales, case.groups)
    attention = backend(held, case.traits)  # type: ignore[arg-type]
    num_groups = case.groups.num_groups
    host = torch.device("cpu")
    attention.prepare(pack_batch(rows, held.block_tokens, host, num_groups=num_groups))
    q, k, v = (part.to(place) for part in qkv)
    attended = attention.attend(1, q, k, v, None if sinks is None else sinks.to(place))
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
        "top-p of a flat distribution": replace(plain, top_p=0.9, temperature=100.0),
        "top-k and top-p of a flat distribution": replace(
            plain, top_k=100_000, top_p=0.9, temperature=100.0
        ),
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

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    reference = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
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

    ids = AutoTokenizer.from_pretrained(DEMO_MODEL)(PROMPT)["input_ids"]
    for kind, given in (("weights", {"quantization": "fp8"}), ("KV", {"kv_dtype": "fp8"})):
        ours, theirs = (generated(demo_runner(at, **given), ids) for at in ("cuda", "cpu"))
        pairs = zip(ours, theirs, strict=True)
        equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        result = f"the first {equal} of {len(ours)} tokens equal the CPU's"
        yield GpuTableRow(f"demo model, FP8 {kind}, greedy", result, ok=equal >= len(ours) // 4)


def architectures_are_right(place: str = "cuda") -> Iterator[GpuTableRow]:
    """Compare the GPU's greedy tokens with transformers' on the CPU, in FP32, for a small model of
    every supported architecture with random weights. The prompt is computed in chunks."""
    from transformers import AutoModelForCausalLM

    from tests.model_zoo import ZOO, make_model

    with tempfile.TemporaryDirectory() as folder:
        for name in ZOO:
            path = make_model(Path(folder) / name, name)
            reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            ids = [5 + 7 * n % 300 for n in range(3 * CHUNK_TOKENS + 5)]
            wanted = reference.generate(
                torch.tensor([ids]),
                max_new_tokens=GREEDY.max_tokens,
                do_sample=False,
                eos_token_id=None,
            )[0, len(ids) :].tolist()
            options = RunnerOptions(device=place, dtype="float32", num_blocks=64)
            got = generated(ModelRunner.load(path, options), ids, CHUNK_TOKENS)
            equal = sum(ours == theirs for ours, theirs in zip(got, wanted, strict=True))
            result = f"{equal} of {len(wanted)} tokens equal transformers'"
            yield GpuTableRow(f"{name} in FP32, greedy", result, ok=got == wanted)


def demo_runner(place: str, **given: Any) -> ModelRunner:
    return ModelRunner.load(
        DEMO_MODEL, RunnerOptions(device=place, dtype="float32", num_blocks=64, **given)
    )


def generated(
    runner: ModelRunner,
    ids: Sequence[int],
    chunk_tokens: int = 1024,
    num_tokens: int = GREEDY.max_tokens,
) -> list[int]:
    """Return the greedy tokens that follow the prompt ``ids``, which is computed in chunks."""
    blocks = tuple(BlockId(n) for n in range(runner.num_blocks))
    tokens, start = tuple(TokenId(token) for token in ids), 0
    while len(tokens) > chunk_tokens:
        row = Row(RequestId("demo"), tokens[:chunk_tokens], start, blocks, False, GREEDY)
        runner.run(Plan(0, (row,)))
        tokens, start = tokens[chunk_tokens:], start + chunk_tokens
    got: list[int] = []
    while len(got) < num_tokens:
        row = Row(RequestId("demo"), tokens, start, blocks, True, GREEDY)
        sampled = runner.run(Plan(0, (row,))).sampled[0]
        assert sampled is not None
        start += len(tokens)
        tokens = (sampled.token_id,)
        got.append(int(sampled.token_id))
    return got
