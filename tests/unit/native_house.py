"""What tests of the kernels share."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import make_batch
from baton.engine.native.choice import unavailable
from baton.engine.plan import Row
from baton.engine.runner import ModelRunner

MISSING = unavailable("float32") or unavailable("bfloat16")
needs_kernels = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
SAMPLING = SamplingParams(max_tokens=1)
FORMATS = [torch.float32, torch.bfloat16]


def load(path: Path, dtype: torch.dtype, kernels: str, **given: int) -> ModelRunner:
    kind = str(dtype).removeprefix("torch.")
    size = {"num_blocks": 64, **given}
    return ModelRunner.load(path, device="cpu", dtype=kind, cpu_kernels=kernels, **size)


def row_of(tokens: Sequence[int], start: int, blocks: Sequence[int]) -> Row:
    return Row(
        RequestId("any"),
        tuple(TokenId(token) for token in tokens),
        start,
        tuple(BlockId(block) for block in blocks),
        sample=False,
        sampling=SAMPLING,
    )


def all_logits(runner: ModelRunner, rows: Sequence[Row]) -> list[torch.Tensor]:
    """Of every token of each row, [num_tokens, vocab]; a step as the runner makes it."""
    batch = make_batch(rows, runner.block_tokens, torch.device("cpu"))
    tokens = torch.tensor([token for row in rows for token in row.token_ids])
    with torch.inference_mode():
        hidden = runner._model.hidden(tokens, batch)
        logits = runner._model.logits(hidden, torch.arange(len(tokens)))
    return list(logits.split([row.num_tokens for row in rows]))
