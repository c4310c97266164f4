"""How fast prefill workers read, and who is faster or slower than the others for certain."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.cost import PrefillCost
from baton.core.ids import WorkerId
from baton.core.worker_load import REFERENCE_PROMPT_TOKENS, WorkerLoad

PRIOR_PREFILL_COST = PrefillCost(0.0, 1e-4, 0.0)
"""While nobody has measured anything: between a CPU with a small model and a GPU with a large one.
It tells workers apart by what was sent to them; nobody is refused for it."""

SAME_SPEED_RATIO = 0.8
"""Workers of one pool whose speeds are at least so near are taken for equal: else an idle pool
would send everything to whoever is the fastest by a hair."""

SIGNIFICANT_STANDARD_ERRORS = 2.0
"""And so are those that may be so near, by so many standard errors of what was measured."""

MAX_ERROR_RATIO = 2.0
"""Errors up to so many times the least one: those workers say what the pool's cost is."""

MAX_MEASUREMENT_AGE_SECONDS = 60.0
"""Who has measured nothing new for longer is taken for equal, and so gets prompts again: else who
was slow once would stay so for ever."""


@dataclass(slots=True)
class _Measured:
    """``error`` as in :class:`baton.core.worker_load.WorkerLoad`."""

    cost: PrefillCost
    error: float | None
    at_seconds: float

    def says_the_same(self, before: "_Measured | None") -> bool:
        return before is not None and (before.cost, before.error) == (self.cost, self.error)

    def is_fresh(self, now_seconds: float) -> bool:
        return now_seconds - self.at_seconds <= MAX_MEASUREMENT_AGE_SECONDS


class PrefillCosts:
    """``pool`` is what a worker costs that does not stand out; ``learn`` before asking."""

    def __init__(self) -> None:
        self.pool = PRIOR_PREFILL_COST
        self._error = 0.0
        self._measured: dict[WorkerId, _Measured] = {}

    @property
    def known(self) -> PrefillCost | None:
        """The pool's, once anybody has measured it."""
        return None if self.pool is PRIOR_PREFILL_COST else self.pool

    def learn(self, loads: Mapping[WorkerId, WorkerLoad], now_seconds: float) -> None:
        """The pool's cost is the median of those that are measured well, and of late."""
        for worker in self._measured.keys() - loads.keys():
            del self._measured[worker]
        for worker, load in loads.items():
            if load.prefill_cost is None:
                continue
            now = _Measured(load.prefill_cost, load.prefill_error, now_seconds)
            if not now.says_the_same(self._measured.get(worker)):
                self._measured[worker] = now
        told = list(self._measured.values())
        fresh = [each for each in told if each.is_fresh(now_seconds)] or told
        if fresh:
            most = MAX_ERROR_RATIO * min(_or_endless(each.error) for each in fresh)
            well = [each for each in fresh if _or_endless(each.error) <= most]
            well.sort(key=lambda each: each.cost.seconds(REFERENCE_PROMPT_TOKENS))
            self.pool, self._error = well[len(well) // 2].cost, well[len(well) // 2].error or 0.0

    def of(self, worker: WorkerId, now_seconds: float) -> PrefillCost:
        """Its own cost where it stands out for certain, else the pool's."""
        told = self._measured.get(worker)
        if told is None or told.error is None or not told.is_fresh(now_seconds):
            return self.pool
        doubt = 1 + SIGNIFICANT_STANDARD_ERRORS * math.hypot(told.error, self._error)
        own, pool = (
            told.cost.seconds(REFERENCE_PROMPT_TOKENS),
            self.pool.seconds(REFERENCE_PROMPT_TOKENS),
        )
        alike = own * SAME_SPEED_RATIO <= pool * doubt and pool * SAME_SPEED_RATIO <= own * doubt
        return self.pool if alike else told.cost


def _or_endless(error: float | None) -> float:
    return math.inf if error is None else error
