"""Tests that a request with an attention window gets the tokens of transformers with the same mask,
although its prompt is several times as long as the KV pool."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.clock import SystemClock
from baton.core.attention_window import AttentionWindow
from baton.core.ids import RequestId
from baton.core.request import RequestSpec
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from testkit.model_zoo import make_model
from tests.exactness import Reference, Score, compare, greedy_spec
from tests.masked_reference import masked_reference_of
from tests.unit.baton.engine.native_helpers import each_instruction_set, needs_kernels

__all__ = ["each_instruction_set"]

SEED, LENGTH, TOKENS, BLOCK_TOKENS = 11, 400, 12, 16
WINDOW = AttentionWindow(sink_tokens=5, recent_tokens=37)
CHUNK = 24
NUM_BLOCKS = 6
"""One block with sinks; and the 36 tokens before a chunk of 24 tokens, and these, are in at most 5
blocks. The prompt has 25 blocks."""


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model_and_reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Reference]]:
    folder = tmp_path_factory.mktemp(request.param)
    make_model(folder, request.param, seed=SEED)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = np.random.default_rng(SEED).integers(2, 500, size=LENGTH).tolist()
    yield folder, masked_reference_of(model, prompt, TOKENS, WINDOW)


@needs_kernels
@pytest.mark.usefixtures("each_instruction_set")
def test_native_kernels_give_the_tokens_of_transformers_with_the_same_mask(
    model_and_reference: tuple[Path, Reference],
) -> None:
    check_tokens(*model_and_reference, "on", speculation=True)


def test_torch_gives_the_tokens_of_transformers_with_the_same_mask(
    model_and_reference: tuple[Path, Reference],
) -> None:
    check_tokens(*model_and_reference, "off", speculation=False)


def check_tokens(model: Path, reference: Reference, cpu_kernels: str, *, speculation: bool) -> None:
    options = RunnerOptions(
        device="cpu",
        dtype="float32",
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        cpu_kernels=cpu_kernels,
    )
    runner = ModelRunner.load(model, options)
    config = EngineConfig(
        block_tokens=BLOCK_TOKENS,
        max_model_tokens=LENGTH + TOKENS,
        max_batched_tokens=CHUNK,
        speculation=speculation,
    )
    engine = Engine(
        runner,
        config,
        model_digest=runner.model_digest,
        kv_dtype=runner.kv_dtype,
        eos_token_ids=frozenset(),
        clock=SystemClock(),
    )

    def generate(prompt: list[int], count: int) -> list[int]:
        engine.add(windowed_spec(prompt, count), Task.PREFILL_AND_DECODE)
        answer: list[int] = []
        while engine.has_work():
            answer += [token for output in engine.step().outputs for token in output.token_ids]
        engine.check_integrity()
        return answer

    for _cache in ("cold", "warm"):
        assert compare(reference, generate) == Score(TOKENS, ties=0, differences=0)
    assert (
        engine.count_cached_tokens(
            engine.key_hasher.make_chain(windowed_spec(reference.prompt, 1)).keys, WINDOW
        )
        == LENGTH
    )


def windowed_spec(prompt: list[int], count: int) -> RequestSpec:
    return replace(greedy_spec(RequestId("a"), prompt, count), attention_window=WINDOW)
