"""Measures how a model predicts a text if the KV before it passed through a codec."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams, TokenLogprob
from baton.engine.plan import Plan, Row
from baton.engine.runner import ModelRunner
from baton.kv_codec.base import BlockCodec

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)


@dataclass(frozen=True, slots=True)
class CodecQuality:
    """The perplexity of the continuations, and the share of their tokens at which the likeliest
    next token is the same as without a codec."""

    name: str
    perplexity: float
    agreement: float


class QualityMeter:
    """Computes prompts and continuations on a runner, whose pool has room for one of them.

    ``texts`` [num_prompts][tokens] are the prompts, of ``prompt_tokens`` each, with their
    continuations. ``blocks`` [num_prompts, num_blocks, block_bytes] are copies of the KV of the
    prompts' full blocks.
    """

    def __init__(
        self, runner: ModelRunner, texts: Sequence[Sequence[int]], prompt_tokens: int
    ) -> None:
        self._runner = runner
        self._texts = texts
        self._prompt_tokens = prompt_tokens
        self._table = tuple(BlockId(n) for n in range(runner.num_blocks))
        used = prompt_tokens // runner.block_tokens * runner.num_groups
        self._pool = runner.pool.tensor.view(torch.uint8).view(runner.num_blocks, -1)[:used]
        self.blocks = np.stack([self._prefill(text) for text in texts])
        self._likeliest: list[TokenId] = []

    def measure(self, name: str, codec: BlockCodec | None) -> CodecQuality:
        """Measure with all full blocks of the prompts encoded and decoded by ``codec``. The first
        call must be without a codec: later ones are compared with it."""
        scores: list[TokenLogprob] = []
        for text, blocks in zip(self._texts, self.blocks, strict=True):
            self._pool.copy_(torch.from_numpy(blocks))
            if codec is not None:
                self._pass_through(codec)
            scores += self._continue(text)
        likeliest = [score.top[0][0] for score in scores]
        self._likeliest = self._likeliest or likeliest
        same = sum(a == b for a, b in zip(likeliest, self._likeliest, strict=True))
        loss = -sum(score.logprob for score in scores) / len(scores)
        return CodecQuality(name, math.exp(loss), same / len(scores))

    def _prefill(self, text: Sequence[int]) -> npt.NDArray[np.uint8]:
        self._runner.run(Plan(0, (self._row(text[: self._cached_tokens], 0, ()),)))
        return np.array(self._pool.numpy())

    @property
    def _cached_tokens(self) -> int:
        """The prompt's tokens in full blocks; the others are computed with the continuation."""
        return self._prompt_tokens // self._runner.block_tokens * self._runner.block_tokens

    def _continue(self, text: Sequence[int]) -> Sequence[TokenLogprob]:
        """Compute the continuation in one step, each token with those before it, and return the
        scores of all its tokens but the first."""
        tokens = text[self._cached_tokens :]
        output = self._runner.run(Plan(0, (self._row(tokens, self._cached_tokens, tokens[1:]),)))
        return output.prompt_logprobs[0]

    def _row(self, tokens: Sequence[int], start: int, targets: Sequence[int]) -> Row:
        return Row(
            RequestId("0"),
            tuple(TokenId(token) for token in tokens),
            start,
            self._table,
            sample=True,
            sampling=GREEDY,
            prompt_logprob_targets=tuple(TokenId(token) for token in targets),
        )

    def _pass_through(self, codec: BlockCodec) -> None:
        """Encode and decode the blocks in the pool, in place. A block that would not become smaller
        stays as it is."""
        size = self._pool.shape[1]
        encoded = np.zeros((len(self._pool), size), np.uint8)
        first, target = self._pool.data_ptr(), int(encoded.ctypes.data)
        blocks = [first + n * size for n in range(len(self._pool))]
        targets = [target + n * size for n in range(len(self._pool))]
        sizes = codec.encode(blocks, targets)
        smaller = [n for n, encoded_size in enumerate(sizes) if encoded_size]
        valid = codec.decode(
            [targets[n] for n in smaller], [sizes[n] for n in smaller], [blocks[n] for n in smaller]
        )
        assert all(valid)
