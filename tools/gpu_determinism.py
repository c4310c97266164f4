"""Check that a GPU computes the same bits for a token in any batch and chunking; run by
``gpu_check``.

Loads the demo model with the option ``deterministic``, so that the runner also makes its own check
when it loads the model. Then compares the logits of prompts in random chunks, batches and blocks
with those of the same prompts computed alone and in one chunk.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from baton.checkpoint import DEMO_MODEL
from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import pack_batch
from baton.engine.plan import Row
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from tools.gpu_timing import GpuTableRow, rows_or_error

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


def determinism(name: str, place: str = "cuda") -> Iterator[GpuTableRow]:
    """Check one of ``KINDS``."""
    yield from rows_or_error(f"the same bits, {name}", _check(name, place, KINDS[name]))


def _check(name: str, place: str, given: dict[str, Any]) -> Iterator[GpuTableRow]:
    """Check, for one number format, that prompts' logits have the same bits whether each prompt is
    computed alone in one chunk, or all of them together, in random chunks and KV blocks. If the
    runner's own check at load fails, raise the error with which a worker would fail to start."""
    runner = ModelRunner.load(
        DEMO_MODEL,
        RunnerOptions(
            device=place,
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            deterministic=True,
            **given,
        ),
    )
    chance = np.random.default_rng(SEED)
    vocabulary = runner.model_config.vocab_size
    prompts = [chance.integers(vocabulary, size=length).tolist() for length in LENGTHS]
    wanted = [_placed(runner, [prompt], None)[0] for prompt in prompts]
    differing = 0
    for _ in range(PLACEMENTS):
        got = _placed(runner, prompts, chance)
        differing += not all(map(torch.equal, got, wanted))
    result = f"{PLACEMENTS - differing} of {PLACEMENTS} random placements"
    yield GpuTableRow(f"the same bits, {name}", result, ok=differing == 0)


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
