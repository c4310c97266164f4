"""Finds and encodes the logprobs of an answer's text. The answer also has logprobs of tokens that
belong to reasoning, tool calls or markup."""

from collections.abc import Sequence
from typing import Any

from baton.core.ids import TokenId
from baton.text.tokenizer import Tokenizer
from router.openai.token_entry import MIN_LOGPROB, TokenEntry


class TextLogprobs:
    """Collects an answer's tokens, and finds the tokens that a piece of its text consists of. The
    pieces must be taken in their order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[tuple[TokenEntry | None, bytes]] = []
        """The tokens that were not taken yet. The first one may be the rest of a taken token, which
        has no entry any more."""

    def add(self, entries: Sequence[TokenEntry]) -> None:
        self._tokens += [
            (entry, self._tokenizer.token_bytes(entry.logprob.token_id)) for entry in entries
        ]

    def take(self, text: str, *, newest: bool) -> list[dict[str, Any]]:
        """Return the logprobs of the text's tokens, and drop these tokens and all earlier ones. If
        ``newest`` is True, the text is searched for from the end of the tokens, else from the
        beginning. If it is not found, for example because the model wrote invalid UTF-8, drop all
        tokens."""
        tokens, wanted = self._tokens, text.encode(errors="replace")
        data = b"".join(piece for _, piece in tokens)
        start = data.rfind(wanted) if newest else data.find(wanted)
        end = start + len(wanted) if start >= 0 else len(data)
        taken: list[TokenEntry] = []
        self._tokens = []
        offset = 0
        for entry, piece in tokens:
            piece_end = offset + len(piece)
            if entry is not None and offset < end and piece_end > start >= 0:
                taken.append(entry)
            if piece_end > end:
                rest = (entry, piece) if offset >= end else (None, piece[end - offset :])
                self._tokens.append(rest)
            offset = piece_end
        return [self._encode(entry) for entry in taken]

    def _encode(self, entry: TokenEntry) -> dict[str, Any]:
        top = [self._encode_token(*pair) for pair in entry.logprob.top]
        chosen = self._encode_token(entry.logprob.token_id, entry.logprob.logprob)
        return {**chosen, "top_logprobs": top}

    def _encode_token(self, token_id: TokenId, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {
            "token": data.decode(errors="replace"),
            "bytes": list(data),
            "logprob": max(logprob, MIN_LOGPROB),
        }
