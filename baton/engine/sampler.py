"""From logits to tokens. A row's result depends on its own logits, mask and parameters alone."""

from collections.abc import Sequence

import torch

from baton.core.ids import TokenId
from baton.core.philox import uniform
from baton.core.request import SamplingParams, TokenLogprob
from baton.engine.mask import masked
from baton.engine.plan import Row, SampledToken


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[SampledToken | None]:
    """One token per row, or None where its mask allows none. ``logits`` [num_rows, vocab], FP32.

    Masks come before everything else. Reported logprobs are the model's own: before masks,
    penalties, bias and temperature.
    """
    scores, barren = masked(logits, [row.mask for row in rows])
    scores = _kept_going(scores, rows)
    best = scores.argmax(dim=-1).tolist() if any(_is_plain(row.sampling) for row in rows) else []
    sampled: list[SampledToken | None] = []
    for index, row in enumerate(rows):
        if index in barren:
            sampled.append(None)
            continue
        chosen = best[index] if _is_plain(row.sampling) else _choose(scores[index], row)
        sampled.append(_sampled(logits[index], row, chosen))
    return sampled


def _kept_going(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """With minus infinity for what would end an answer too early. What is given is not changed."""
    if not any(row.too_early for row in rows):
        return logits
    held, vocab_size = logits.clone(), logits.shape[-1]
    for index, row in enumerate(rows):
        held[index, [token for token in row.too_early if token < vocab_size]] = -torch.inf
    return held


def _is_plain(params: SamplingParams) -> bool:
    """Whether the likeliest token as it stands is the answer."""
    return params.greedy and not params.needs_history and not params.logit_bias


def _sampled(logits: torch.Tensor, row: Row, chosen: int) -> SampledToken:
    if row.sampling.logprobs is None:
        return SampledToken(TokenId(chosen))
    return SampledToken(TokenId(chosen), _logprob(logits, chosen, row.sampling.logprobs))


def _choose(logits: torch.Tensor, row: Row) -> int:
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
    draw = uniform(params.seed, row.context_tokens) * reached[-1]
    return int(torch.searchsorted(reached, draw, right=True).clamp(max=_last_possible(chances)))


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
    ordered, order = chances.sort(descending=True, stable=True)
    if 0 < params.top_k < len(ordered):
        ordered[params.top_k :] = 0
    if params.top_p < 1:
        ordered = ordered / ordered.sum()
        before = ordered.cumsum(dim=0) - ordered
        ordered[before >= params.top_p] = 0
    return torch.zeros_like(chances).scatter(0, order, ordered)


def _logprob(logits: torch.Tensor, chosen: int, num_top: int) -> TokenLogprob:
    logprobs = logits.log_softmax(dim=-1)
    values, tokens = logprobs.topk(num_top)
    top = zip(tokens.tolist(), values.tolist(), strict=True)
    return TokenLogprob(
        TokenId(chosen),
        float(logprobs[chosen]),
        tuple((TokenId(token), value) for token, value in top),
    )
