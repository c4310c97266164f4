"""Check that transformers, the engine alone, and a cluster over every transport give equal tokens.

    python -m tests.exactness [--architectures A,B] [--transports shm,nixl,grpc] [--dtype …]

Decodes greedily with randomly initialised models of every supported architecture, prompts of mixed
length, chunk sizes 16, 128 and 512, block sizes 16 and 64, batch sizes 1 and 16, and a cold and a
warm prefix cache. A token that differs from the reference's counts as a tie if the reference's two
best logits are closer than 1e-4, and as a difference otherwise. After either, the comparison
continues from the reference's token. Prints a table, and JSON as the last line.

In FP32, it exits with 1 if there is a difference, or if more than 1 in 10,000 tokens are ties. In a
16-bit format, rounding is so coarse that adding in another order often changes a token. So there,
the differences are only counted, and the table also has those between transformers' eager and
default attention.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from baton.clock import SystemClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import SYSTEM_CLOCK, describe
from testkit.model_zoo import ZOO, make_model

TIE = 1e-4
MAX_TIES_PER_TOKEN = 1e-4
Tokens = list[int]
Generate = Callable[[Tokens, int], Tokens]


@dataclass(frozen=True)
class Reference:
    """Transformers' greedy tokens for one prompt, and the margin between its two best logits."""

    prompt: Tokens
    tokens: Tokens
    margins: list[float]


@dataclass
class Score:
    tokens: int = 0
    ties: int = 0
    differences: int = 0

    def __iadd__(self, other: "Score") -> "Score":
        self.tokens += other.tokens
        self.ties += other.ties
        self.differences += other.differences
        return self


@dataclass(frozen=True)
class ExactnessCell:
    """One tested combination of a model and settings. The table has a row for each."""

    architecture: str
    path: str
    chunk: int
    block: int
    batch: int
    cache: str


def prompt_lengths(count: int, longest: int) -> list[int]:
    """Return lengths from 1 to ``longest``, including those around block boundaries."""
    edges = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513]
    spread = [round(3 * (longest / 3) ** (n / 20)) for n in range(21)]
    lengths = list(itertools.islice(itertools.cycle(edges + spread), count))
    return [min(length, longest) for length in lengths]


@torch.inference_mode()
def reference_of(
    model: AutoModelForCausalLM, prompt: Tokens, num_tokens: int, chunk: int | None = None
) -> Reference:
    """Decode greedily with transformers' forward pass and cache, but without ``generate()``. The
    prompt is computed in chunks of ``chunk`` tokens if that is given, to save memory."""
    cache = None
    *chunks, ids = torch.split(torch.tensor([prompt]), chunk or len(prompt), dim=1)
    for part in chunks:
        output = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
    tokens, margins = [], []
    for _ in range(num_tokens):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        best = output.logits[0, -1].float().topk(2)
        tokens.append(int(output.logits[0, -1].argmax()))
        margins.append(float(best.values[0] - best.values[1]))
        ids = torch.tensor([tokens[-1:]])
    return Reference(prompt, tokens, margins)


def compare(reference: Reference, generate: Generate, tie: float = TIE) -> Score:
    """Generate an answer and compare it with the reference. After each difference, continue the
    generation from the reference's token."""
    score, start = Score(), 0
    while start < len(reference.tokens):
        prompt = reference.prompt + reference.tokens[:start]
        answer = generate(prompt, len(reference.tokens) - start)
        wanted = reference.tokens[start:]
        if answer == wanted:
            score.tokens += len(wanted)
            break
        pairs = itertools.zip_longest(answer, wanted)
        position = next(n for n, (ours, theirs) in enumerate(pairs) if ours != theirs)
        score.tokens += position + 1
        if start + position < len(reference.margins) and reference.margins[start + position] < tie:
            score.ties += 1
        else:
            score.differences += 1
        start += position + 1
    return score


def compare_all(references: Sequence[Reference], generate: Generate, batch: int) -> Score:
    """Compare the answers to all prompts with their references, up to ``batch`` at the same time,
    each in a thread. Return the total score."""
    total = Score()
    with ThreadPoolExecutor(batch) as pool:
        for score in pool.map(lambda reference: compare(reference, generate), references):
            total += score
    return total


