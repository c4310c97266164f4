"""Speculative decoding of one engine: which tokens of which answers are drafted in each step."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from baton.core.ids import TokenId
from baton.core.task import Task
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.plan import Row
from baton.engine.result import StepWork
from baton.engine.sequence import Sequence
from baton.engine.speculation.draft_source import DraftRequest, DraftSource
from baton.engine.speculation.draft_state import DraftState
from baton.engine.speculation.verify_costs import VerifyCosts

MIN_GAIN = 1.05
"""Nothing is drafted unless it is predicted to raise the tokens per second at least by this
factor, since predictions are not exact."""

PredictSeconds = Callable[[int, int], Seq[float]]
"""Returns the seconds of steps of so many answers with 0, 1, … max_drafts drafts."""


@dataclass(frozen=True, slots=True)
class DraftDecision:
    """``lengths`` has the number of tokens to draft for each answer; it is empty if nothing is
    drafted. ``gain`` is the predicted ratio of the tokens per second with and without these
    drafts."""

    lengths: tuple[int, ...]
    gain: float = 1.0

    @property
    def num_drafts(self) -> int:
        return sum(self.lengths)


NO_DRAFTS = DraftDecision(())


def choose_draft_lengths(
    chances: Seq[Seq[float]],
    predict_seconds: PredictSeconds,
    *,
    max_drafts: int,
    min_gain: float = MIN_GAIN,
) -> DraftDecision:
    """Choose the draft lengths with the most tokens per second. Draft nothing if the gain would be
    below ``min_gain``.

    ``chances[i][j]`` is the probability that the first j + 1 drafts of answer i are right,
    decreasing in j. A step yields one token per answer and the drafts that are right, so drafts are
    considered in the order of their chances: of the first n, for each n up to ``max_drafts``, the
    expected number of tokens is divided by the seconds of a step with that many tokens."""
    num_answers = len(chances)
    most = num_answers + sum(map(sum, chances))
    if most < min_gain * num_answers:  # even if drafts cost nothing
        return NO_DRAFTS
    drafts = [
        (-chance, depth, answer)
        for answer, each in enumerate(chances)
        for depth, chance in enumerate(each, 1)
    ]
    if not drafts or max_drafts < 1:
        return NO_DRAFTS
    drafts.sort()
    del drafts[max_drafts:]
    seconds = predict_seconds(num_answers, len(drafts))
    plain = best = num_answers / seconds[0]
    num_best, expected = 0, float(num_answers)
    for count, (chance, _, _) in enumerate(drafts, 1):
        expected -= chance
        rate = expected / seconds[count]
        if rate > best:
            best, num_best = rate, count
    if best < min_gain * plain:
        return NO_DRAFTS
    lengths = [0] * num_answers
    for _, depth, answer in drafts[:num_best]:
        lengths[answer] = max(lengths[answer], depth)
    return DraftDecision(tuple(lengths), best / plain)


MIN_GAIN_TO_WAIT = 1.25
"""With async scheduling, the next step is planned ahead unless drafts are predicted to raise the
tokens per second at least by this factor: what planning ahead saves is lost for sure."""

PROMISING_CHANCE = 0.5
"""A sequence whose next draft is right with at least this probability is looked at again at its
next token, even if no draft pays now."""


class Speculator:
    """Drafts tokens for the next step, where measurements say that it pays. ``eos_token_ids`` end
    an answer unless it ignores them. Blocks for drafts come from ``pool``."""

    def __init__(
        self,
        source: DraftSource,
        pool: BlockPool,
        config: EngineConfig,
        eos_token_ids: frozenset[TokenId],
    ) -> None:
        self.num_drafted = 0
        """Drafted tokens since the start."""
        self.num_accepted = 0
        """Drafted tokens that became part of an answer."""
        self._source = source
        self._pool = pool
        self._config = config
        self._eos_token_ids = eos_token_ids
        self._costs = VerifyCosts()
        self._num_decisions = 0
        self._period = 1

    def record_step(self, work: StepWork) -> None:
        """Record the measured duration of a step."""
        if work.is_decode:
            self._costs.record(work.num_tokens, work.seconds)

    def record_verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Record how many of a sequence's drafts were right."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self._source.record(sequence, num_drafted, num_accepted)
        state: DraftState = sequence.draft_state
        if num_accepted:
            state.reset()
        else:
            state.count_fruitless()

    def wants_to_draft(self, sequences: Seq[Sequence]) -> bool:
        """Whether it looks as if it pays to draft tokens for these sequences as soon as their next
        tokens are known, rather than to plan the next step before."""
        return self._decide(sequences, 1).num_drafts > 0

    def add_drafts(self, sequences: Seq[Sequence], rows: list[Row]) -> list[Row]:
        """Return ``rows``, those of ``sequences`` in a step that only decodes, with the drafts that
        pay."""
        drafts = self._draft(sequences)
        if not drafts:
            return rows
        return [
            each.make_draft_row(drafts[each])
            if each in drafts and self._allocate(each, len(drafts[each]))
            else row
            for each, row in zip(sequences, rows, strict=True)
        ]

    def _allocate(self, sequence: Sequence, num_drafts: int) -> bool:
        """Make sure that a sequence has blocks for its next token and for drafts. Return False if
        they would have to come from the watermark, so that drafts don't cause a preemption."""
        end = sequence.num_computed_tokens + 1 + num_drafts
        num_new = self._config.num_blocks_for(end) - len(sequence.block_ids)
        if num_new > 0:
            if not self._pool.can_allocate(num_new + self._config.watermark_blocks):
                return False
            sequence.block_ids += tuple(self._pool.allocate(num_new))
        return True

    def _draft(self, sequences: Seq[Sequence]) -> dict[Sequence, tuple[TokenId, ...]]:
        """Draft tokens for the sequences for which it pays."""
        decision = self._decide(sequences, 0)
        requests = [
            DraftRequest(sequence, length)
            for sequence, length in zip(sequences, decision.lengths, strict=False)
            if length
        ]
        drafts: dict[Sequence, tuple[TokenId, ...]] = {}
        if not requests:
            return drafts
        for request, token_ids in zip(requests, self._source.draft(requests), strict=True):
            token_ids = self._before_end(request.sequence, token_ids)
            if token_ids:
                drafts[request.sequence] = token_ids
        return drafts

    def _decide(self, sequences: Seq[Sequence], num_coming: int) -> DraftDecision:
        """Decide on the lengths of drafts that begin after ``num_coming`` more tokens. Sequences
        without promising drafts are looked at every few decisions only (see :class:`DraftState`);
        if that is so for all, the decisions between are skipped."""
        self._num_decisions = number = self._num_decisions + 1
        if number % self._period:
            return NO_DRAFTS
        chances: list[Seq[float]] = [()] * len(sequences)
        looked_at: list[int] = []
        for index, sequence in enumerate(sequences):
            state: DraftState | None = sequence.draft_state
            if state is not None and number % state.period:
                continue
            if self._source.observe(sequence):
                chances[index] = self._chances(sequence, num_coming)
                looked_at.append(index)
        decision = NO_DRAFTS
        if any(chances):
            if not self._costs.has_base(len(sequences)):
                return NO_DRAFTS
            decision = choose_draft_lengths(
                chances,
                self._costs.predict,
                max_drafts=self._config.max_batched_tokens - len(sequences),
                min_gain=MIN_GAIN_TO_WAIT if num_coming else MIN_GAIN,
            )
        for index in looked_at:
            state = sequences[index].draft_state
            if decision.lengths and decision.lengths[index]:
                state.look_again()
            elif not chances[index] or chances[index][0] < PROMISING_CHANCE:
                state.count_fruitless()
        self._period = min([each.draft_state.period for each in sequences])
        return decision

    def _chances(self, sequence: Sequence, num_coming: int) -> Seq[float]:
        limit = min(self._config.speculation_tokens, max_draft_tokens(sequence, num_coming))
        return self._source.chances(sequence, limit, num_coming) if limit > 0 else ()

    def _before_end(
        self, sequence: Sequence, token_ids: tuple[TokenId, ...]
    ) -> tuple[TokenId, ...]:
        """Return the draft up to the first token that would end the answer. Whether the answer ends
        there is up to the target model, which needs no draft for it."""
        sampling = sequence.spec.sampling
        for index, token_id in enumerate(token_ids):
            if token_id in self._eos_token_ids or token_id in sampling.stop_token_ids:
                return token_ids[:index]
        return token_ids


def max_draft_tokens(sequence: Sequence, num_coming: int = 0) -> int:
    """Return the maximum length of a draft that begins after ``num_coming`` more tokens; it may be
    below 0. The step samples one token after the draft, so the answer must have room for both. An
    answer that may not end yet (``min_tokens``) gets no draft beyond that point, because all tokens
    that a row samples have the same suppressed tokens. The step that yields the first token on this
    worker has no drafts."""
    num_known = sequence.num_known_tokens + num_coming
    if sequence.task is Task.PREFILL or num_known <= len(sequence.spec.token_ids):
        return 0
    room = sequence.max_total_tokens - num_known - 1
    if sequence.end_token_ids:
        num_answered = sequence.num_answer_tokens + num_coming
        to_minimum = sequence.spec.sampling.min_tokens - num_answered - 1
        if to_minimum >= 0:
            return min(room, to_minimum)
    return room
