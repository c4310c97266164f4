"""Who gets a step's budget for prompts, and in which order."""

import math
from collections.abc import Callable, Iterable
from heapq import nsmallest

from baton.core.fairness import VirtualTokenCounters
from baton.core.prefill_order import PREFILL_ORDERS, allocate_step_tokens
from baton.core.priority import Priority
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.sequence import Phase, Sequence

PrefillSeconds = Callable[[int, int], float | None]
"""What it takes to compute tokens [start, end) of a prompt; None while nobody knows."""


def unknown_seconds(start: int, end: int) -> float | None:
    return None


class PrefillRanking:
    """What an order needs to know of a sequence is kept in ``sequence.waiting``. It is looked up
    when the sequence joins the queue, and again whenever it is among the first of it: each look
    is a walk along its cached prefix."""

    def __init__(
        self, pool: BlockPool, config: EngineConfig, prefill_seconds: PrefillSeconds
    ) -> None:
        self.counters = VirtualTokenCounters(config.fairness_slack_tokens)
        self._pool = pool
        self._config = config
        self._order = PREFILL_ORDERS[config.order]
        self._prefill_seconds = prefill_seconds

    # The queue, and what tenants are given

    def join(self, sequence: Sequence) -> None:
        """It waits from now on."""
        self._look(sequence)
        if self._config.fairness:
            self.counters.join(sequence.spec.owner)

    def leave(self, sequence: Sequence) -> None:
        if self._config.fairness:
            self.counters.leave(sequence.spec.owner)

    def charge_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """What is computed again after a preemption is no gift."""
        if self.counters.is_shared and not sequence.waiting.preempted:
            spec = sequence.spec
            self.counters.charge(spec.owner, num_tokens, 0, spec.weight)

    def charge_decodes(self, sequences: Iterable[Sequence]) -> None:
        if self.counters.is_shared:
            for sequence in sequences:
                self.counters.charge(sequence.spec.owner, 0, 1, sequence.spec.weight)

    # One step

    def in_turn(
        self,
        computing: list[Sequence],
        waiting: Iterable[Sequence],
        budget: int,
        now_seconds: float,
    ) -> list[tuple[Sequence, int]]:
        """All whose prompts are being computed, and the first of those that wait; each with the
        most that it may get of ``budget``."""
        first = self._first(list(waiting), now_seconds)
        if not self._order.preemptive:
            return [(each, budget) for each in computing + self._ranked(first, now_seconds)]
        if first or len(computing) > 1:
            for sequence in computing:
                self._look(sequence)
        return self._shared_out(self._ranked(computing + first, now_seconds), budget, now_seconds)

    def _shared_out(
        self, ranked: list[Sequence], budget: int, now_seconds: float
    ) -> list[tuple[Sequence, int]]:
        """Those whose tenants were given most get what is left, however long they have waited for;
        those of lower priority, until they have waited for as long as their class does."""
        if len(ranked) < 2:
            return [(each, budget) for each in ranked]
        arrears = self._arrears(ranked)

        def is_behind(each: Sequence) -> bool:
            return arrears.get(each.spec.owner, 0) > 0 and not each.waiting.resumes

        fair = [each for each in ranked if not is_behind(each)]
        given = allocate_step_tokens([each.waiting for each in fair], now_seconds, budget)
        first = [(fair[index], limit) for index, limit in given]
        together = first + [(each, budget) for each in ranked if is_behind(each)]
        return sorted(together, key=lambda pair: _class_of(pair, budget))

    def _first(self, waiting: list[Sequence], now_seconds: float) -> list[Sequence]:
        """By what was known of them; then looked at again."""
        window = self._config.admission_window
        if len(waiting) > window:
            oldest = waiting[0]
            waiting = nsmallest(window, waiting, key=self._rank(waiting, now_seconds))
            if oldest.waiting.priority > waiting[0].waiting.priority and oldest not in waiting:
                waiting.append(oldest)  # however many come before it: its patience may be over
        if len(waiting) > 1 or self._order.preemptive:
            for sequence in waiting:
                self._look(sequence)
        return waiting

    def _ranked(self, sequences: list[Sequence], now_seconds: float) -> list[Sequence]:
        if len(sequences) < 2:
            return sequences
        return sorted(sequences, key=self._rank(sequences, now_seconds))

    def _rank(
        self, sequences: list[Sequence], now_seconds: float
    ) -> Callable[[Sequence], tuple[float, Priority, int, float, int]]:
        """Who was preempted goes first; then by priority; then whose tenant was given least; then
        the order."""
        arrears, order = self._arrears(sequences), self._order

        def rank(sequence: Sequence) -> tuple[float, Priority, int, float, int]:
            fresh, turn = order.rank(sequence.waiting, now_seconds)
            behind = arrears.get(sequence.spec.owner, 0)
            return fresh, sequence.waiting.priority, behind, turn, sequence.arrival

        return rank

    def _arrears(self, sequences: list[Sequence]) -> dict[bytes, int]:
        """Of the tenants of these; none, while there is nobody to be fair to."""
        if not self.counters.is_shared:
            return {}
        return self.counters.arrears({each.spec.owner for each in sequences})

    def _look(self, sequence: Sequence) -> None:
        waiting, end = sequence.waiting, sequence.num_known
        if sequence.phase is Phase.WAITING:
            cached = self._pool.count_cached(sequence.keys) * self._config.block_tokens
            waiting.cached_tokens = min(cached, end - 1)
        else:
            waiting.cached_tokens = sequence.num_computed
        waiting.new_tokens = end - waiting.cached_tokens
        seconds = self._prefill_seconds(waiting.cached_tokens, end)
        if seconds is None:
            return
        waiting.remaining_seconds = seconds
        if waiting.deadline_seconds == math.inf and sequence.spec.first_token_seconds:
            self._set_deadline(sequence)

    def _set_deadline(self, sequence: Sequence) -> None:
        """The budget, and what the whole prompt takes by itself: a long one may take longer."""
        own_seconds = self._prefill_seconds(0, len(sequence.spec.token_ids))
        assert own_seconds is not None, "the speed was known just now"
        waiting = sequence.waiting
        budget = sequence.spec.first_token_seconds
        waiting.deadline_seconds = waiting.arrival_seconds + budget + own_seconds


def _class_of(given: tuple[Sequence, int], budget: int) -> tuple[bool, bool, Priority]:
    """Whoever has waited too long has a part of the budget, and goes first; then who was preempted;
    then by priority."""
    sequence, limit = given
    return limit >= budget, not sequence.waiting.resumes, sequence.waiting.priority
