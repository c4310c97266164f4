"""Asks a cluster for sampled answers with seeds, and generates them with the engine alone."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from baton.config import load_settings
from baton.core.request import SamplingParams
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from command_line.generate import generate
from testkit.local_cluster import LocalCluster

SAMPLING = SamplingParams(
    max_tokens=64, temperature=0.9, top_p=0.95, top_k=50, repetition_penalty=1.1, ignore_eos=True
)
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
