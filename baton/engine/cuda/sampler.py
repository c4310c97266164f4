"""Sampling where the logits are: a batch at a time, and one transfer of the tokens.

The same tokens as :func:`baton.engine.sampler.sample`, which says what each parameter means. Here
top-k and top-p look at the likeliest ``TOP_WINDOW_TOKENS`` tokens only, so that no vocabulary is
sorted; a row whose choice may lie outside is done again, by itself.
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
"""Tokens: more than most ask for. A row that wants more is right as well, and slower."""


def sample_batch(logits: torch.Tensor, rows: Sequence[Row]) -> list[SampledToken | None]:
    """One token per row, or None where its mask allows none. ``logits`` [num_rows, vocab], FP32."""
    if not rows:
        return []
    scores, barren = apply_masks(logits, [row.mask for row in rows])
    scores = mask_early_ends(scores, rows)
    tokens = _tokens(scores, rows)
    logprobs = _logprobs(logits, rows, tokens)
    return [
        None if index in barren else SampledToken(TokenId(token), logprobs.get(index))
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
    """What rows ask for, [num_rows, 1] each in FP64, and their draws; brought in one transfer.
    ``top_k`` is the vocabulary's size where none is wanted, and ``has_k`` 0."""

    greedy: torch.Tensor
    temperature: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    has_k: torch.Tensor
    top_p: torch.Tensor
    draw: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], like: torch.Tensor) -> "SamplingMetadata":
        params = [row.sampling for row in rows]
        lines = [
            [each.greedy for each in params],
            [each.temperature or 1.0 for each in params],
            [each.min_p for each in params],
            [each.top_k or like.shape[-1] for each in params],
            [each.top_k > 0 for each in params],
            [each.top_p for each in params],
            uniforms([each.seed for each in params], [row.context_tokens for row in rows]),
        ]
        brought = torch.from_numpy(np.array(lines, dtype=np.float64)).to(like.device)
        return cls(*brought.unsqueeze(-1))

    def at(self, lines: torch.Tensor) -> "SamplingMetadata":
        return SamplingMetadata(*(getattr(self, field.name)[lines] for field in fields(self)))


