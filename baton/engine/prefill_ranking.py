"""Ranks prompts, and divides a step's prefill budget between them."""

import math
from collections.abc import Callable, Iterable
from heapq import nsmallest

from baton.core.fairness import VirtualTokenCounters
from baton.core.prefill_order import PREFILL_ORDERS, allocate_step_tokens
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
        self.counters = VirtualTokenCounters(config.fairness_slack_tokens)
        self._pool = pool
        self._config = config
        self._order = PREFILL_ORDERS[config.order]
        self._prefill_seconds = prefill_seconds

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
        """Divide ``budget`` between prompts. If a tenant has received at least the fairness slack
        more service than the tenant with the least, its prompts get only what the prompts of the
        other tenants leave, however long they have waited. Prompts that go first because they were
        preempted are exempt. Prompts of a lower priority get only what those of higher priorities
        leave, until they have waited for the starvation limit of their own priority."""
        if len(ranked) < 2:
            return [(each, budget) for each in ranked]
        surpluses = self._surpluses(ranked)

        def must_yield(each: Sequence) -> bool:
            return surpluses.get(each.spec.owner, 0) > 0 and not each.waiting_prompt.goes_first

        fair = [each for each in ranked if not must_yield(each)]
        overdue, others = allocate_step_tokens(
            [each.waiting_prompt for each in fair], now_seconds, budget
        )
        first = [(fair[index], limit) for index, limit in overdue]
        rest = [fair[index] for index in others] + [each for each in ranked if must_yield(each)]
        rest.sort(
            key=lambda each: (not each.waiting_prompt.goes_first, each.waiting_prompt.priority)
        )
        return first + [(each, budget) for each in rest]

    def _select_candidates(self, waiting: list[Sequence], now_seconds: float) -> list[Sequence]:
        """Select the ``admission_window`` waiting prompts (all, if there are fewer) that rank
        first by their stored estimates, and then update the estimates of the selected ones. The
        prompt that arrived first is selected in addition if its priority is lower than that of the
        first-ranked one."""
        window = self._config.admission_window
        if len(waiting) > window:
            oldest = waiting[0]
            waiting = nsmallest(window, waiting, key=self._rank_key(waiting, now_seconds))
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
        if len(sequences) < 2:
            return sequences
        return sorted(sequences, key=self._rank_key(sequences, now_seconds))

    def _rank_key(
        self, sequences: list[Sequence], now_seconds: float
    ) -> Callable[[Sequence], tuple[float, Priority, int, float, int]]:
        """Return a sort key. Sequences that go first because they were preempted come before all
        others. Then come sequences of higher priority, then those whose tenants have received less
        service; otherwise, the configured order decides."""
        surpluses, order = self._surpluses(sequences), self._order

        def rank(sequence: Sequence) -> tuple[float, Priority, int, float, int]:
            waiting = sequence.waiting_prompt
            goes_after, rank_time = order.rank(waiting, now_seconds)
            surplus = surpluses.get(sequence.spec.owner, 0)
            return goes_after, waiting.priority, surplus, rank_time, sequence.arrival_index

        return rank

    def _surpluses(self, sequences: list[Sequence]) -> dict[bytes, int]:
        """Return how much more service each tenant of these sequences has received than the one of
        them with the least (see :meth:`VirtualTokenCounters.service_surpluses`). The result is
        empty, which means no surpluses, while only one tenant has a counter."""
        if not self.counters.has_several_tenants:
            return {}
        return self.counters.service_surpluses({each.spec.owner for each in sequences})

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
        waiting.remaining_seconds = seconds
        if waiting.deadline_seconds == math.inf and sequence.spec.ttft_slo_seconds:
            self._set_deadline(sequence)

    def _set_deadline(self, sequence: Sequence) -> None:
        """Set the deadline for the first token: the request's TTFT budget plus the predicted time
        to compute the whole prompt alone, because a long prompt may take longer."""
        own_seconds = self._prefill_seconds(0, len(sequence.spec.token_ids))
        assert own_seconds is not None, "the caller has checked that the prefill cost is known"
        waiting = sequence.waiting_prompt
        budget = sequence.spec.ttft_slo_seconds
        waiting.deadline_seconds = waiting.arrival_seconds + budget + own_seconds