class EngineAlone:
    """Runs the engine that ``baton generate`` uses, but with many prompts in a batch."""

    def __init__(
        self,
        model: Path,
        chunk: int,
        block: int,
        longest: int,
        dtype: str = "float32",
        cpu_kernels: str = "auto",
    ) -> None:
        num_blocks = 20 * longest // block + 64
        self._runner = ModelRunner.load(
            model,
            RunnerOptions(
                device="cpu",
                dtype=dtype,
                num_blocks=num_blocks,
                block_tokens=block,
                cpu_kernels=cpu_kernels,
            ),
        )
        self._config = EngineConfig(
            block_tokens=block,
            max_model_tokens=longest + 128,
            max_batched_tokens=max(chunk, 64),
            chunk_tokens=chunk,
            window_tokens=self._runner.limits.kv_window_tokens,
            num_full_groups=self._runner.limits.num_full_groups,
            num_windowed_groups=self._runner.limits.num_windowed_groups,
        )
        self.engine = self._new_engine()

    def _new_engine(self) -> Engine:
        return Engine(
            self._runner,
            self._config,
            model_digest=self._runner.model_digest,
            kv_dtype=self._runner.kv_dtype,
            eos_token_ids=frozenset(),
            clock=SystemClock(),
        )

    def score(self, references: Sequence[Reference], batch: int, warm: bool) -> Score:
        """Compare the answers to all prompts with their references. Unless ``warm`` is true, the
        prefix cache is empty at first."""
        if not warm:
            self.engine = self._new_engine()
        total = Score()
        for start in range(0, len(references), batch):
            group = references[start : start + batch]
            answers = self._generate([(r.prompt, len(r.tokens)) for r in group])
            for reference, answer in zip(group, answers, strict=True):
                total += compare(reference, self._replay(reference.prompt, answer))
        return total

    def _replay(self, replayed: Tokens, answer: Tokens) -> Generate:
        """Return a function that returns the known ``answer`` for the prompt ``replayed``, and
        generates an answer for any other prompt."""
        return lambda prompt, count: (
            answer if prompt == replayed else self._generate([(prompt, count)])[0]
        )

    def _generate(self, prompts: Sequence[tuple[Tokens, int]]) -> list[Tokens]:
        answers: dict[RequestId, Tokens] = {}
        for number, (prompt, count) in enumerate(prompts):
            request_id = RequestId(str(number))
            answers[request_id] = []
            self.engine.add(greedy_spec(request_id, prompt, count), Task.PREFILL_AND_DECODE)
        while self.engine.has_work():
            for output in self.engine.step().outputs:
                answers[output.request_id].extend(output.token_ids)
        return list(answers.values())


def greedy_spec(request_id: RequestId, prompt: Tokens, count: int) -> RequestSpec:
    return RequestSpec(
        request_id=request_id,
        epoch=Epoch(1),
        token_ids=tuple(TokenId(token) for token in prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True),
    )


def over_http(cluster: LocalCluster, api_key: str) -> Generate:
    asking = replace(cluster, api_key=api_key)
    return lambda prompt, count: asking.complete(prompt, count, temperature=0, ignore_eos=True)


def run_alone(
    name: str, model: Path, references: list[Reference], options: argparse.Namespace
) -> Iterator[tuple[ExactnessCell, Score]]:
    longest = max(len(reference.prompt) for reference in references)
    for chunk, block in itertools.product(options.chunks, options.blocks):
        alone = EngineAlone(model, chunk, block, longest, options.dtype, options.cpu_kernels)
        for batch, cache in itertools.product(options.batches, ("cold", "warm")):
            score = alone.score(references, batch, cache == "warm")
            yield ExactnessCell(name, "generate", chunk, block, batch, cache), score


