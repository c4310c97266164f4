"""Compare Baton with llama.cpp on a small assistant in a GGUF file, as one chats with it.

    python -m benchmarks.assistant --llama PYTHON [--model smollm2] [--threads 2] [--rounds 3]

Baton is a whole cluster with one mixed worker (or, with ``--workers split``, a prefill and a decode
worker), in each format of weights, and is measured from outside, over HTTP. llama.cpp runs in a
process of its own without a server (benchmarks/peers/llama.py), with the file as it is and with the
types to which its own quantizer brings it; of its ways to compute, each work gets the fastest.
PYTHON is the interpreter of an environment with llama-cpp-python and gguf.

In each round all take turns, alone on the machine: the time to the first token behind prompts of
several lengths, none of which is cached, the time between two tokens of one answer, and the tokens
per second of 8 answers at once. Losses are those of rows of 512 tokens of this repository's
documents. Prints a table, and JSON as the last line.
"""

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from baton.checkpoints.hub import resolve_model
from baton.engine.bench.bench_case import BenchCase
from baton.text.tokenizer import Tokenizer
from benchmarks.contenders import PeerEngine
from benchmarks.quantization import ROW_TOKENS, LogprobReader
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import describe
from testkit.streams import CompletionCase, StreamedAnswer, stream_completion

PROMPTS = (50, 512, 1919)
STREAMS = 8
ANSWER_TOKENS = 96
CONTEXT = 100
"""Tokens before which llama.cpp decodes: the middle of our answers."""

FORMATS = ("none", "int8", "int4")
TYPES = ("q4_0", "q8_0", "")
ROOT = Path(__file__).parents[1]

Figures = dict[str, float]


def prompt(random: np.random.Generator, num_tokens: int) -> list[int]:
    tokens: list[int] = random.integers(100, 40_000, size=num_tokens).tolist()
    return tokens


def ask(cluster: LocalCluster, tokens: list[int], num_tokens: int) -> StreamedAnswer:
    body = {
        "prompt": tokens, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    answer = stream_completion(cluster.url, CompletionCase(body))
    if answer.error:
        raise SystemExit(f"a request failed: {answer.error}")
    return answer


def measure_baton(
    options: argparse.Namespace, weights: str, random: np.random.Generator
) -> Figures:
    """Start a cluster and return its figures, in milliseconds and tokens per second."""
    settings = {"quantization": weights, "threads": options.threads, "admission": "off"}
    split = int(options.workers == "split")
    found: Figures = {}
    with local_cluster(options.model, split, split, settings, mixed=1 - split) as cluster:
        for length in (*PROMPTS, *PROMPTS):  # the worker measures itself
            ask(cluster, prompt(random, length), 8)
        for length in PROMPTS:
            answers = [ask(cluster, prompt(random, length), 2) for _ in range(options.repeats)]
            waits = [answer.token_times[0] - answer.started_at for answer in answers]
            found[f"first token behind {length}"] = 1000 * statistics.median(waits)
        gaps = []
        for _ in range(options.repeats):
            times = ask(cluster, prompt(random, 50), ANSWER_TOKENS).token_times
            gaps.append((times[-1] - times[0]) / (len(times) - 1))
        found["between tokens"] = 1000 * statistics.median(gaps)
        found[f"tokens/s of {STREAMS}"] = statistics.median(
            _joint_rate(cluster, random) for _ in range(options.repeats)
        )
    return found


def _joint_rate(cluster: LocalCluster, random: np.random.Generator) -> float:
    """Return the tokens per second of several answers, from the time when all have their first
    token to the end of the first."""
    with ThreadPoolExecutor(STREAMS) as pool:
        prompts = [prompt(random, 50) for _ in range(STREAMS)]
        answers = list(pool.map(lambda tokens: ask(cluster, tokens, 2 * ANSWER_TOKENS), prompts))
    begin = max(answer.token_times[0] for answer in answers)
    end = min(answer.token_times[-1] for answer in answers)
    count = sum(begin < at <= end for answer in answers for at in answer.token_times)
    return count / (end - begin)


def measure_llama(options: argparse.Namespace, kind: str) -> Figures:
    peer = llama(options, kind)
    found: Figures = {}

    def milliseconds(case: BenchCase) -> float:
        peer.prepare(case)
        return 1000 * statistics.median(
            peer.run_steps(1).wall for _ in range(max(options.repeats, 400 // case.context))
        )

    for length in PROMPTS:
        found[f"first token behind {length}"] = milliseconds(BenchCase("prefill", 1, length))
    found["between tokens"] = milliseconds(BenchCase("decode", 1, CONTEXT))
    together = milliseconds(BenchCase("decode", STREAMS, CONTEXT))
    found[f"tokens/s of {STREAMS}"] = 1000 * STREAMS / together
    peer.close()
    return found


def llama(options: argparse.Namespace, kind: str) -> PeerEngine:
    file = (resolve_model(options.model) / "model.gguf").resolve()
    arguments = ["--threads", str(options.threads), *(["--type", kind] if kind else [])]
    return PeerEngine(options.llama, "llama.py", file, *arguments)


def rows(model: Path, count: int) -> list[list[int]]:
    """Return rows of tokens of this repository's documents."""
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in pages)
    tokens = Tokenizer.load(model, uses_fast_encoder=False).encode(text[: 4000 * count])
    return [tokens[start : start + ROW_TOKENS + 1] for start in range(0, len(tokens), ROW_TOKENS)][
        :count
    ]


def losses(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yield the name of each contender and its perplexity."""
    path = resolve_model(options.model)
    texts = rows(path, options.rows)
    torch.set_num_threads(options.threads)
    reading = argparse.Namespace(model=path, dtype="bfloat16")
    for name in FORMATS:
        reader = LogprobReader(reading, name)
        loss = statistics.fmean(
            functional.nll_loss(reader.logprobs(row[:-1]), torch.tensor(row[1:])).item()
            for row in texts
        )
        yield f"Baton {name}", math.exp(loss)
    for kind in TYPES:
        peer = llama(options, kind)
        loss = statistics.fmean(float(peer.ask(loss=row)) for row in texts)
        peer.close()
        yield name_of(kind), math.exp(loss)


def name_of(kind: str) -> str:
    return f"llama.cpp {kind or 'as it is'}"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or the name of one")
    parser.add_argument("--workers", choices=("mixed", "split"), default="mixed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    report: dict[str, Any] = {**describe(), **{k: str(v) for k, v in vars(options).items()}}
    print(report, flush=True)
    random = np.random.default_rng(options.seed)
    contenders: dict[str, Callable[[], Figures]] = {
        **{f"Baton {each}": partial(measure_baton, options, each, random) for each in FORMATS},
        **{name_of(each): partial(measure_llama, options, each) for each in TYPES},
    }
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in contenders}
    for _ in range(options.rounds):
        for name, measure in contenders.items():
            for figure, value in measure().items():
                found[name][figure].append(value)
            shown = ", ".join(f"{figure} {each[-1]:.1f}" for figure, each in found[name].items())
            print(f"{name}: {shown}", flush=True)
    medians = {
        name: {figure: statistics.median(each) for figure, each in figures.items()}
        for name, figures in found.items()
    }
    for name, perplexity in losses(options) if options.rows else ():
        medians[name]["perplexity"] = perplexity
    figures = list(next(iter(medians.values())))
    print("| |", " | ".join(medians), "|")
    for figure in figures:
        print(f"| {figure} |", " | ".join(f"{each[figure]:.1f}" for each in medians.values()), "|")
    print(json.dumps({**report, "medians": medians}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
