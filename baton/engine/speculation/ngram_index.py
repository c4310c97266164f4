"""Finds where a text has already had its last tokens (prompt lookup, after Saxena 2023, with the
hash chains of LZ77 compressors)."""

from array import array
from collections.abc import Sequence

from baton.core.ids import TokenId

NGRAM_TOKENS = 3
"""Number of equal tokens that make a match. Matches of two tokens are mostly accidental."""

MAX_MATCH_TOKENS = 16
"""Maximum length of a match that is looked at: a longer one hardly predicts better."""

MAX_CANDIDATES = 8
"""Maximum number of earlier occurrences of an n-gram that are compared, the latest first."""

_TOKEN_BITS = 21
_NGRAM_MASK = (1 << _TOKEN_BITS * NGRAM_TOKENS) - 1


class NgramIndex:
    """A growing text, and the continuation of the earlier place that resembles its end most.

    Appending a token takes constant time, and a search at most ``MAX_CANDIDATES`` comparisons of
    ``MAX_MATCH_TOKENS`` tokens, whatever the length of the text. ``position`` is the index of the
    token that followed the matching place, or None without a match; ``match_tokens`` is the length
    of the match, up to ``MAX_MATCH_TOKENS``. Memory: some 150 bytes per token.
    """

    __slots__ = ("_latest", "_ngram", "_previous", "match_tokens", "position", "tokens")

    def __init__(self) -> None:
        self.tokens: list[TokenId] = []
        self.position: int | None = None
        self.match_tokens = 0
        self._ngram = 0
        # The end (exclusive) of each n-gram's latest occurrence, and for each end the one before.
        self._latest: dict[int, int] = {}
        self._previous = array("l")

    def extend(self, token_ids: Sequence[TokenId]) -> None:
        """Append tokens. Does not search; call :meth:`search` afterwards."""
        latest, find, link, ngram = (
            self._latest,
            self._latest.get,
            self._previous.append,
            self._ngram,
        )
        end = len(self.tokens)
        self.tokens += token_ids
        for token_id in token_ids:
            ngram = (ngram << _TOKEN_BITS | token_id) & _NGRAM_MASK
            end += 1
            if end >= NGRAM_TOKENS:
                link(find(ngram, 0))
                latest[ngram] = end
            else:
                link(0)
        self._ngram = ngram
        self.position = None
        self.match_tokens = 0

    def append(self, token_id: TokenId) -> bool:
        """Append a token. Return True if it continues the current match, which is then kept.
        Otherwise there is no match any more; call :meth:`search` afterwards."""
        position, length = self.position, self.match_tokens
        is_continued = position is not None and self.tokens[position] == token_id
        self.extend((token_id,))
        if is_continued:
            assert position is not None
            self.position, self.match_tokens = position + 1, min(length + 1, MAX_MATCH_TOKENS)
        return is_continued

    def search(self) -> None:
        """Set the match: of the latest ``MAX_CANDIDATES`` occurrences of the last ``NGRAM_TOKENS``
        tokens, the one with the most equal tokens before it; of several, the latest."""
        tokens, end = self.tokens, len(self.tokens)
        self.position, self.match_tokens = None, 0
        candidate = self._previous[end - 1] if end else 0
        for _ in range(MAX_CANDIDATES):
            if not candidate:
                return
            length, most = NGRAM_TOKENS, min(candidate, MAX_MATCH_TOKENS)
            while length < most and tokens[candidate - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > self.match_tokens:
                self.position, self.match_tokens = candidate, length
                if length == MAX_MATCH_TOKENS:
                    return
            candidate = self._previous[candidate - 1]

    def continuation(self, num_tokens: int) -> tuple[TokenId, ...]:
        """Return the ``num_tokens`` tokens that followed the matching place. Where they reach the
        end of the text, they repeat, as the text would. Empty without a match."""
        if self.position is None:
            return ()
        found = self.tokens[self.position : self.position + num_tokens]
        period = len(found)
        while len(found) < num_tokens:
            found += found[: num_tokens - len(found)] if period else ()
        return tuple(found)
