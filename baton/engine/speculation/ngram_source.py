"""Drafts from what the prompt and the answer have already said."""

from bisect import bisect_right
from collections.abc import Sequence as Seq
from itertools import accumulate, repeat
from operator import mul

from baton.core.ids import TokenId
from baton.engine.sequence import Sequence
from baton.engine.speculation.draft_source import DraftRequest
from baton.engine.speculation.ngram_index import MAX_MATCH_TOKENS, NgramIndex

MAX_INDEXED_TOKENS = 1024
"""Maximum number of tokens that a call of :meth:`NgramSource.observe` indexes, so that a long
prompt does not delay a step by more than half a millisecond. A longer one takes several steps."""

MATCH_LENGTH_LIMITS = (4, 8, MAX_MATCH_TOKENS)
"""Matches are of four kinds, by length: shorter than the first limit, …, at least the last."""

INITIAL_RATES = (0.35, 0.6, 0.8, 0.95)
"""Presumed share of right predictions after matches of each kind, before any was observed: about
what the demo model has on code."""

RATE_WEIGHT = 0.1
"""Weight of the latest prediction in the moving average of a sequence's rate."""

SHARED_RATE_WEIGHT = 0.01
"""The same in the rates of all sequences, with which a new sequence begins."""

MAX_RATE = 0.98
"""Rates count as this at most, so that the chances of a draft's tokens decrease."""


INITIAL_DRAFT_TOKENS = 4
"""Maximum length of a sequence's first draft."""


class NgramState:
    """The index of one sequence's tokens, and how often it predicts the next token rightly.

    Every token of the answer tests the prediction, whether it was drafted or not: so the rates cost
    nothing, and a text that starts to repeat is noticed without a trial."""

    __slots__ = ("index", "max_drafts", "rates", "shared_rates")

    def __init__(self, shared_rates: list[float]) -> None:
        self.index = NgramIndex()
        self.rates = shared_rates.copy()
        self.shared_rates = shared_rates
        self.max_drafts = INITIAL_DRAFT_TOKENS

    def observe(self, token_ids: Seq[TokenId], num_prompt_tokens: int) -> None:
        """Take in the tokens that are new in ``token_ids``. Those of the prompt don't test
        predictions."""
        index = self.index
        known = len(index.tokens)
        if known < num_prompt_tokens:
            end = min(num_prompt_tokens, known + MAX_INDEXED_TOKENS)
            index.extend(token_ids[known:end])
            index.search()
            known = end
            if known < num_prompt_tokens:
                return
        for token_id in token_ids[known : known + MAX_INDEXED_TOKENS]:
            if index.position is not None:
                self._learn(index.tokens[index.position] == token_id)
            index.append(token_id)

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Let drafts grow while all of a draft is right, and shrink when most of it is wrong."""
        if num_accepted == num_drafted:
            self.max_drafts = max(self.max_drafts, 2 * num_drafted)
        elif 2 * num_accepted < num_drafted:
            self.max_drafts = max(1, self.max_drafts // 2)

    def _learn(self, is_right: bool) -> None:
        kind, shared = match_kind(self.index.match_tokens), self.shared_rates
        self.rates[kind] += RATE_WEIGHT * (is_right - self.rates[kind])
        shared[kind] += SHARED_RATE_WEIGHT * (is_right - shared[kind])

    def chances(self, num_tokens: int) -> list[float]:
        """Return the probabilities that the first 1, 2, … ``num_tokens`` predictions are right."""
        if self.index.position is None:
            return []
        rates = [min(rate, MAX_RATE) for rate in self.rates]
        num_tokens = min(num_tokens, self.max_drafts)
        first = self.index.match_tokens
        lengths = range(first, first + num_tokens)
        if first >= MATCH_LENGTH_LIMITS[-1]:
            return list(accumulate(repeat(rates[-1], num_tokens), mul))
        return list(accumulate((rates[match_kind(length)] for length in lengths), mul))


def match_kind(match_tokens: int) -> int:
    """Return the kind of a match of that length (``MATCH_LENGTH_LIMITS``)."""
    return bisect_right(MATCH_LENGTH_LIMITS, match_tokens)


class NgramSource:
    """Implements :class:`baton.engine.speculation.draft_source.DraftSource`."""

    def __init__(self) -> None:
        self._rates = list(INITIAL_RATES)

    def observe(self, sequence: Sequence) -> None:
        state = sequence.draft_state
        if state is None:
            state = sequence.draft_state = NgramState(self._rates)
        state.observe(sequence.token_ids, len(sequence.spec.token_ids))

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        sequence.draft_state.record(num_drafted, num_accepted)

    def chances(self, sequence: Sequence, num_tokens: int) -> Seq[float]:
        state: NgramState | None = sequence.draft_state
        if state is None or len(state.index.tokens) < sequence.num_known_tokens:
            return ()
        return state.chances(num_tokens)

    def draft(self, requests: Seq[DraftRequest]) -> list[tuple[TokenId, ...]]:
        return [each.sequence.draft_state.index.continuation(each.num_tokens) for each in requests]
