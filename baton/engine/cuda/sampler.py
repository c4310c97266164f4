"""Samples tokens on the GPU, a batch at a time, with one transfer of the tokens to the host.

It samples the same tokens as :func:`baton.engine.sampler.sample`, which documents the parameters.
Here, top-k and top-p consider only the likeliest ``TOP_WINDOW_TOKENS`` tokens (the window), so that
the whole vocabulary need not be sorted. A row whose token may lie outside of the window is sampled
again, by itself and from the whole vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from baton.core.ids import TokenId
from baton.core.request import SamplingParams, TokenLogprob
from baton.engine.mask import apply_masks
from baton.engine.philox_batch import uniforms
from baton.engine.plan import Row, SampledToken
from baton.engine.sampler import choose_token, is_plain_greedy, mask_early_ends

TOP_WINDOW_TOKENS = 1024
"""Number of the likeliest tokens that are considered, which is more than most values of top-k. A
row that needs more of them is also sampled correctly, but more slowly."""


def sample_batch(logits: torch.Tensor, rows: Sequence[Row]) -> list[SampledToken | None]:
    """Sample one token per row of ``logits`` [num_rows, vocab], which are in FP32. The result has
    None for a row whose mask allows no token."""
    if not rows:
        return []
    scores, empty_rows = apply_masks(logits, [row.mask for row in rows])
    scores = mask_early_ends(scores, rows)
    tokens = _tokens(scores, rows)
    logprobs = _logprobs(logits, rows, tokens)
    return [
        None if index in empty_rows else SampledToken(TokenId(token), logprobs.get(index))
        for index, token in enumerate(tokens)
    ]


def _tokens(scores: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    best = scores.argmax(dim=-1)
    others = [index for index, row in enumerate(rows) if not is_plain_greedy(row.sampling)]
    if not others:
        return list(map(int, best.tolist()))
    lines = torch.tensor(others, device=scores.device)
    chosen, is_sure = _choose(scores[lines].double(), [rows[index] for index in others])
    both = torch.stack((best.index_copy(0, lines, chosen), torch.ones_like(best)))
    both[1] = both[1].index_copy(0, lines, is_sure.long())
    tokens, sure = both.tolist()
    for index in others:
        if not sure[index]:
            tokens[index] = choose_token(scores[index], rows[index])
    return list(map(int, tokens))


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The rows' sampling parameters and random draws, each [num_rows, 1] in FP64. They are copied
    to the device in one transfer. In a row without top-k, ``top_k`` is the size of the vocabulary,
    and ``has_top_k`` is 0."""

    greedy: torch.Tensor
    temperature: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    has_top_k: torch.Tensor
    top_p: torch.Tensor
    draw: torch.Tensor

    @classmethod
    def from_rows(cls, rows: Sequence[Row], like: torch.Tensor) -> "SamplingMetadata":
        params = [row.sampling for row in rows]
        lines = [
            [each.is_greedy for each in params],
            [each.temperature or 1.0 for each in params],
            [each.min_p for each in params],
            [each.top_k or like.shape[-1] for each in params],
            [each.top_k > 0 for each in params],
            [each.top_p for each in params],
            uniforms([each.seed for each in params], [row.context_tokens for row in rows]),
        ]
        columns = torch.from_numpy(np.array(lines, dtype=np.float64)).to(like.device)
        return cls(*columns.unsqueeze(-1))

    def select(self, lines: torch.Tensor) -> "SamplingMetadata":
        return SamplingMetadata(*(getattr(self, field.name)[lines] for field in fields(self)))


