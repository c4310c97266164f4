"""Drafts from what the prompt and the answer have already said."""

from bisect import bisect_right
from collections.abc import Sequence as Seq
from itertools import accumulate, chain, islice, repeat
from operator import mul

from baton.core.ids import TokenId
from baton.engine.sequence import Sequence
from baton.engine.speculation.draft_source import DraftRequest
from baton.engine.speculation.draft_state import MAX_RATE, DraftState
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


INITIAL_DRAFT_TOKENS = 4
"""Maximum length of a sequence's first draft."""


class NgramState(DraftState):
    """The index of one sequence's tokens, and how often it predicts the next token rightly.

    Every token of the answer tests the prediction, whether it was drafted or not: so the rates cost
    nothing, and a text that starts to repeat is noticed without a trial."""

    __slots__ = ("index", "max_drafts", "rates", "shared_rates")

    def __init__(self, shared_rates: list[float]) -> None:
        super().__init__()
        self.index = NgramIndex()
        self.rates = shared_rates.copy()
        self.shared_rates = shared_rates
        self.max_drafts = INITIAL_DRAFT_TOKENS

    def observe(self, token_ids: Seq[TokenId], num_prompt_tokens: int) -> bool:
        """Take in the tokens that are new in ``token_ids``. Return whether these are all; if there
        are more than ``MAX_INDEXED_TOKENS``, call this again. Those of the prompt don't test
        predictions. Of several new tokens, only those up to the first wrong prediction do: the
        others are not searched for, which takes longest."""
        index = self.index
        known = len(index.tokens)
        if known < num_prompt_tokens:
            end = min(num_prompt_tokens, known + MAX_INDEXED_TOKENS)
            index.extend(token_ids[known:end])
            index.search()
            known = end
            if known < num_prompt_tokens:
                return False
        if known < len(token_ids):
            end = min(len(token_ids), known + MAX_INDEXED_TOKENS)
            known = self._follow(token_ids, known, end)
            if known < end:
                index.extend(token_ids[known:end])
            if index.position is None:
                index.search()
        return len(index.tokens) == len(token_ids)

    def _follow(self, token_ids: Seq[TokenId], known: int, end: int) -> int:
        """Index tokens of ``token_ids[known:end]`` up to the first that was not predicted, and
        learn from them. Return the number of tokens that are indexed then."""
        index = self.index
        is_right = index.position is not None
        while is_right and known < end:
            kind = match_kind(index.match_tokens)
            is_right = index.append(token_ids[known])
            self._learn(kind, is_right)
            known += 1
        return known

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Let drafts grow while all of a draft is right, and shrink when most of it is wrong."""
        if num_accepted == num_drafted:
            self.max_drafts = max(self.max_drafts, 2 * num_drafted)
        elif 2 * num_accepted < num_drafted:
            self.max_drafts = max(1, self.max_drafts // 2)

    def _learn(self, kind: int, is_right: bool) -> None:
        rates, shared = self.rates, self.shared_rates
        rates[kind] += RATE_WEIGHT * (is_right - rates[kind])
        shared[kind] += SHARED_RATE_WEIGHT * (is_right - shared[kind])

    def chances(self, num_tokens: int, num_coming: int = 0) -> list[float]:
        """Return the probabilities that the first ``num_coming`` + 1, 2, … predictions are right,
        ``num_tokens`` numbers or fewer."""
        index = self.index
        if index.position is None:
            return []
        rates = [min(rate, MAX_RATE) for rate in self.rates]
        coming = chain((rates[kind] for kind in _KINDS[index.match_tokens :]), repeat(rates[-1]))
        num_predicted = num_coming + min(num_tokens, self.max_drafts)
        return list(accumulate(islice(coming, num_predicted), mul))[num_coming:]


def match_kind(match_tokens: int) -> int:
    """Return the kind of a match of that length (``MATCH_LENGTH_LIMITS``)."""
    return bisect_right(MATCH_LENGTH_LIMITS, match_tokens)


_KINDS = tuple(map(match_kind, range(MAX_MATCH_TOKENS)))
"""The kinds of matches by their length. Those of longer ones are the last."""


class NgramSource:
    """Implements :class:`baton.engine.speculation.draft_source.DraftSource`."""

    def __init__(self) -> None:
        self._rates = list(INITIAL_RATES)

    def observe(self, sequence: Sequence) -> bool:
        state: NgramState | None = sequence.draft_state
        if state is None:
            state = sequence.draft_state = NgramState(self._rates)
        return state.observe(sequence.token_ids, len(sequence.spec.token_ids))

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        sequence.draft_state.record(num_drafted, num_accepted)

    def chances(self, sequence: Sequence, num_tokens: int, num_coming: int) -> Seq[float]:
        state: NgramState | None = sequence.draft_state
        if state is None or len(state.index.tokens) < sequence.num_known_tokens:
            return ()
        return state.chances(num_tokens, num_coming)

    def draft(self, requests: Seq[DraftRequest]) -> list[tuple[TokenId, ...]]:
        return [each.sequence.draft_state.index.continuation(each.num_tokens) for each in requests]
