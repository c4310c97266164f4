"""Runs benchmark cases on a model runner. The KV pool is filled with random values, and the plans
are like those of a scheduler."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.bench.bench_case import BenchCase
from baton.engine.bench.profile_step import ProfileStep
from baton.engine.bench.stopwatch import Action
from baton.engine.plan import Plan, Row
from baton.engine.runner import ModelRunner

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
NOISE_ELEMENTS = 2**22
"""Number of random elements; the rest of the pool repeats them. The values in the pool don't affect
the speed, unless they are zero or NaN."""


class BenchRunner:
    """Makes and runs the steps of benchmark cases. A prefill step computes at most ``chunk_tokens``
    tokens. Blocks are allocated in random order, as in a pool that has been in use for a long
    time. Only the first ``num_blocks`` blocks of the pool are used; by default, all."""

    def __init__(
        self, runner: ModelRunner, chunk_tokens: int, seed: int, num_blocks: int | None = None
    ) -> None:
        self._runner = runner
        self._chunk_tokens = chunk_tokens
        generator = torch.Generator().manual_seed(seed)
        used = runner.num_blocks if num_blocks is None else min(num_blocks, runner.num_blocks)
        self._blocks = torch.randperm(used, generator=generator).tolist()
        self._vocabulary = runner.model_config.vocab_size
        _fill(runner.pool.tensor[:used], generator)

    def make_action(self, work: BenchCase) -> Action:
        """Return an action that runs all steps of ``work``."""
        needed = num_blocks_for(work, self._runner.block_tokens) * self._runner.num_groups
        assert needed <= len(self._blocks), str(work)
        plans = list(self._prefill(work) if work.kind == "prefill" else self._decode(work))
        return lambda: [self._runner.run(plan) for plan in plans]

    def make_step(self, step: ProfileStep) -> Action:
        """Return an action that runs one step, in which each request samples a token."""
        plan = Plan(0, tuple(self._step_rows(step)))
        return lambda: self._runner.run(plan)

    def _step_rows(self, step: ProfileStep) -> Iterator[Row]:
        spans = [(step.context - 1, step.context)] * step.batch
        if step.new_tokens:
            spans.append((step.cached_tokens, step.cached_tokens + step.new_tokens))
        first = 0
        for n, (start, end) in enumerate(spans):
            last = first + -(-end // self._runner.block_tokens) * self._runner.num_groups
            assert last <= len(self._blocks), str(step)
            table = tuple(BlockId(block) for block in self._blocks[first:last])
            tokens = tuple(
                TokenId((1 + n + token) % self._vocabulary) for token in range(start, end)
            )
            yield Row(RequestId(str(n)), tokens, start, table, sample=True, sampling=GREEDY)
            first = last

    def prompt_row(self, tokens: Sequence[int]) -> Row:
        """Return a row that prefills these tokens in one step."""
        work = BenchCase("prefill", 1, len(tokens))
        row = self._row(0, work, 0, len(tokens))
        return replace(row, token_ids=tuple(TokenId(token) for token in tokens))

    def _decode(self, work: BenchCase) -> Iterator[Plan]:
        rows = [self._row(n, work, work.context - 1, work.context) for n in range(work.batch)]
        yield Plan(0, tuple(rows))

    def _prefill(self, work: BenchCase) -> Iterator[Plan]:
        """Yield plans that prefill one prompt after the other. Every step has ``chunk_tokens``
        tokens, except perhaps the last."""
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
        """Return the row of the batch that computes tokens [start, end) of the n-th request."""
        return Row(
            RequestId(str(n)),
            tuple(TokenId((1 + n + token) % self._vocabulary) for token in range(start, end)),
            start,
            self._table(n, work),
            sample=end == work.context,
            sampling=GREEDY,
        )

    def _table(self, n: int, work: BenchCase) -> tuple[BlockId, ...]:
        each = -(-work.context // self._runner.block_tokens) * self._runner.num_groups
        return tuple(BlockId(block) for block in self._blocks[n * each : (n + 1) * each])


def num_blocks_for(work: BenchCase, block_tokens: int) -> int:
    """Return the number of blocks that a case needs, if a block has the KV of all layers."""
    return work.batch * -(-work.context // block_tokens)


def num_blocks_for_step(step: ProfileStep, block_tokens: int) -> int:
    """Return the number of blocks that a step needs, if a block has the KV of all layers."""
    prompt = -(-(step.cached_tokens + step.new_tokens) // block_tokens)
    return prompt + step.batch * -(-step.context // block_tokens)


def max_blocks(all_works: Sequence[BenchCase], block_tokens: int) -> int:
    return max(num_blocks_for(work, block_tokens) for work in all_works)


def _fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    flat = tensor.view(-1)
    noise = torch.randn(min(NOISE_ELEMENTS, len(flat)), generator=generator)
    noise = noise.to(flat.dtype).to(flat.device)
    for first in range(0, len(flat), len(noise)):
        part = flat[first : first + len(noise)]
        part.copy_(noise[: len(part)])
