"""Tests that models on a GPU give the tokens of transformers, or of Baton's engine, on the CPU."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.checkpoints.checkpoint import DEMO_MODEL
from testkit.lora_zoo import ATTENTION, MLP, make_adapter
from testkit.model_zoo import ZOO, make_model
from tests.gpu.adapter_answers import answers_with_adapters
from tests.gpu.device import CHUNK_TOKENS, GREEDY, NEEDS_GPU, generated, load_runner

pytestmark = NEEDS_GPU

PROMPT = "def read(path):\n"


def demo_prompt() -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(DEMO_MODEL)(PROMPT)["input_ids"]
    return ids


def reference_tokens(path: Path, ids: Sequence[int]) -> list[int]:
    """Return the greedy tokens of transformers on the CPU, in FP32."""
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    answer = reference.generate(
        torch.tensor([ids]), max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = answer[0, len(ids) :].tolist()
    return tokens


@pytest.mark.parametrize("has_graphs", [True, False], ids=["graphs", "no graphs"])
def test_demo_model_gives_the_tokens_of_transformers(has_graphs: bool) -> None:
    ids = demo_prompt()
    runner = load_runner("cuda", cuda_graphs=has_graphs)
    assert (runner._graphs is not None) == has_graphs
    assert generated(runner, ids) == reference_tokens(DEMO_MODEL, ids)


@pytest.mark.parametrize(
    "given", [{"quantization": "fp8"}, {"kv_dtype": "fp8"}], ids=["weights", "KV"]
)
def test_fp8_gives_the_tokens_of_the_cpu(given: dict[str, Any]) -> None:
    """Both compute in FP32; on the CPU, torch decodes the FP8 values first. Only the first quarter
    of the tokens must be equal: a key halfway between two FP8 values may be rounded to either,
    which may change a token."""
    ours, theirs = (generated(load_runner(at, **given), demo_prompt()) for at in ("cuda", "cpu"))
    pairs = zip(ours, theirs, strict=True)
    equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    print(f"the first {equal} of {len(ours)} tokens equal the CPU's")
    assert equal >= len(ours) // 4


@pytest.mark.parametrize("name", ZOO)
def test_architectures_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """A small model of each architecture with random weights; the prompt is computed in chunks."""
    path = make_model(tmp_path / name, name)
    ids = [5 + 7 * n % 300 for n in range(3 * CHUNK_TOKENS + 5)]
    got = generated(load_runner("cuda", path), ids, CHUNK_TOKENS)
    assert got == reference_tokens(path, ids)


@pytest.mark.parametrize(
    ("name", "targets"), [("qwen3", (*ATTENTION, *MLP)), ("qwen3-moe", ATTENTION)]
)
def test_adapters_give_the_tokens_of_the_cpu(
    name: str, targets: Sequence[str], tmp_path: Path
) -> None:
    """Batches of prompts without and with each of two adapters. Prompts are computed in chunks,
    beside decodes of other requests."""
    path = make_model(tmp_path / name, name)
    adapters = [
        make_adapter(tmp_path / f"{name} {seed}", path, seed=seed, targets=targets)
        for seed in (1, 2)
    ]
    got, wanted = (answers_with_adapters(place, path, adapters) for place in ("cuda", "cpu"))
    assert got == wanted
    assert len({tuple(answer) for answer in wanted}) == 9
