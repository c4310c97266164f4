"""Estimates the prefill cost of each worker. It is the pool's cost, unless the worker's own cost
differs significantly from that."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.cost import PrefillCost
from baton.core.ids import WorkerId
from baton.core.worker_load import REFERENCE_PROMPT_TOKENS, WorkerLoad
from conductor.limits import MAX_MEASUREMENT_AGE_SECONDS

PRIOR_PREFILL_COST = PrefillCost(0.0, 1e-4, 0.0)
"""The assumed cost before any measurement: between a CPU with a small model and a GPU with a large
one. It is used to balance the load, but never to call a first token late."""

SAME_SPEED_RATIO = 0.8
"""Workers of a pool whose speed ratio is at least this are treated as equally fast: otherwise an
idle pool would send everything to a worker that is only marginally faster."""

SIGNIFICANT_STANDARD_ERRORS = 2.0
"""Workers are also treated as equally fast if their difference may be a measurement error of up to
this many standard errors."""

MAX_ERROR_RATIO = 2.0
"""The pool's cost is determined by the workers whose measurement error is at most this multiple of
the lowest error."""


@dataclass(slots=True)
class _Measured:
    """A worker's measured cost. ``error`` is its relative standard error,
    :attr:`WorkerLoad.prefill_error`."""

    cost: PrefillCost
    error: float | None
    at_seconds: float

    def is_same_as(self, before: "_Measured | None") -> bool:
        return before is not None and (before.cost, before.error) == (self.cost, self.error)

    def is_fresh(self, now_seconds: float) -> bool:
        return now_seconds - self.at_seconds <= MAX_MEASUREMENT_AGE_SECONDS


class PrefillCosts:
    """Estimates prefill costs. ``pool_cost`` is the cost of a typical worker. Call :meth:`update`
    before reading costs."""

    def __init__(self) -> None:
        self.pool_cost = PRIOR_PREFILL_COST
        self._error: float | None = None
        self._measured: dict[WorkerId, _Measured] = {}

    @property
    def measured_pool_cost(self) -> PrefillCost | None:
        """The pool's cost; None before any worker has measured it."""
        return None if self.pool_cost is PRIOR_PREFILL_COST else self.pool_cost

    def update(self, loads: Mapping[WorkerId, WorkerLoad], now_seconds: float) -> None:
        """Update from the workers' reports. The pool's cost is the median of the costs
        that were measured precisely and recently."""
        for worker in self._measured.keys() - loads.keys():
            del self._measured[worker]
        for worker, load in loads.items():
            if load.prefill_cost is None:
                continue
            now = _Measured(load.prefill_cost, load.prefill_error, now_seconds)
            if not now.is_same_as(self._measured.get(worker)):
                self._measured[worker] = now
        measured = list(self._measured.values())
        fresh = [each for each in measured if each.is_fresh(now_seconds)] or measured
        if fresh:
            max_error = MAX_ERROR_RATIO * min(_or_infinite(each.error) for each in fresh)
            precise = [each for each in fresh if _or_infinite(each.error) <= max_error]
            precise.sort(key=lambda each: each.cost.seconds(REFERENCE_PROMPT_TOKENS))
            median = precise[len(precise) // 2]
            self.pool_cost, self._error = median.cost, median.error

    def cost_of(self, worker: WorkerId, now_seconds: float) -> PrefillCost:
        """Return the worker's own cost if it differs significantly from the pool's cost; otherwise
        return the pool's cost."""
        measured = self._measured.get(worker)
        if measured is None or not measured.is_fresh(now_seconds):
            return self.pool_cost
        if measured.error is None or self._error is None:  # a difference says nothing
            return self.pool_cost
        margin = 1 + SIGNIFICANT_STANDARD_ERRORS * math.hypot(measured.error, self._error)
        own, pool = (
            measured.cost.seconds(REFERENCE_PROMPT_TOKENS),
            self.pool_cost.seconds(REFERENCE_PROMPT_TOKENS),
        )
        is_equal = (
            own * SAME_SPEED_RATIO <= pool * margin and pool * SAME_SPEED_RATIO <= own * margin
        )
        return self.pool_cost if is_equal else measured.cost


def _or_infinite(error: float | None) -> float:
    return math.inf if error is None else error
