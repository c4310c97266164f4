"""From logits to tokens. A row's result depends on its own logits, mask and parameters alone."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from baton.core.ids import TokenId
from baton.core.philox import uniform
from baton.core.request import SamplingParams, TokenLogprob
from baton.engine.mask import apply_masks
from baton.engine.plan import Row, SampledToken

TokenChooser = Callable[[torch.Tensor, Sequence[Row]], list[int]]
"""Chooses from scores [num_rows, vocab] in FP32, where what may not come is minus infinity."""


def sample(
    logits: torch.Tensor, rows: Sequence[Row], chooser: TokenChooser | None = None
) -> list[SampledToken | None]:
    """One token per row, or None where its mask allows none. ``logits`` [num_rows, vocab], FP32.

    Masks come before everything else. Reported logprobs are the model's own: before masks,
    penalties, bias and temperature. ``chooser``: whoever does the rest, if not torch.
    """
    if not rows:
        return []
    scores, barren = apply_masks(logits, [row.mask for row in rows])
    scores = mask_early_ends(scores, rows)
    chosen = (chooser or _choose_all)(scores, rows)
    return [
        None if index in barren else _sampled(logits, index, row.sampling.logprobs, token)
        for index, (row, token) in enumerate(zip(rows, chosen, strict=True))
    ]


def _choose_all(scores: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """The likeliest of each row in one go; those that want it otherwise choose one by one."""
    others = [index for index, row in enumerate(rows) if not is_plain_greedy(row.sampling)]
    if len(others) == len(rows):
        return [choose_token(scores[index], row) for index, row in enumerate(rows)]
    chosen = _likeliest(scores)
    for index in others:
        chosen[index] = choose_token(scores[index], rows[index])
    return chosen


def _likeliest(scores: torch.Tensor) -> list[int]:
    """Of equals the first. NumPy compares 16 numbers at once; torch does not on a CPU."""
    if scores.device.type == "cpu":
        best: list[int] = scores.numpy().argmax(axis=-1).tolist()
        return best
    return scores.argmax(dim=-1).tolist()


def mask_early_ends(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """With minus infinity for what would end an answer too early. What is given is not changed."""
    if not any(row.too_early for row in rows):
        return logits
    held, vocab_size = logits.clone(), logits.shape[-1]
    for index, row in enumerate(rows):
        held[index, [token for token in row.too_early if token < vocab_size]] = -torch.inf
    return held


def is_plain_greedy(params: SamplingParams) -> bool:
    """Whether the likeliest token as it stands is the answer."""
    return params.greedy and not params.needs_history and not params.logit_bias


def _sampled(logits: torch.Tensor, index: int, num_top: int | None, chosen: int) -> SampledToken:
    if num_top is None:
        return SampledToken(TokenId(chosen))
    return SampledToken(TokenId(chosen), _logprob(logits[index], chosen, num_top))


def choose_token(logits: torch.Tensor, row: Row) -> int:
    """Penalties, bias, temperature, filters, then the inverse of the distribution function,
    in the vocabulary's order and FP64, at the draw keyed by (seed, position)."""
    params = row.sampling
    scores = logits.double()
    if params.needs_history:
        scores = _penalised(scores, row)
    if params.logit_bias:
        tokens, biases = zip(*params.logit_bias, strict=True)
        scores = scores.index_add(
            0,
            torch.tensor(tokens, device=scores.device),
            torch.tensor(biases, dtype=scores.dtype, device=scores.device),
        )
    if params.greedy:
        return int(scores.argmax())
    chances = _filtered((scores / params.temperature).softmax(dim=-1), params)
    reached = chances.cumsum(dim=0)
    draw = uniform(params.seed, row.context_tokens) * float(reached[-1])
    token = int(torch.searchsorted(reached, draw, right=True))
    return token if token < len(reached) else _last_possible(chances)


def _last_possible(chances: torch.Tensor) -> int:
    """A draw that rounding puts beyond the end means the last token that is possible."""
    return int(chances.nonzero()[-1])


def _penalised(scores: torch.Tensor, row: Row) -> torch.Tensor:
    """Repetition counts prompt and answer (Keskar et al. 2019), presence and frequency the
    answer alone, as in OpenAI's API."""
    params, size = row.sampling, scores.shape[0]
    history = torch.tensor(row.history, device=scores.device)
    counts = torch.bincount(history[row.num_prompt_tokens :], minlength=size)
    seen = torch.zeros(size, dtype=torch.bool, device=scores.device)
    seen[history] = True
    factor = params.repetition_penalty
    scores = torch.where(seen, torch.where(scores > 0, scores / factor, scores * factor), scores)
    return scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def _filtered(chances: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Zero where top-k, top-p (Holtzman et al. 2019) or min-p forbids. Each takes what the one
    before has left; of equally likely tokens at the border those with lower ids stay."""
    if params.min_p > 0:
        chances = torch.where(chances < params.min_p * chances.max(), 0.0, chances)
    if params.top_k == 0 and params.top_p >= 1:
        return chances
    ordered = _descending(chances, params)
    num_kept = min(params.top_k or len(ordered), len(ordered))
    if params.top_p >= 1:
        return _best(chances, ordered, num_kept)
    total = ordered.sum()
    parts = ordered / total
    before = parts.cumsum(dim=0) - parts
    num_kept = min(num_kept, int((before < params.top_p).sum()))
    return _best(chances, ordered, num_kept) / total


def _descending(chances: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The chances alone, the best first: whose they are costs ten times as much to sort, and is
    seen at once where the border is known. Zero beyond ``top_k``."""
    if 0 < params.top_k < len(chances):
        ordered = torch.zeros_like(chances)
        ordered[: params.top_k] = chances.topk(params.top_k).values
        return ordered
    if chances.device.type == "cpu":
        return torch.from_numpy(np.sort(chances.numpy())).flip(0)
    return chances.sort(descending=True).values


def _best(chances: torch.Tensor, ordered: torch.Tensor, num_kept: int) -> torch.Tensor:
    """The ``num_kept`` best; zero for the others."""
    border = ordered[num_kept - 1]
    kept = chances > border
    equals = (chances == border).nonzero().flatten()
    kept[equals[: num_kept - int(kept.sum())]] = True
    return torch.where(kept, chances, 0.0)


def _logprob(logits: torch.Tensor, chosen: int, num_top: int) -> TokenLogprob:
    logprobs = logits.log_softmax(dim=-1)
    values, tokens = logprobs.topk(num_top)
    top = zip(tokens.tolist(), values.tolist(), strict=True)
    return TokenLogprob(
        TokenId(chosen),
        float(logprobs[chosen]),
        tuple((TokenId(token), value) for token, value in top),
    )
