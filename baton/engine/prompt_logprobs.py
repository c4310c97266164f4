"""Prompt logprobs: the log-probability of each prompt token, given all tokens before it."""

from collections.abc import Sequence

import torch

from baton.core.ids import TokenId
from baton.core.request import TokenLogprob
from baton.engine.model import DecoderModel
from baton.engine.plan import Row

LOGITS_CHUNK_TOKENS = 64
"""Number of tokens whose logits are in memory at once. With a vocabulary of 150,000, the logits
take 40 MB, and the logprobs as much again."""

PromptLogprobs = tuple[TokenLogprob, ...]


def prompt_logprobs(
    model: DecoderModel, hidden: torch.Tensor, rows: Sequence[Row], offsets: Sequence[int]
) -> tuple[PromptLogprobs, ...]:
    """Return the logprobs of each row's ``prompt_logprob_targets``. The result is empty if no row
    has any.

    Row i is ``hidden[offsets[i]:offsets[i + 1]]``; ``hidden`` is [num_tokens, hidden_size]."""
    if not any(row.prompt_logprob_targets for row in rows):
        return ()
    return tuple(
        _score_row(model, hidden, first, row) for row, first in zip(rows, offsets, strict=False)
    )


def _score_row(model: DecoderModel, hidden: torch.Tensor, first: int, row: Row) -> PromptLogprobs:
    """Return the logprobs of the row's ``prompt_logprob_targets``. The result is empty if the row
    has none. The row begins at ``hidden[first]``."""
    targets, num_top = row.prompt_logprob_targets, row.sampling.prompt_logprobs or 0
    scores: list[TokenLogprob] = []
    for start in range(0, len(targets), LOGITS_CHUNK_TOKENS):
        part = targets[start : start + LOGITS_CHUNK_TOKENS]
        begin = first + start
        indices = torch.arange(begin, begin + len(part), device=hidden.device)
        scores += token_logprobs(model.logits(hidden, indices), part, num_top)
    return tuple(scores)


def token_logprobs(
    logits: torch.Tensor, tokens: Sequence[TokenId], num_top: int
) -> list[TokenLogprob]:
    """Return the logprob of one token per row of ``logits`` [num_tokens, vocab], together with the
    logprobs of the row's ``num_top`` likeliest tokens."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = torch.tensor(tokens, device=logits.device).unsqueeze(-1)
    values = logprobs.gather(-1, chosen).squeeze(-1).tolist()
    top_values, top_tokens = (part.tolist() for part in logprobs.topk(num_top, dim=-1))
    return [
        TokenLogprob(token, value, tuple(zip(ids, tops, strict=True)))
        for token, value, ids, tops in zip(tokens, values, top_tokens, top_values, strict=True)
    ]
