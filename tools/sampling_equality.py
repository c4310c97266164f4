"""Check that seeded sampling gives the same answers alone, in a batch, and with any cluster size.

    python -m tools.sampling_equality [--requests 16] [--tokens 64]

Serves the demo model in FP32. Prints a table of how many answers equal those of the engine alone,
and JSON as the last line; exits with 1 if an answer differs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from baton.config import DEMO_MODEL, load_settings
from baton.core.request import SamplingParams
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from benchmarks.machine import describe
from command_line.generate import generate
from tools.local_cluster import LocalCluster, local_cluster

SAMPLING = SamplingParams(
    max_tokens=64, temperature=0.9, top_p=0.95, top_k=50, repetition_penalty=1.1, ignore_eos=True
)
SIZES = ((1, 1), (2, 2))
LONGEST = 1500

Prompts = Sequence[list[int]]
Answers = list[list[int]]


def make_requests(count: int, tokens: int, seed: int) -> tuple[Prompts, list[SamplingParams]]:
    """Make prompts of 1 to LONGEST tokens, each with its own seed."""
    chance = np.random.default_rng(seed)
    lengths = chance.integers(1, LONGEST, size=count)
    prompts = [chance.integers(3, 4000, size=length).tolist() for length in lengths]
    seeds = range(1000 * seed, 1000 * seed + count)
    return prompts, [replace(SAMPLING, seed=own, max_tokens=tokens) for own in seeds]


def generate_alone(prompts: Prompts, samplings: Sequence[SamplingParams]) -> Answers:
    """Generate each answer in its own engine."""
    settings = load_settings(device="cpu", dtype="float32")
    runner = load(settings.model)
    return [
        generate(runner, settings, [prompt], sampling)[0].token_ids
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]


def load(model: str) -> ModelRunner:
    return ModelRunner.load(
        Path(model), RunnerOptions(device="cpu", dtype="float32", pool_bytes=256 << 20)
    )


def ask(
    cluster: LocalCluster, prompts: Prompts, samplings: Sequence[SamplingParams], at_once: int
) -> Answers:
    def one(prompt: list[int], sampling: SamplingParams) -> list[int]:
        return cluster.complete(
            prompt,
            sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            ignore_eos=True,
        )

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, prompts, samplings))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    print(describe())
    prompts, samplings = make_requests(options.requests, options.tokens, options.seed)
    wanted = generate_alone(prompts, samplings)
    equal = {}
    for prefill, decode in SIZES:
        with local_cluster(DEMO_MODEL, prefill, decode, {"dtype": "float32"}) as cluster:
            for at_once in (1, options.requests):
                answers = ask(cluster, prompts, samplings, at_once)
                name = f"{prefill}+{decode}, {at_once} at once"
                equal[name] = sum(a == b for a, b in zip(answers, wanted, strict=True))
                print(f"{name:20} {equal[name]} of {len(wanted)} answers equal", flush=True)
    ok = all(count == len(wanted) for count in equal.values())
    print(json.dumps({"ok": ok, "answers": len(wanted), "equal": equal, "seed": options.seed}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
