"""Tests models with quantized weights: kernels agree with torch, logits have the same bits in any
batch, and workers with different formats share no KV."""

from pathlib import Path

import numpy as np
import pytest
import torch

from baton.engine.native.backend_choice import choose_backend
from baton.engine.native.processor import best_instruction_set
from baton.engine.quantized_matrix import QuantizedMatrix
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from baton.errors import Invalid
from testkit.model_zoo import make_model
from tests.unit.baton.engine.native_helpers import FORMATS, all_logits, needs_kernels, row_of

SEED = 20261121
QUANTIZED = ["int8", "int4"]
NEAR = 2e-5
"""Tolerance in FP32, relative to the largest logit: every layer sums in another order."""

PLACEMENTS = 4
"""Random placements per format and model."""


def load(path: Path, name: str, kernels: str, dtype: str = "float32", **sizes: int) -> ModelRunner:
    given = {"num_blocks": 64, **sizes}
    return ModelRunner.load(
        path,
        RunnerOptions(device="cpu", dtype=dtype, cpu_kernels=kernels, quantization=name, **given),
    )


def logits_of(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    return all_logits(runner, [row_of(prompt, 0, range(runner.num_blocks))])[0]


@needs_kernels
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", "int4"),
        ("qwen2", "int8"),
        ("qwen3-odd", "int4"),
        ("qwen3-moe", "int4"),
        ("qwen3-moe", "int8"),
    ],
)
def test_kernels_are_close_to_torch(model: str, name: str, tmp_path: Path) -> None:
    """Some of the models have tied heads, odd sizes, or experts. The kernels and torch compute with
    the same decoded weights."""
    make_model(tmp_path, model, seed=SEED)
    prompt = np.random.default_rng(SEED).integers(500, size=150).tolist()
    ours, theirs = (logits_of(load(tmp_path, name, on), prompt) for on in ("on", "off"))
    assert (ours - theirs).abs().max() <= NEAR * theirs.abs().max()


@needs_kernels
def test_all_matrices_are_quantized(tmp_path: Path) -> None:
    """Replacing the matrices by their decoded codes gives the same FP32 logits."""
    from safetensors.torch import load_file, save_file

    make_model(tmp_path, "qwen3", seed=SEED)
    prompt = np.random.default_rng(SEED).integers(500, size=60).tolist()
    got = logits_of(load(tmp_path, "int4", "on"), prompt)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    for key, weight in weights.items():
        if weight.dim() == 2:
            kept = "int8" if "embed_tokens" in key else "int4"
            weights[key] = QuantizedMatrix.quantize(weight, kept).codes.decode()
    save_file(weights, file, metadata={"format": "pt"})
    wanted = logits_of(load(tmp_path, "none", "off"), prompt)
    assert (got - wanted).abs().max() <= NEAR * wanted.abs().max()


@needs_kernels
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_logits_have_the_same_bits_in_any_batch(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A prompt's logits have the same bits with any chunking, batch, block size and number of
    threads."""
    print(f"seed {SEED}")
    make_model(tmp_path, "qwen3", seed=SEED)
    chance, kind = np.random.default_rng(SEED), str(dtype).removeprefix("torch.")
    prompts = [chance.integers(500, size=size).tolist() for size in (70, 9, 130)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = load(tmp_path, name, "on", kind)
        wanted = [logits_of(alone, prompt) for prompt in prompts]
        for _ in range(PLACEMENTS):
            torch.set_num_threads(int(chance.integers(1, 4)))
            block = int(chance.choice([1, 16, 64]))
            runner = load(tmp_path, name, "on", kind, num_blocks=1024 // block, block_tokens=block)
            for index, logits in enumerate(in_chunks(runner, prompts, chance)):
                assert torch.equal(logits, wanted[index]), f"prompt {index}, blocks of {block}"
    finally:
        torch.set_num_threads(threads)


def in_chunks(
    runner: ModelRunner, prompts: list[list[int]], chance: np.random.Generator
) -> list[torch.Tensor]:
    """Compute the logits of all tokens in steps. Each step computes a random part of every
    unfinished prompt."""
    share = runner.num_blocks // len(prompts)
    parts_of: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while any(start < len(prompt) for start, prompt in zip(done, prompts, strict=True)):
        left = [n for n, prompt in enumerate(prompts) if done[n] < len(prompt)]
        going = sorted(
            ((n, int(chance.choice([1, 3, 40, 100]))) for n in left), key=lambda part: part[1] > 1
        )
        blocks = [range(n * share, (n + 1) * share) for n in range(len(prompts))]
        rows = [row_of(prompts[n][done[n] :][:count], done[n], blocks[n]) for n, count in going]
        for (n, _), row, logits in zip(going, rows, all_logits(runner, rows), strict=True):
            parts_of[n].append(logits)
            done[n] += row.num_tokens
    return [torch.cat(parts) for parts in parts_of]


@needs_kernels
def test_model_weight_bytes(tmp_path: Path) -> None:
    """The weights are two layers (qkv, output, gate and up, down) and the head, in panels of 64
    outputs."""
    make_model(tmp_path, "qwen3")
    layer = 256 * 64 + 64 * 128 + 192 * 64 + 64 * 96
    head, outs = 512 * 64, 256 + 64 + 192 + 64
    sizes = {name: load(tmp_path, name, "on")._model.weight_bytes for name in ("none", *QUANTIZED)}
    assert sizes == {
        "none": (2 * layer + head) * 4,
        "int8": 2 * (layer + outs * 4) + head + 512 * 4,
        "int4": 2 * (layer // 2 + layer // 32 * 4) + head + 512 * 4,
    }


def test_formats_share_no_kv(tmp_path: Path) -> None:
    """The model digest depends on the format. It is part of every block key and of each member's
    record, and is checked at each KV transfer."""
    make_model(tmp_path, "qwen3")
    formats = ("none", *QUANTIZED, "fp8")
    assert len({load(tmp_path, name, "off").model_digest for name in formats}) == 4


@needs_kernels
def test_kernels_and_torch_share_kv(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3")
    for name in QUANTIZED:
        on, off = (load(tmp_path, name, kernels).model_digest for kernels in ("on", "off"))
        assert on == off


@needs_kernels
def test_backend_description_names_the_format(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3")
    on, off = (load(tmp_path, "int8", kernels).backend.description for kernels in ("on", "off"))
    assert on == f"our own kernels ({best_instruction_set()}), in float32, weights in int8"
    assert off == "torch; weights in int8 are decoded for each product"


@needs_kernels
def test_odd_sizes_fall_back_to_torch(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3", intermediate_size=95)
    runner = load(tmp_path, "int4", "auto")
    reason = "the kernels for int4 need even matrix sizes, and the model has odd ones"
    decoded = "weights in int4 are decoded for each product"
    assert runner.backend.description == f"torch: {reason}; {decoded}"
    with pytest.raises(Invalid, match=reason):
        choose_backend("on", runner.model_config, torch.device("cpu"), torch.float32, "int4")
    wanted = logits_of(load(tmp_path, "none", "on"), [1, 2, 3])
    got = logits_of(runner, [1, 2, 3])
    assert got.shape == wanted.shape and (got - wanted).abs().max() <= 0.3 * wanted.abs().max()