def run_peer(
    name: str, model: Path, references: list[Reference], options: argparse.Namespace
) -> tuple[ExactnessCell, Score]:
    """Compare transformers' eager attention with its default attention, to show the effect of
    rounding."""
    dtype = getattr(torch, options.dtype)
    eager = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager")

    def generate(prompt: Tokens, count: int) -> Tokens:
        return reference_of(eager.eval(), prompt, count).tokens

    return ExactnessCell(name, "its own eager", 0, 0, 1, "cold"), compare_all(
        references, generate, 1
    )


def run_cluster(
    name: str, model: Path, references: list[Reference], options: argparse.Namespace
) -> Iterator[tuple[ExactnessCell, Score]]:
    """Compare clusters with the references. Each batch size has its own tenant. Since tenants share
    no cached prefixes, the first pass of each batch size is cold."""
    for transport, chunk, block in itertools.product(
        options.transports, options.chunks, options.blocks
    ):
        settings = {
            "transports": transport, "block_tokens": block, "chunk_tokens": chunk,
            "max_batched_tokens": max(chunk, 64), "dtype": options.dtype, "pool_bytes": "256MiB",
            "cpu_kernels": options.cpu_kernels,
            "api_keys": ",".join(f"key-{batch}=tenant-{batch}" for batch in options.batches),
        }  # fmt: skip
        with local_cluster(model, settings=settings) as cluster:
            for batch, cache in itertools.product(options.batches, ("cold", "warm")):
                score = compare_all(references, over_http(cluster, f"key-{batch}"), batch)
                yield ExactnessCell(name, f"cluster/{transport}", chunk, block, batch, cache), score


def run(options: argparse.Namespace) -> Iterator[tuple[ExactnessCell, Score]]:
    for name in options.architectures:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), name, seed=options.seed)
            dtype = getattr(torch, options.dtype)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
            chance = np.random.default_rng(options.seed)
            vocabulary = model.config.vocab_size
            references = [
                reference_of(
                    model, chance.integers(vocabulary, size=length).tolist(), options.tokens
                )
                for length in prompt_lengths(options.prompts, options.longest)
            ]
            del model
            if options.dtype != "float32":
                yield run_peer(name, Path(folder), references, options)
            yield from run_alone(name, Path(folder), references, options)
            yield from run_cluster(name, Path(folder), references, options)


def parse(arguments: list[str]) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",") if text else []

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--architectures", type=names, default=list(ZOO))
    parser.add_argument("--transports", type=names, default=["shm", "nixl", "grpc"])
    parser.add_argument("--chunks", type=numbers, default=[16, 128, 512])
    parser.add_argument("--blocks", type=numbers, default=[16, 64])
    parser.add_argument("--batches", type=numbers, default=[1, 16])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--longest", type=int, default=3000)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--cpu-kernels", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    torch.set_num_threads(2)
    print(describe())
    total, cells, began = Score(), [], SYSTEM_CLOCK()
    print("architecture      path            chunk block batch cache   tokens  ties  different")
    for cell, score in run(options):
        total += score
        cells.append({**vars(cell), **vars(score)})
        print(
            f"{cell.architecture:17} {cell.path:15} {cell.chunk:5} {cell.block:5} {cell.batch:5} "
            f"{cell.cache:5} {score.tokens:8} {score.ties:5} {score.differences:10}",
            flush=True,
        )
    exact = total.differences == 0 and total.ties <= MAX_TIES_PER_TOKEN * total.tokens
    ok = exact or options.dtype != "float32"
    equal = 1 - (total.differences + total.ties) / max(total.tokens, 1)
    seconds = round(SYSTEM_CLOCK() - began)
    print(
        f"{len(cells)} cells, {total.tokens} tokens, {total.ties} ties, {total.differences} "
        f"differences, {equal:.4%} equal, {options.dtype}, "
        f"cpu_kernels={options.cpu_kernels}, {seconds} s, seed {options.seed}"
    )
    result = {"ok": ok, "equal": equal, "dtype": options.dtype, "seconds": seconds}
    result["cpu_kernels"] = options.cpu_kernels
    print(json.dumps({**result, "seed": options.seed, **vars(total), "cells": cells}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