def _choose(scores: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [num_rows], and whether each is certain (see :func:`_pick_filtered`). This
    overwrites ``scores`` [num_rows, vocab] in FP64."""
    metadata = SamplingMetadata.from_rows(rows, scores)
    _penalise(scores, rows)
    _add_biases(scores, [row.sampling for row in rows])
    best = scores.argmax(dim=-1)
    probs = (scores / metadata.temperature).softmax(dim=-1)
    least = metadata.min_p * probs.amax(dim=-1, keepdim=True)
    probs = probs.masked_fill_(probs < least, 0.0)
    picked, is_sure = _pick(probs, metadata, [row.sampling for row in rows])
    greedy = metadata.greedy.squeeze(-1) > 0
    return torch.where(greedy, best, picked), greedy | is_sure


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


def _pick(
    probs: torch.Tensor, metadata: SamplingMetadata, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens [num_rows] from ``probs`` [num_rows, vocab]. Return them, and whether each is
    certain (see :func:`_pick_filtered`)."""
    filtered = [index for index, each in enumerate(params) if each.top_k or each.top_p < 1]
    if not filtered:
        return _invert_distribution(probs, metadata.draw), torch.ones_like(
            metadata.draw[:, 0], dtype=torch.bool
        )
    if len(filtered) == len(params):
        return _pick_filtered(probs, metadata)
    lines = torch.tensor(filtered, device=probs.device)
    tokens = _invert_distribution(probs, metadata.draw)
    is_sure = torch.ones_like(tokens, dtype=torch.bool)
    tokens[lines], is_sure[lines] = _pick_filtered(probs[lines], metadata.select(lines))
    return tokens, is_sure


def _pick_filtered(
    probs: torch.Tensor, metadata: SamplingMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from those of the likeliest ``TOP_WINDOW_TOKENS`` tokens (the window) that top-k and
    top-p keep, in the order of token ids. Return the sampled tokens, and whether each is certain.
    It is uncertain if tokens outside of the window may have to be kept, too: if top-k is larger
    than the window, or if a kept token is no likelier than the window's last one, since tokens
    outside of the window may then be as likely as the kept one."""
    vocab_size = probs.shape[1]
    window = min(TOP_WINDOW_TOKENS, vocab_size)
    values, token_ids = probs.topk(window, dim=-1)
    token_ids, by_token_id = token_ids.sort(dim=-1)
    ordered, order = values.gather(1, by_token_id).sort(dim=-1, descending=True, stable=True)
    kept = _filter(ordered, probs.sum(dim=-1, keepdim=True), metadata)
    last = torch.where(kept > 0, ordered, torch.inf).amin(dim=-1)
    places = _invert_distribution(torch.zeros_like(kept).scatter(1, order, kept), metadata.draw)
    tokens = token_ids.gather(1, places.unsqueeze(1)).squeeze(1)
    if window == vocab_size:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    k_fits = (metadata.has_top_k[:, 0] == 0) | (metadata.top_k[:, 0] <= window)
    return tokens, k_fits & (last > ordered[:, -1])


def _filter(ordered: torch.Tensor, total: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Set to zero the probabilities that top-k excludes, then those that top-p excludes.
    ``ordered`` has the probabilities of the window's tokens (see :func:`_pick_filtered`), in
    descending order. ``total`` [num_rows, 1] is the sum of the probabilities of all tokens, in the
    window or not."""
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    kept = torch.where(ranks < metadata.top_k, ordered, 0.0)
    total = torch.where(metadata.has_top_k > 0, kept.sum(dim=-1, keepdim=True), total)
    shares = kept / total
    before = shares.cumsum(dim=-1) - shares
    nucleus = torch.where(before >= metadata.top_p, 0.0, shares)
    return torch.where(metadata.top_p < 1, nucleus, kept)


def _invert_distribution(probs: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """Invert each row's cumulative distribution at ``draw`` [num_rows, 1], in the order of
    ``probs``. If rounding puts a draw beyond the end, the result is the last token with a
    probability above 0."""
    cumulative = probs.cumsum(dim=-1)
    places = torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True)
    numbers = torch.arange(probs.shape[1], device=probs.device)
    last = torch.where(probs > 0, numbers, 0).amax(dim=-1)
    return torch.minimum(places.squeeze(1), last)


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
