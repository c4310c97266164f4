"""Samples tokens on the GPU, a batch at a time, with one transfer of the tokens to the host.

It samples the same tokens as :func:`baton.engine.sampler.sample`, which documents the parameters.
Sums have another order here, so that a draw, or top-p, within 1e-15 of the border between two
tokens may give the neighbouring token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from baton.core.ids import RequestId, TokenId
from baton.core.request import SamplingParams, TokenLogprob
from baton.engine.cuda.token_chooser import (
    CHUNK_TOKENS,
    RowTable,
    choose_tokens,
    upload,
)
from baton.engine.mask import apply_masks
from baton.engine.plan import Row, SampledToken
from baton.engine.sampler import is_plain_greedy, mask_early_ends


def sample_batch(
    logits: torch.Tensor, rows: Sequence[Row], chunk_tokens: int = CHUNK_TOKENS
) -> list[SampledToken | None]:
    """Sample one token per row of ``logits`` [num_rows, vocab], which are in FP32. The result has
    None for a row whose mask allows no token. ``chunk_tokens`` is for tests."""
    if not rows:
        return []
    scores, empty_rows = apply_masks(logits, [row.mask for row in rows])
    scores = mask_early_ends(scores, rows)
    tokens = _tokens(scores, rows, chunk_tokens)
    logprobs = _logprobs(logits, rows, tokens)
    return [
        None if index in empty_rows else SampledToken(TokenId(token), logprobs.get(index))
        for index, token in enumerate(tokens)
    ]


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Compile the kernels. Without this call, the first requests that need them wait for it."""
    params = SamplingParams(1, top_p=0.5)
    rows = [
        Row(RequestId(""), (TokenId(0),), 0, (), sample=True, sampling=each)
        for each in (params, replace(params, logit_bias=((TokenId(0), 1.0),)))
    ]
    sample_batch(torch.zeros(len(rows), vocab_size, device=device), rows)


def _tokens(scores: torch.Tensor, rows: Sequence[Row], chunk_tokens: int) -> list[int]:
    if all(is_plain_greedy(row.sampling) for row in rows):
        best: list[int] = scores.argmax(dim=-1).tolist()
        return best
    groups = list(_groups(scores, rows))
    entries = upload([group.table for group in groups], scores.device)
    tokens = torch.empty(len(rows), dtype=torch.int32, device=scores.device)
    for group, group_entries in zip(groups, entries, strict=True):
        choose_tokens(group.scores, group.table, group_entries, tokens, chunk_tokens)
    chosen: list[int] = tokens.tolist()
    return chosen


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows whose scores are in one tensor."""

    scores: torch.Tensor
    table: RowTable


def _groups(scores: torch.Tensor, rows: Sequence[Row]) -> Iterator[_Group]:
    """Yield the rows without penalties and biases, whose scores are the logits in FP32, and those
    with some, whose scores are in FP64."""
    is_adjusted = [row.sampling.needs_history or row.sampling.logit_bias for row in rows]
    adjusted = [index for index, flag in enumerate(is_adjusted) if flag]
    others = [index for index, flag in enumerate(is_adjusted) if not flag]
    size = scores.shape[1]
    if others:
        plain_rows = [rows[index] for index in others]
        yield _Group(scores, RowTable.from_rows(plain_rows, others, others, size))
    if adjusted:
        adjusted_rows = [rows[index] for index in adjusted]
        changed = scores[torch.tensor(adjusted, device=scores.device)].double()
        _penalise(changed, adjusted_rows)
        _add_biases(changed, [row.sampling for row in adjusted_rows])
        indices = range(len(adjusted))
        yield _Group(changed, RowTable.from_rows(adjusted_rows, indices, adjusted, size))


def _penalise(scores: torch.Tensor, rows: Sequence[Row]) -> None:
    """Apply penalties in place, to the rows that have any."""
    lines = [index for index, row in enumerate(rows) if row.sampling.needs_history]
    if not lines:
        return
    penalised = [rows[index] for index in lines]
    size, indices = scores.shape[1], torch.tensor(lines, device=scores.device)
    seen = _counted([row.history for row in penalised], size, scores) > 0
    counts = _counted([row.history[row.num_prompt_tokens :] for row in penalised], size, scores)
    params = [row.sampling for row in penalised]
    factor = _column([each.repetition_penalty for each in params], scores)
    part = scores[indices]
    part = torch.where(seen, torch.where(part > 0, part / factor, part * factor), part)
    frequency = _column([each.frequency_penalty for each in params], counts)
    presence = _column([each.presence_penalty for each in params], counts)
    scores[indices] = part - frequency * counts - presence * (counts > 0)


def _counted(histories: Sequence[Sequence[int]], size: int, like: torch.Tensor) -> torch.Tensor:
    """Return how often each of the ``size`` tokens of the vocabulary occurs in each of
    ``histories``, [num_rows, size], on the device of ``like``. The counts are in FP32, because
    :mod:`baton.engine.sampler` also multiplies counts by penalties in FP32."""
    places = [line * size + token for line, tokens in enumerate(histories) for token in tokens]
    flat = torch.zeros(len(histories) * size, dtype=torch.float32, device=like.device)
    index = torch.tensor(places, dtype=torch.int64, device=like.device)
    return flat.scatter_add_(0, index, torch.ones_like(index, dtype=flat.dtype)).view(-1, size)


def _add_biases(scores: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    size = scores.shape[1]
    places = [i * size + token for i, each in enumerate(params) for token, _ in each.logit_bias]
    if places:
        biases = [bias for each in params for _, bias in each.logit_bias]
        index = torch.tensor(places, device=scores.device)
        scores.view(-1).index_add_(0, index, torch.tensor(biases, device=scores.device).double())


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return ``values`` as a column [num_rows, 1]."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _logprobs(
    logits: torch.Tensor, rows: Sequence[Row], tokens: Sequence[int]
) -> dict[int, TokenLogprob]:
    """Return the model's own logprobs for the rows that request them, by row index."""
    requested = {
        index: row.sampling.logprobs
        for index, row in enumerate(rows)
        if row.sampling.logprobs is not None
    }
    if not requested:
        return {}
    logprobs = logits[torch.tensor(list(requested), device=logits.device)].log_softmax(dim=-1)
    chosen = torch.tensor([[tokens[index]] for index in requested], device=logits.device)
    chosen_logprobs = logprobs.gather(1, chosen).squeeze(1).tolist()
    num_top_max = max(requested.values())
    values, token_ids = (part.tolist() for part in logprobs.topk(num_top_max, dim=-1))
    results = {}
    for line, (index, num_top) in enumerate(requested.items()):
        pairs = zip(map(TokenId, token_ids[line]), values[line], strict=True)
        top = tuple(pairs)[:num_top]
        results[index] = TokenLogprob(TokenId(tokens[index]), chosen_logprobs[line], top)
    return results
