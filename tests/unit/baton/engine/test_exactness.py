"""Tests that the engine gives the same tokens as transformers, for a sample of the combinations of
models and options that ``python -m tests.exactness`` tests. The tool also tests clusters.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.checkpoints.checkpoint import load_model_config
from testkit.model_zoo import ZOO, make_model
from tests.exactness import EngineAlone, Score, reference_of

SEED = 20261121
TOKENS = 24
LENGTHS = [1, 2, 15, 16, 17, 33, 64, 65, 130, 257, 700]
"""Prompt lengths around block boundaries, and longer than several chunks."""


@dataclass(frozen=True)
class Sample:
    architecture: str
    chunk: int
    block: int
    batch: int
    cpu_kernels: str = "auto"


SAMPLES = [
    Sample(name, chunk, block, batch)
    for name, chunk, block, batch in zip(
        ZOO,
        [16, 128, 512, 16, 128, 512, 16, 128, 512, 16, 128, 512],
        [16, 64, 16, 64, 16, 64, 16, 16, 64, 16, 64, 16],
        [16, 1, 16, 1, 16, 1, 1, 16, 1, 16, 1, 16],
        strict=True,
    )
]
ON_TORCH = [
    Sample("llama3-rope", 128, 16, 16, "off"),
    Sample("qwen3", 16, 64, 1, "off"),
    Sample("llama-biased", 128, 16, 16, "off"),
    Sample("mistral-window", 16, 64, 16, "off"),
    Sample("gemma3", 128, 16, 16, "off"),
    Sample("gpt-oss", 128, 16, 16, "off"),
]
"""Samples for machines on which our kernels are not available."""


@pytest.mark.parametrize(
    "sample",
    SAMPLES + ON_TORCH,
    ids=lambda s: f"{s.architecture}-{s.chunk}-{s.block}-{s.cpu_kernels}",
)
def test_engine_generates_the_tokens_of_transformers(sample: Sample, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    make_model(tmp_path, sample.architecture, seed=SEED)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    chance = np.random.default_rng(SEED)
    references = [
        reference_of(model, chance.integers(model.config.vocab_size, size=length).tolist(), TOKENS)
        for length in LENGTHS
    ]
    alone = EngineAlone(
        tmp_path, sample.chunk, sample.block, max(LENGTHS), cpu_kernels=sample.cpu_kernels
    )
    for warm in (False, True):
        score = alone.score(references, sample.batch, warm)
        assert score == Score(TOKENS * len(LENGTHS), ties=0, differences=0)
    alone.engine.check_integrity()


def test_samples_cover_every_value_of_the_matrix() -> None:
    assert {sample.chunk for sample in SAMPLES} == {16, 128, 512}
    assert {sample.block for sample in SAMPLES} == {16, 64}
    assert {sample.batch for sample in SAMPLES} == {1, 16}
    assert [sample.architecture for sample in SAMPLES] == list(ZOO)


def test_model_zoo_has_odd_shapes(tmp_path: Path) -> None:
    configs = []
    for name in ZOO:
        make_model(tmp_path / name, name)
        configs.append(load_model_config(tmp_path / name))
    assert any(c.head_dim != c.hidden_size // c.num_heads for c in configs)
    assert any(c.num_kv_heads == 1 for c in configs)
    assert any(c.vocab_size % 64 for c in configs)
    assert {c.tie_word_embeddings for c in configs} == {True, False}
    assert any(len(c.eos_token_ids) > 1 for c in configs)
