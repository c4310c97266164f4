"""The model on the kernels: near torch's, and the same bits however a step is put together."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.engine.native.decoder import NativeModel
from baton.engine.native.processor import limited_to
from baton.engine.quantization import QUANTIZATION_FORMATS as QUANTIZATIONS
from baton.engine.runner import ModelRunner
from tests.model_zoo import ZOO, make_model
from tests.unit.native_house import (
    FORMATS,
    HERE,
    all_logits,
    each_processor,
    load,
    needs_kernels,
    row_of,
)
from tools.determinism import RandomPlacement, requests_alone

__all__ = ["each_processor"]

pytestmark = needs_kernels

SEED = 20261121
NEAR = {torch.float32: 2e-5, torch.bfloat16: 5e-2}
"""Of the largest logit. BF16 keeps eight bits, and every layer rounds a dozen times."""

PLACEMENTS = {"qwen2": 50, "qwen3": 50, "llama3-rope": 50, "qwen3-moe": 15}
"""Of each format: 330 in all; ``tools.determinism`` tries a thousand. Torch routes to experts one
by one, which takes longer."""


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.usefixtures("each_processor")
def test_near_torch(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Prompts, then chunks and decodes after them, so that what one step writes the next reads."""
    if name == "qwen3-moe" and dtype is torch.bfloat16:
        pytest.skip("two experts that are nearly as likely may change places")
    make_model(tmp_path, name, seed=SEED)
    chance = np.random.default_rng(SEED)
    runners = [load(tmp_path, dtype, kernels) for kernels in ("on", "off")]
    assert [isinstance(runner._model, NativeModel) for runner in runners] == [True, False]
    starts = [0, 0, 0]
    for counts in ([1, 17, 200], [1, 1, 70], [1, 1, 1]):
        rows = [
            row_of(chance.integers(500, size=count).tolist(), start, range(20 * n, 20 * n + 20))
            for n, (start, count) in enumerate(zip(starts, counts, strict=True))
        ]
        ours, theirs = (torch.cat(all_logits(runner, rows)) for runner in runners)
        worst = (ours - theirs).abs().max() / theirs.abs().max()
        assert worst <= NEAR[dtype], f"{counts}: {worst}"
        starts = [start + count for start, count in zip(starts, counts, strict=True)]


@pytest.mark.skipif(len(HERE) < 2, reason="there is no other processor in this one")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-odd"])
def test_bits_do_not_depend_on_the_processor(
    name: str, quantization: str, dtype: str, tmp_path: Path
) -> None:
    """Few rows and many, of heads and depths that fill no vector."""
    make_model(tmp_path, name, seed=SEED)
    prompt = np.random.default_rng(SEED).integers(500, size=150).tolist()
    told = []
    for processor in HERE:
        with limited_to(processor):
            runner = ModelRunner.load(
                tmp_path, device="cpu", dtype=dtype, num_blocks=64, quantization=quantization
            )
            rows = [row_of(prompt, 0, range(20)), row_of(prompt[:1], 0, [20])]
            read = all_logits(runner, rows)
            told.append(torch.cat([*read, *all_logits(runner, [row_of([7], 150, range(20))])]))
    assert all(torch.equal(told[0], each) for each in told[1:])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_bits_do_not_depend_on_the_step(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every token's logits equal those of its prompt alone, in one chunk, on one thread: in any
    batch, chunking, block size, with a reused prefix, handed over, on several threads, and by
    whatever instructions this machine has."""
    print(f"seed {SEED}")
    make_model(tmp_path, name, seed=SEED)
    chance = np.random.default_rng(SEED)
    threads = torch.get_num_threads()
    events: Counter[str] = Counter()
    try:
        requests = requests_alone(tmp_path, dtype, chance, "on")
        for _ in range(PLACEMENTS[name]):
            placement = RandomPlacement(tmp_path, dtype, chance)
            placement.run(requests)
            events += placement.events
    finally:
        torch.set_num_threads(threads)
    assert events["reused"] and events["handed over"]
