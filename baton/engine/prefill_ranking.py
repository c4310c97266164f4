"""Ranks prompts, and divides a step's prefill budget between them."""

from collections.abc import Callable, Iterable
from functools import partial

from baton.core.fairness import VirtualTokenCounters
from baton.core.prefill_order import (
    PREFILL_ORDERS,
    Rank,
    allocate_step_tokens,
    seconds_beside_late,
)
from baton.core.priority import Priority
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.sequence import Phase, Sequence

PredictPrefillSeconds = Callable[[int, int], float | None]
"""Predicts the time to compute tokens [start, end) of a prompt; None while it is unknown."""


def unknown_seconds(start: int, end: int) -> float | None:
    return None


class PrefillRanking:
    """Ranks the waiting and the partly computed prompts of an engine.

    The configured order ranks sequences by estimates, which are stored in
    ``sequence.waiting_prompt``. They are computed when the sequence joins the queue. A step updates
    them only for the waiting sequences near the front of the queue, and for partly computed ones,
    since each update costs a walk along the sequence's cached prefix."""

    def __init__(
        self, pool: BlockPool, config: EngineConfig, prefill_seconds: PredictPrefillSeconds
    ) -> None:
        self.counters = VirtualTokenCounters()
        self._pool = pool
        self._config = config
        self._order = PREFILL_ORDERS[config.order]
        self._prefill_seconds = prefill_seconds
        self.prompt_slowdown = 1.0
        """How many times as long as alone prompts take beside the answers that run now."""
        self._overdue_seconds = 0.0
        """The remaining work of the overdue prompts that the last step considered."""

    # The queue, and the tokens charged to tenants

    def add_waiting(self, sequence: Sequence) -> None:
        """Register a sequence that starts to wait."""
        self._update_estimates(sequence)
        if self._config.fairness:
            self.counters.join(sequence.spec.owner)

    def remove_waiting(self, sequence: Sequence) -> None:
        if self._config.fairness:
            self.counters.leave(sequence.spec.owner)

    def charge_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge a prefill chunk to the sequence's tenant, unless the chunk is recomputed after a
        preemption."""
        if self.counters.has_several_tenants and not sequence.waiting_prompt.was_preempted:
            spec = sequence.spec
            self.counters.charge(spec.owner, num_tokens, 0, spec.weight)

    def charge_decodes(self, sequences: Iterable[Sequence]) -> None:
        if self.counters.has_several_tenants:
            for sequence in sequences:
                self.counters.charge(sequence.spec.owner, 0, 1, sequence.spec.weight)

    def charge_answer(self, sequence: Sequence, num_tokens: int) -> None:
        if self.counters.has_several_tenants:
            self.counters.charge(sequence.spec.owner, 0, num_tokens, sequence.spec.weight)

    # One step

    def allocate(
        self,
        computing: list[Sequence],
        waiting: Iterable[Sequence],
        budget: int,
        now_seconds: float,
    ) -> list[tuple[Sequence, int]]:
        """Return the prompts to compute, in ranked order, each with the maximum number of tokens of
        ``budget`` that it may get. These are all prompts in ``computing`` and the best-ranked
        prompts in ``waiting``."""
        first = self._select_candidates(list(waiting), now_seconds)
        if not self._order.is_preemptive:
            return [(each, budget) for each in computing + self._sort(first, now_seconds)]
        if first or len(computing) > 1:
            for sequence in computing:
                self._update_estimates(sequence)
        return self._divide_budget(self._sort(computing + first, now_seconds), budget, now_seconds)

    def _divide_budget(
        self, ranked: list[Sequence], budget: int, now_seconds: float
    ) -> list[tuple[Sequence, int]]:
        """Divide ``budget`` between prompts: see
        :func:`baton.core.prefill_order.allocate_step_tokens`."""
        if len(ranked) < 2:
            self._overdue_seconds = 0.0
            return [(each, budget) for each in ranked]
        overdue = [each for each in ranked if each.waiting_prompt.is_overdue(now_seconds)]
        self._overdue_seconds = sum(each.waiting_prompt.remaining_seconds for each in overdue)
        least_served = self.counters.least_served({each.spec.owner for each in ranked})
        shares = allocate_step_tokens(
            [each.waiting_prompt for each in ranked], now_seconds, budget, least_served
        )
        return [(ranked[index], limit) for index, limit in shares]

    def _select_candidates(self, waiting: list[Sequence], now_seconds: float) -> list[Sequence]:
        """Select the ``admission_window`` waiting prompts (all, if there are fewer) that rank
        first by their stored estimates, and then update the estimates of the selected ones. Up to
        half of them are overdue ones, which rank behind others but have a share of each step.
        The prompt that arrived first is selected in addition if its priority is lower than that of
        the first-ranked one."""
        window = self._config.admission_window
        if len(waiting) > window:
            oldest = waiting[0]
            ranked = self._sort(waiting, now_seconds)
            is_overdue = partial(self._order.is_overdue, now_seconds=now_seconds)
            overdue = [each for each in ranked if is_overdue(each.waiting_prompt)][: window // 2]
            others = [each for each in ranked if each not in overdue]
            waiting = others[: window - len(overdue)] + overdue
            if (
                oldest.waiting_prompt.priority > waiting[0].waiting_prompt.priority
                and oldest not in waiting
            ):
                waiting.append(
                    oldest
                )  # if it has waited too long, it gets tokens whatever ranks before it
        if len(waiting) > 1 or self._order.is_preemptive:
            for sequence in waiting:
                self._update_estimates(sequence)
        return waiting

    def _sort(self, sequences: list[Sequence], now_seconds: float) -> list[Sequence]:
        """Return the sequences in ranked order. Sequences that go first because they were preempted
        come before all others, then those of higher priority, then those with an earlier virtual
        finish time (:mod:`baton.core.fairness`). Within a tenant, the configured order decides."""
        if len(sequences) < 2:
            return sequences
        ranked = sorted(sequences, key=lambda each: self._rank(each, now_seconds))
        if not self.counters.has_several_tenants:
            return ranked
        finishes = self.counters.virtual_finishes(
            (each.spec.owner, each.waiting_prompt.new_tokens, each.spec.weight) for each in ranked
        )
        finish = dict(zip(ranked, finishes, strict=True))
        return sorted(ranked, key=lambda each: (*_class_rank(each), finish[each]))

    def _rank(self, sequence: Sequence, now_seconds: float) -> tuple[bool, Priority, Rank, int]:
        """Return the sequence's sort key within its tenant."""
        rank = self._order.rank(sequence.waiting_prompt, now_seconds)
        return *_class_rank(sequence), rank, sequence.arrival_index

    def _update_estimates(self, sequence: Sequence) -> None:
        waiting, end = sequence.waiting_prompt, sequence.num_known_tokens
        if sequence.phase is Phase.WAITING:
            num_blocks = self._pool.count_cached(sequence.block_keys, window=sequence.window)
            cached = self._config.num_tokens_in(num_blocks)
            waiting.cached_tokens = min(cached, end - 1)
        else:
            waiting.cached_tokens = sequence.num_computed_tokens
        waiting.new_tokens = end - waiting.cached_tokens
        seconds = self._prefill_seconds(waiting.cached_tokens, end)
        if seconds is None:
            return
        if sequence.phase is Phase.WAITING:  # a prompt is begun only if it can be in time
            seconds = seconds_beside_late(self.prompt_slowdown * seconds, self._overdue_seconds)
        waiting.remaining_seconds = seconds
        if sequence.spec.ttft_slo_seconds:
            self._set_deadline(sequence)

    def _set_deadline(self, sequence: Sequence) -> None:
        """Set the deadline for the first token: the request's TTFT objective plus the predicted
        time to compute the whole prompt alone, because a long prompt may take longer. It is set
        again with each estimate, since the first ones may be wrong by far."""
        own_seconds = self._prefill_seconds(0, len(sequence.spec.token_ids))
        assert own_seconds is not None, "the caller has checked that the prefill cost is known"
        waiting = sequence.waiting_prompt
        objective = sequence.spec.ttft_slo_seconds
        waiting.deadline_seconds = waiting.arrival_seconds + objective + own_seconds


def _class_rank(sequence: Sequence) -> tuple[bool, Priority]:
    """Return a sort key: sequences that go first because they were preempted, then by priority."""
    return not sequence.waiting_prompt.goes_first, sequence.waiting_prompt.priority
