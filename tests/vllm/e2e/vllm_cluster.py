"""Starts clusters whose workers run vLLM, and gets the answers of vLLM alone to compare them
with."""

import json
import os
import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from testkit.local_cluster import (
    VLLM_PYTHON,
    VLLM_START_SECONDS,
    LocalCluster,
    engine_settings,
    local_cluster,
)
from tests.vllm.e2e.vllm_alone import ANSWER_TOKENS

ROOT = Path(__file__).parents[3]
BLOCK_TOKENS = 32
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def vllm_settings(**settings: object) -> dict[str, object]:
    return {
        **engine_settings("vllm"),
        "dtype": "float32",
        "pool_bytes": "64MiB",
        "threads": 1,
        **settings,
    }


def vllm_cluster(
    model: Path, prefill: int, decode: int, **settings: object
) -> AbstractContextManager[LocalCluster]:
    return local_cluster(
        model, prefill, decode, vllm_settings(**settings), timeout_seconds=VLLM_START_SECONDS
    )


@dataclass(frozen=True)
class VllmAnswers:
    """Prompts, and the answers of vLLM alone to these prompts."""

    prompts: list[list[int]]
    answers: list[list[int]]

    def check(self, cluster: LocalCluster) -> None:
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            assert cluster.complete(prompt, ANSWER_TOKENS, **GREEDY) == answer, len(prompt)


def prompt(seed: int, num_tokens: int) -> list[int]:
    chance = np.random.default_rng(seed)
    tokens: list[int] = chance.integers(3, 512, size=num_tokens).tolist()
    return tokens


def ask_vllm_alone(
    jobs: dict[Path, list[list[int]]], folder: Path, dtype: str = "float32"
) -> dict[Path, VllmAnswers]:
    """Answer the prompts of each model with vLLM alone. ``folder`` is for temporary files."""
    file = folder / "answers.json"
    done = subprocess.run(
        [VLLM_PYTHON, "-m", "tests.vllm.e2e.vllm_alone", file, dtype],
        input=json.dumps({str(model): prompts for model, prompts in jobs.items()}),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(file.read_text())
    return {model: VllmAnswers(prompts, answers[str(model)]) for model, prompts in jobs.items()}