def _choose(scores: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [num_rows], and whether each is sure. ``scores`` [num_rows, vocab] in FP64 are used
    up."""
    dials = SamplingMetadata.of(rows, scores)
    _penalise(scores, rows)
    _add_biases(scores, [row.sampling for row in rows])
    best = scores.argmax(dim=-1)
    chances = (scores / dials.temperature).softmax(dim=-1)
    least = dials.min_p * chances.amax(dim=-1, keepdim=True)
    chances = chances.masked_fill_(chances < least, 0.0)
    picked, is_sure = _pick(chances, dials, [row.sampling for row in rows])
    greedy = dials.greedy.squeeze(-1) > 0
    return torch.where(greedy, best, picked), greedy | is_sure


def _penalise(scores: torch.Tensor, rows: Sequence[Row]) -> None:
    """In place; of rows without penalties nothing changes."""
    lines = [index for index, row in enumerate(rows) if row.sampling.needs_history]
    if not lines:
        return
    some = [rows[index] for index in lines]
    size, place = scores.shape[1], torch.tensor(lines, device=scores.device)
    seen = _counted([row.history for row in some], size, scores) > 0
    counts = _counted([row.history[row.num_prompt_tokens :] for row in some], size, scores)
    params = [row.sampling for row in some]
    factor = _column([each.repetition_penalty for each in params], scores)
    held = scores[place]
    held = torch.where(seen, torch.where(held > 0, held / factor, held * factor), held)
    frequency = _column([each.frequency_penalty for each in params], counts)
    presence = _column([each.presence_penalty for each in params], counts)
    scores[place] = held - frequency * counts - presence * (counts > 0)


def _counted(histories: Sequence[Sequence[int]], size: int, like: torch.Tensor) -> torch.Tensor:
    """How often each row has each token, [num_rows, size] in FP32, which the CPU's penalties are
    multiplied in."""
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
    chances: torch.Tensor, dials: SamplingMetadata, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [num_rows] of ``chances`` [num_rows, vocab], and whether each is sure."""
    filtered = [index for index, each in enumerate(params) if each.top_k or each.top_p < 1]
    if not filtered:
        return _drawn(chances, dials.draw), torch.ones_like(dials.draw[:, 0], dtype=torch.bool)
    if len(filtered) == len(params):
        return _pick_filtered(chances, dials)
    lines = torch.tensor(filtered, device=chances.device)
    tokens = _drawn(chances, dials.draw)
    is_sure = torch.ones_like(tokens, dtype=torch.bool)
    tokens[lines], is_sure[lines] = _pick_filtered(chances[lines], dials.at(lines))
    return tokens, is_sure


def _pick_filtered(
    chances: torch.Tensor, dials: SamplingMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """What top-k and top-p leave is drawn from in the order of the tokens' numbers. A token is sure
    if none is left outside of the window: of those as likely as the window's last, some may be."""
    vocab_size = chances.shape[1]
    window = min(TOP_WINDOW_TOKENS, vocab_size)
    values, names = chances.topk(window, dim=-1)
    names, by_name = names.sort(dim=-1)
    ordered, order = values.gather(1, by_name).sort(dim=-1, descending=True, stable=True)
    kept = _cut(ordered, chances.sum(dim=-1, keepdim=True), dials)
    last = torch.where(kept > 0, ordered, torch.inf).amin(dim=-1)
    places = _drawn(torch.zeros_like(kept).scatter(1, order, kept), dials.draw)
    tokens = names.gather(1, places.unsqueeze(1)).squeeze(1)
    if window == vocab_size:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    within = (dials.has_k[:, 0] == 0) | (dials.top_k[:, 0] <= window)
    return tokens, within & (last > ordered[:, -1])


def _cut(ordered: torch.Tensor, total: torch.Tensor, dials: SamplingMetadata) -> torch.Tensor:
    """Zero where top-k forbids, then where top-p does; the likeliest come first. ``total``
    [num_rows, 1]: of all chances, also those that are not here."""
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    kept = torch.where(ranks < dials.top_k, ordered, 0.0)
    total = torch.where(dials.has_k > 0, kept.sum(dim=-1, keepdim=True), total)
    shares = kept / total
    before = shares.cumsum(dim=-1) - shares
    nucleus = torch.where(before >= dials.top_p, 0.0, shares)
    return torch.where(dials.top_p < 1, nucleus, kept)


def _drawn(chances: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """The inverse of each row's distribution function, in the order that the chances lie in.
    ``draw`` [num_rows, 1]; what rounding puts beyond the end means the last that is possible."""
    reached = chances.cumsum(dim=-1)
    places = torch.searchsorted(reached, draw * reached[:, -1:], right=True)
    numbers = torch.arange(chances.shape[1], device=chances.device)
    last = torch.where(chances > 0, numbers, 0).amax(dim=-1)
    return torch.minimum(places.squeeze(1), last)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1]"""
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _logprobs(
    logits: torch.Tensor, rows: Sequence[Row], tokens: Sequence[int]
) -> dict[int, TokenLogprob]:
    """Of the rows that ask for them, by their index: the model's own."""
    asked = {
        index: row.sampling.logprobs
        for index, row in enumerate(rows)
        if row.sampling.logprobs is not None
    }
    if not asked:
        return {}
    logprobs = logits[torch.tensor(list(asked), device=logits.device)].log_softmax(dim=-1)
    chosen = torch.tensor([[tokens[index]] for index in asked], device=logits.device)
    own = logprobs.gather(1, chosen).squeeze(1).tolist()
    values, names = (part.tolist() for part in logprobs.topk(max(asked.values()), dim=-1))
    found = {}
    for line, (index, num_top) in enumerate(asked.items()):
        top = zip(map(TokenId, names[line]), values[line], strict=True)
        found[index] = TokenLogprob(TokenId(tokens[index]), own[line], tuple(top)[:num_top])
    return found
