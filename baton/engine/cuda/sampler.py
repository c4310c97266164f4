"""Samples tokens on the GPU, a batch at a time. The tokens stay there, for the next step, and are
copied to the host.

It samples the same tokens as :func:`baton.engine.sampler.sample`, which documents the parameters.
Sums have another order here, so that a draw, or top-p, within 1e-15 of the border between two
tokens may give the neighbouring token.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from baton.core.ids import RequestId, TokenId
from baton.core.request import SamplingParams, TokenLogprob
from baton.engine.cuda.token_chooser import (
    CHUNK_TOKENS,
    RowTable,
    choose_tokens,
    upload_tables,
)
from baton.engine.mask import apply_masks
from baton.engine.plan import Row, SampledToken
from baton.engine.sampler import is_plain_greedy, mask_early_ends
from baton.engine.upload import upload, upload_integers


class LaunchedSampling:
    """Implements :class:`baton.engine.launched_step.SampledBatch`. ``logprobs`` are those of the
    rows that request them. Everything is copied to pinned memory on the host, in the order of the
    current stream."""

    def __init__(
        self,
        tokens: torch.Tensor,
        empty_rows: Collection[int],
        logprobs: "RequestedLogprobs | None",
    ) -> None:
        self.tokens = tokens
        self._empty_rows = empty_rows
        self._logprobs = logprobs
        self._on_host = _download(tokens)
        self._done: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> list[SampledToken | None]:
        if self._done is not None:
            self._done.synchronize()
        tokens: list[int] = self._on_host.tolist()
        logprobs = {} if self._logprobs is None else self._logprobs.by_row(tokens)
        return [
            None if index in self._empty_rows else SampledToken(TokenId(token), logprobs.get(index))
            for index, token in enumerate(tokens)
        ]


def launch_sampling(
    logits: torch.Tensor, rows: Sequence[Row], chunk_tokens: int = CHUNK_TOKENS
) -> LaunchedSampling:
    """Sample one token per row of ``logits`` [num_rows, vocab], which are in FP32, without waiting
    for the device. ``chunk_tokens`` is for tests."""
    if not rows:
        return LaunchedSampling(logits.new_empty(0, dtype=torch.int32), (), None)
    scores, empty_rows = apply_masks(logits, [row.mask for row in rows])
    scores = mask_early_ends(scores, rows)
    tokens = _tokens(scores, rows, chunk_tokens)
    return LaunchedSampling(tokens, empty_rows, RequestedLogprobs.of(logits, rows, tokens))


def sample_batch(
    logits: torch.Tensor, rows: Sequence[Row], chunk_tokens: int = CHUNK_TOKENS
) -> list[SampledToken | None]:
    """Like :func:`launch_sampling`, but wait for the result. It has None for a row whose mask
    allows no token."""
    return launch_sampling(logits, rows, chunk_tokens).wait()


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Compile the kernels. Without this call, the first requests that need them wait for it."""
    params = SamplingParams(1, top_p=0.5)
    rows = [
        Row(RequestId(""), (TokenId(0),), 0, (), sample=True, sampling=each)
        for each in (params, replace(params, logit_bias=((TokenId(0), 1.0),)))
    ]
    sample_batch(torch.zeros(len(rows), vocab_size, device=device), rows)


def _tokens(scores: torch.Tensor, rows: Sequence[Row], chunk_tokens: int) -> torch.Tensor:
    """Return the chosen tokens [num_rows] in int32, on the device of ``scores``."""
    if all(is_plain_greedy(row.sampling) for row in rows):
        return scores.argmax(dim=-1).to(torch.int32)
    groups = list(_groups(scores, rows))
    entries = upload_tables([group.table for group in groups], scores.device)
    tokens = torch.empty(len(rows), dtype=torch.int32, device=scores.device)
    for group, group_entries in zip(groups, entries, strict=True):
        choose_tokens(group.scores, group.table, group_entries, tokens, chunk_tokens)
    return tokens


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
        changed = scores[upload_integers(adjusted, scores.device)].double()
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
    size, indices = scores.shape[1], upload_integers(lines, scores.device)
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
    index = upload_integers(places, like.device)
    return flat.scatter_add_(0, index, torch.ones_like(index, dtype=flat.dtype)).view(-1, size)


def _add_biases(scores: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    size = scores.shape[1]
    places = [i * size + token for i, each in enumerate(params) for token, _ in each.logit_bias]
    if places:
        biases = [bias for each in params for _, bias in each.logit_bias]
        index = upload_integers(places, scores.device)
        added = upload(torch.tensor(biases, dtype=torch.float64), scores.device)
        scores.view(-1).index_add_(0, index, added)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return ``values`` as a column [num_rows, 1]."""
    return upload(torch.tensor(values, dtype=like.dtype), like.device).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class RequestedLogprobs:
    """The model's own logprobs for the rows that request them, on the host once the device has
    copied them. ``num_top`` maps the index of each such row to the number of likeliest tokens that
    it requests. ``chosen`` [num_requested] are the logprobs of the sampled tokens, and
    ``top_values`` and ``top_tokens`` [num_requested, most] those of the likeliest."""

    num_top: Mapping[int, int]
    chosen: torch.Tensor
    top_values: torch.Tensor
    top_tokens: torch.Tensor

    @classmethod
    def of(
        cls, logits: torch.Tensor, rows: Sequence[Row], tokens: torch.Tensor
    ) -> "RequestedLogprobs | None":
        """Compute the logprobs of the sampled ``tokens`` [num_rows], which are on the device of
        ``logits``. Return None if no row requests any."""
        num_top = {
            index: row.sampling.logprobs
            for index, row in enumerate(rows)
            if row.sampling.logprobs is not None
        }
        if not num_top:
            return None
        indices = upload_integers(list(num_top), logits.device)
        logprobs = logits[indices].log_softmax(dim=-1)
        chosen = logprobs.gather(1, tokens[indices].long().unsqueeze(1)).squeeze(1)
        parts = (chosen, *logprobs.topk(max(num_top.values()), dim=-1))
        return cls(num_top, *map(_download, parts))

    def by_row(self, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """Return the logprobs by the index of the row. ``tokens`` are the sampled tokens of all
        rows."""
        chosen, values, token_ids = (
            part.tolist() for part in (self.chosen, self.top_values, self.top_tokens)
        )
        results = {}
        for line, (index, num_top) in enumerate(self.num_top.items()):
            pairs = zip(map(TokenId, token_ids[line]), values[line], strict=True)
            top = tuple(pairs)[:num_top]
            results[index] = TokenLogprob(TokenId(tokens[index]), chosen[line], top)
        return results


def _download(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` on the host. The copy from a GPU is asynchronous: its target may be read
    once the device has done all work of the current stream up to now."""
    if tensor.device.type != "cuda":
        return tensor
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)
