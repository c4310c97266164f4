"""The GPU of the tests in this folder, and how they run models on it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.checkpoints.checkpoint import DEMO_MODEL
from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.plan import Plan, Row
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions

GPU = torch.device("cuda:0")
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
"""The marks of each module in this folder."""

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
CHUNK_TOKENS = 37
"""Tokens of a prefill chunk; not a multiple of a block's tokens."""


def load_runner(place: str, model: Path = DEMO_MODEL, **given: Any) -> ModelRunner:
    return ModelRunner.load(
        model, RunnerOptions(device=place, dtype="float32", num_blocks=64, **given)
    )


def generated(
    runner: ModelRunner,
    ids: Sequence[int],
    chunk_tokens: int = 1024,
    num_tokens: int = GREEDY.max_tokens,
) -> list[int]:
    """Return the greedy tokens that follow the prompt ``ids``, which is computed in chunks."""
    blocks = tuple(BlockId(n) for n in range(runner.num_blocks))
    tokens, start = tuple(TokenId(token) for token in ids), 0
    while len(tokens) > chunk_tokens:
        row = Row(RequestId("demo"), tokens[:chunk_tokens], start, blocks, False, GREEDY)
        runner.run(Plan(0, (row,)))
        tokens, start = tokens[chunk_tokens:], start + chunk_tokens
    got: list[int] = []
    while len(got) < num_tokens:
        row = Row(RequestId("demo"), tokens, start, blocks, True, GREEDY)
        sampled = runner.run(Plan(0, (row,))).sampled[0]
        assert sampled is not None
        start += len(tokens)
        tokens = (sampled.token_id,)
        got.append(int(sampled.token_id))
    return got
