"""Samples tokens. A row's result depends only on its own logits, mask and parameters."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from baton.core.ids import TokenId
from baton.core.philox import uniform
from baton.core.request import SamplingParams, TokenLogprob
from baton.engine.mask import apply_masks
from baton.engine.plan import Row, SampledToken
from baton.engine.upload import upload_integers

TokenChooser = Callable[[torch.Tensor, Sequence[Row]], list[int]]
"""Chooses one token per row of scores [num_rows, vocab] in FP32, where tokens that are not allowed
have a score of minus infinity."""


def sample(
    logits: torch.Tensor, rows: Sequence[Row], chooser: TokenChooser | None = None
) -> list[SampledToken | None]:
    """Sample one token per row of ``logits`` [num_rows, vocab], which are in FP32. The result has
    None for a row whose mask allows no token.

    Masks are applied before everything else. Reported logprobs are the model's own, without masks,
    penalties, bias and temperature. If ``chooser`` is given, it replaces torch for everything after
    the masks.
    """
    if not rows:
        return []
    scores, empty_rows = apply_masks(logits, [row.mask for row in rows])
    scores = mask_early_ends(scores, rows)
    chosen = (chooser or _choose_all)(scores, rows)
    return [
        None if index in empty_rows else _sampled(logits, index, row.sampling.logprobs, token)
        for index, (row, token) in enumerate(zip(rows, chosen, strict=True))
    ]


def _choose_all(scores: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Choose the likeliest token of every row in one operation. Rows that are not plain greedy are
    then sampled one by one."""
    others = [index for index, row in enumerate(rows) if not is_plain_greedy(row.sampling)]
    if len(others) == len(rows):
        return [choose_token(scores[index], row) for index, row in enumerate(rows)]
    chosen = _likeliest(scores)
    for index in others:
        chosen[index] = choose_token(scores[index], rows[index])
    return chosen


def _likeliest(scores: torch.Tensor) -> list[int]:
    """Return the index of each row's maximum, or of the first one if there are several. On a CPU,
    this uses NumPy, which is faster than torch because it compares 16 numbers at once."""
    if scores.device.type == "cpu":
        best: list[int] = scores.numpy().argmax(axis=-1).tolist()
        return best
    return scores.argmax(dim=-1).tolist()


def mask_early_ends(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return ``logits`` with minus infinity for tokens that would end an answer before its
    ``min_tokens``. The input is not changed."""
    if not any(row.suppressed_token_ids for row in rows):
        return logits
    masked, vocab_size = logits.clone(), logits.shape[-1]
    places = [
        index * vocab_size + token
        for index, row in enumerate(rows)
        for token in row.suppressed_token_ids
        if token < vocab_size
    ]
    masked.view(-1).index_fill_(0, upload_integers(places, logits.device), -torch.inf)
    return masked


def is_plain_greedy(params: SamplingParams) -> bool:
    """Whether the sampled token is just the likeliest one, without penalties or biases."""
    return params.is_greedy and not params.needs_history and not params.logit_bias


def _sampled(logits: torch.Tensor, index: int, num_top: int | None, chosen: int) -> SampledToken:
    if num_top is None:
        return SampledToken(TokenId(chosen))
    return SampledToken(TokenId(chosen), _logprob(logits[index], chosen, num_top))


def choose_token(logits: torch.Tensor, row: Row) -> int:
    """Sample a token: apply penalties, bias, temperature and filters, then invert the cumulative
    distribution at a random draw that (seed, position) determines. The distribution is in FP64 and
    in the vocabulary's order."""
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
    if params.is_greedy:
        return int(scores.argmax())
    probs = _filtered((scores / params.temperature).softmax(dim=-1), params)
    cumulative = probs.cumsum(dim=0)
    draw = uniform(params.seed, row.context_tokens) * float(cumulative[-1])
    token = int(torch.searchsorted(cumulative, draw, right=True))
    return token if token < len(cumulative) else _last_possible(probs)


def _last_possible(probs: torch.Tensor) -> int:
    """Return the last token with a probability above 0, for a draw that rounding puts beyond the
    end."""
    return int(probs.nonzero()[-1])


def _penalised(scores: torch.Tensor, row: Row) -> torch.Tensor:
    """Apply the penalties. The repetition penalty concerns the tokens of prompt and answer (Keskar
    et al. 2019); presence and frequency penalties concern only those of the answer, as in OpenAI's
    API."""
    params, size = row.sampling, scores.shape[0]
    history = torch.tensor(row.history, device=scores.device)
    counts = torch.bincount(history[row.num_prompt_tokens :], minlength=size)
    seen = torch.zeros(size, dtype=torch.bool, device=scores.device)
    seen[history] = True
    factor = params.repetition_penalty
    scores = torch.where(seen, torch.where(scores > 0, scores / factor, scores * factor), scores)
    return scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def _filtered(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Set to zero the probabilities of the tokens that the filters exclude: min-p, then top-k, then
    top-p (Holtzman et al. 2019), each applied to the result of the one before. Of equally likely
    tokens at a threshold, those with lower ids stay."""
    if params.min_p > 0:
        probs = torch.where(probs < params.min_p * probs.max(), 0.0, probs)
    if params.top_k == 0 and params.top_p >= 1:
        return probs
    ordered = _descending(probs, params)
    num_kept = min(params.top_k or len(ordered), len(ordered))
    if params.top_p >= 1:
        return _best(probs, ordered, num_kept)
    total = ordered.sum()
    parts = ordered / total
    before = parts.cumsum(dim=0) - parts
    num_kept = min(num_kept, int((before < params.top_p).sum()))
    return _best(probs, ordered, num_kept) / total


def _descending(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the probabilities, without token ids, sorted in descending order; those beyond
    ``top_k`` are zero. Sorting the token ids along with them would take ten times as long and is
    not needed, because the threshold alone determines which tokens are kept."""
    if 0 < params.top_k < len(probs):
        ordered = torch.zeros_like(probs)
        ordered[: params.top_k] = probs.topk(params.top_k).values
        return ordered
    if probs.device.type == "cpu":
        return torch.from_numpy(np.sort(probs.numpy())).flip(0)
    return probs.sort(descending=True).values


def _best(probs: torch.Tensor, ordered: torch.Tensor, num_kept: int) -> torch.Tensor:
    """Keep the ``num_kept`` largest probabilities and set the others to zero."""
    threshold = ordered[num_kept - 1]
    kept = probs > threshold
    equals = (probs == threshold).nonzero().flatten()
    kept[equals[: num_kept - int(kept.sum())]] = True
    return torch.where(kept, probs, 0.0)


def _logprob(logits: torch.Tensor, chosen: int, num_top: int) -> TokenLogprob:
    logprobs = logits.log_softmax(dim=-1)
    values, tokens = logprobs.topk(num_top)
    top = zip(tokens.tolist(), values.tolist(), strict=True)
    return TokenLogprob(
        TokenId(chosen),
        float(logprobs[chosen]),
        tuple((TokenId(token), value) for token, value in top),
    )
