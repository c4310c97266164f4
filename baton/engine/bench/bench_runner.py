"""A runner with a pool full of noise, and the plans that a scheduler would make for a work."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.bench.bench_case import BenchCase
from baton.engine.bench.stopwatch import Action
from baton.engine.plan import Plan, Row
from baton.engine.runner import ModelRunner

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
NOISE_ELEMENTS = 2**22
"""Made by chance; all else repeats them. What KV says takes no time, unless it is zero or NaN."""


class BenchRunner:
    """``chunk_tokens``: of a step that reads prompts. The pool's blocks are given out in no order,
    as after a day's work."""

    def __init__(self, runner: ModelRunner, chunk_tokens: int, seed: int) -> None:
        self._runner = runner
        self._chunk_tokens = chunk_tokens
        chance = torch.Generator().manual_seed(seed)
        self._blocks = torch.randperm(runner.num_blocks, generator=chance).tolist()
        self._vocabulary = runner.model_config.vocab_size
        _fill(runner.pool.tensor, chance)

    def step(self, work: BenchCase) -> Action:
        """Does the work each time that it is called."""
        assert blocks_of(work, self._runner.block_tokens) <= len(self._blocks), str(work)
        plans = list(self._prefill(work) if work.kind == "prefill" else self._decode(work))
        return lambda: [self._runner.run(plan) for plan in plans]

    def prompt(self, tokens: Sequence[int]) -> Row:
        """One step of it, all tokens at once."""
        work = BenchCase("prefill", 1, len(tokens))
        row = self._row(0, work, 0, len(tokens))
        return replace(row, token_ids=tuple(TokenId(token) for token in tokens))

    def _decode(self, work: BenchCase) -> Iterator[Plan]:
        rows = [self._row(n, work, work.context - 1, work.context) for n in range(work.batch)]
        yield Plan(0, tuple(rows))

    def _prefill(self, work: BenchCase) -> Iterator[Plan]:
        """Prompt after prompt, as many tokens a step as fit."""
        rows: list[Row] = []
        room = self._chunk_tokens
        for n in range(work.batch):
            done = 0
            while done < work.context:
                end = min(work.context, done + room)
                rows.append(self._row(n, work, done, end))
                room -= end - done
                done = end
                if room == 0:
                    yield Plan(0, tuple(rows))
                    rows, room = [], self._chunk_tokens
        if rows:
            yield Plan(0, tuple(rows))

    def _row(self, n: int, work: BenchCase, start: int, end: int) -> Row:
        """Tokens [start, end) of the n-th request."""
        return Row(
            RequestId(str(n)),
            tuple(TokenId((1 + n + token) % self._vocabulary) for token in range(start, end)),
            start,
            self._table(n, work),
            sample=end == work.context,
            sampling=GREEDY,
        )

    def _table(self, n: int, work: BenchCase) -> tuple[BlockId, ...]:
        each = -(-work.context // self._runner.block_tokens)
        return tuple(BlockId(block) for block in self._blocks[n * each : (n + 1) * each])


def blocks_of(work: BenchCase, block_tokens: int) -> int:
    """That a work needs of the pool."""
    return work.batch * -(-work.context // block_tokens)


def max_blocks(all_works: Sequence[BenchCase], block_tokens: int) -> int:
    return max(blocks_of(work, block_tokens) for work in all_works)


def _fill(tensor: torch.Tensor, chance: torch.Generator) -> None:
    flat = tensor.view(-1)
    noise = torch.randn(min(NOISE_ELEMENTS, len(flat)), generator=chance)
    noise = noise.to(flat.dtype).to(flat.device)
    for first in range(0, len(flat), len(noise)):
        part = flat[first : first + len(noise)]
        part.copy_(noise[: len(part)])
