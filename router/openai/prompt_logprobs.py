"""Logprobs of a prompt's own tokens, in the formats that clients expect."""

import math
from collections.abc import Sequence
from typing import Any

from baton.core.ids import TokenId
from baton.core.request import TokenLogprob
from baton.text.tokenizer import Tokenizer
from router.openai.token_entry import MIN_LOGPROB, TokenEntry


def build_prompt_token_entries(
    token_ids: Sequence[TokenId], tokenizer: Tokenizer, scores: Sequence[TokenLogprob]
) -> tuple[TokenEntry, ...]:
    """Build one entry per prompt token. The first entry has no logprob, since nothing precedes its
    token. Returns an empty tuple if the worker sent logprobs for a different number of tokens."""
    if len(scores) + 1 != len(token_ids):
        return ()
    detokenizer, offset = tokenizer.make_detokenizer(), 0
    entries: list[TokenEntry] = []
    for score in (TokenLogprob(token_ids[0], math.nan), *scores):
        entries.append(TokenEntry(score, offset))
        offset += len(detokenizer.push((score.token_id,)))
    return tuple(entries)


def encode_vllm_prompt_logprobs(
    entries: Sequence[TokenEntry], tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """Encode vLLM's field ``prompt_logprobs``: for each position, the prompt's token and the
    likeliest tokens, by id. The rank of the prompt's token is null unless it is among the
    likeliest."""
    return [None if entry.is_first else _by_id(entry.logprob, tokenizer) for entry in entries]


def _by_id(score: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(score.top, 1)]
    return {
        str(token_id): {
            "logprob": max(value, MIN_LOGPROB),
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token_id).decode(errors="replace"),
        }
        for token_id, value, rank in [(score.token_id, score.logprob, None), *ranked]
    }
