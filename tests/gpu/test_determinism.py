"""Tests that a GPU computes the same bits for a token in any batch and chunking, with the option
``deterministic``. The runner also makes its own check when it loads the model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from baton.checkpoints.checkpoint import DEMO_MODEL
from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import pack_batch
from baton.engine.plan import Row
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from tests.gpu.device import NEEDS_GPU

pytestmark = NEEDS_GPU

KINDS: dict[str, dict[str, Any]] = {
    "FP32": {"dtype": "float32"},
    "BF16": {"dtype": "bfloat16"},
    "FP8 weights and KV": {"dtype": "bfloat16", "quantization": "fp8", "kv_dtype": "fp8"},
}
PLACEMENTS = 334
"""For each number format."""
LENGTHS = (300, 70, 9)
CHUNKS = (1, 3, 17, 64, 130)
BLOCK_TOKENS, NUM_BLOCKS = 16, 64
SEED = 20261121
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", KINDS)
def test_logits_have_the_same_bits_in_any_batch(name: str) -> None:
    """Whether each prompt is computed alone in one chunk, or all of them together, in random chunks
    and KV blocks."""
    runner = ModelRunner.load(
        DEMO_MODEL,
        RunnerOptions(
            device="cuda",
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            deterministic=True,
            **KINDS[name],
        ),
    )
    chance = np.random.default_rng(SEED)
    vocabulary = runner.model_config.vocab_size
    prompts = [chance.integers(vocabulary, size=length).tolist() for length in LENGTHS]
    wanted = [_placed(runner, [prompt], None)[0] for prompt in prompts]
    equal = [
        all(map(torch.equal, _placed(runner, prompts, chance), wanted)) for _ in range(PLACEMENTS)
    ]
    assert equal == [True] * PLACEMENTS


@torch.inference_mode()
def _placed(
    runner: ModelRunner, prompts: Sequence[list[int]], chance: np.random.Generator | None
) -> list[torch.Tensor]:
    """Return the logits of each prompt's tokens. The prompts are computed together, in chunks of
    random sizes and in random KV blocks. If ``chance`` is None, each prompt is computed in one
    chunk, and the order of its blocks is fixed."""
    order = np.arange(NUM_BLOCKS) if chance is None else chance.permutation(NUM_BLOCKS)
    blocks = order.tolist()
    tables = [[blocks.pop() for _ in range(-(-len(p) // BLOCK_TOKENS))] for p in prompts]
    logits_of: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while left := [n for n, prompt in enumerate(prompts) if done[n] < len(prompt)]:
        most = {n: max(LENGTHS) if chance is None else int(chance.choice(CHUNKS)) for n in left}
        parts = {n: prompts[n][done[n] :][: most[n]] for n in left}
        going = sorted(left, key=lambda n: len(parts[n]) > 1)  # decode rows come first
        rows = [_row(parts[n], done[n], tables[n]) for n in going]
        for n, logits in zip(going, _logits(runner, rows), strict=True):
            logits_of[n].append(logits)
            done[n] += len(parts[n])
    return [torch.cat(parts) for parts in logits_of]


def _row(tokens: list[int], start: int, blocks: list[int]) -> Row:
    ids = tuple(TokenId(token) for token in tokens)
    places = tuple(BlockId(block) for block in blocks)
    return Row(RequestId(""), ids, start, places, sample=False, sampling=SamplingParams(1))


def _logits(runner: ModelRunner, rows: Sequence[Row]) -> list[torch.Tensor]:
    """Return the logits of all tokens of each row."""
    device = runner.pool.tensor.device
    batch = pack_batch(rows, BLOCK_TOKENS, CPU, num_groups=runner.num_groups)
    tokens = torch.tensor([token for row in rows for token in row.token_ids], device=device)
    hidden = runner._model.hidden(tokens, batch)
    logits = runner._model.logits(hidden, torch.arange(len(tokens), device=device))
    return list(torch.split(logits, [row.num_tokens for row in rows]))
