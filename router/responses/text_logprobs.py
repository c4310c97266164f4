"""Encodes the logprobs of an answer's text."""

from collections.abc import Sequence
from typing import Any

from baton.core.ids import TokenId
from baton.text.tokenizer import Tokenizer
from router.openai.token_entry import MIN_LOGPROB, TokenEntry


def encode_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [
        {
            **_encode_token(entry.logprob.token_id, entry.logprob.logprob, tokenizer),
            "top_logprobs": [_encode_token(*pair, tokenizer) for pair in entry.logprob.top],
        }
        for entry in entries
    ]


def _encode_token(token_id: TokenId, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode(errors="replace"),
        "bytes": list(data),
        "logprob": max(logprob, MIN_LOGPROB),
    }


def without_bytes(logprob: dict[str, Any]) -> dict[str, Any]:
    """Return a token's logprobs in the form of events, which lack the tokens' bytes."""
    top = [{"token": each["token"], "logprob": each["logprob"]} for each in logprob["top_logprobs"]]
    return {"token": logprob["token"], "logprob": logprob["logprob"], "top_logprobs": top}
