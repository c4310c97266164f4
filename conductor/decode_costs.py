"""Estimates the decode cost of mixed workers, and of workers that have not measured theirs."""

from collections.abc import Iterable

from baton.core.cost import DecodeCost
from baton.core.worker_load import REFERENCE_PROMPT_TOKENS, WorkerLoad
from conductor.prefill_costs import SAME_SPEED_RATIO

PRIOR_DECODE_COST = DecodeCost(0.01, 0.0, 0.0)
"""Assumed decode cost until a worker has measured its own."""

REFERENCE_REQUESTS = 8
"""Number of answers by which workers' speeds are compared, each with
:data:`REFERENCE_PROMPT_TOKENS` tokens of context."""


class DecodeCosts:
    """``typical_cost`` is the median of the costs that workers have measured."""

    def __init__(self) -> None:
        self.typical_cost = PRIOR_DECODE_COST

    def update(self, loads: Iterable[WorkerLoad]) -> None:
        """Update from the reports of all workers that generate answers."""
        costs = [load.decode_cost for load in loads if load.decode_cost is not None]
        if costs:
            self.typical_cost = sorted(costs, key=_reference_seconds)[len(costs) // 2]

    def cost_of(self, load: WorkerLoad) -> DecodeCost | None:
        """Return a mixed worker's measured cost; None if there is none. If it hardly differs from
        the typical cost, return that one: otherwise the error of a measurement, multiplied by the
        tokens of an answer, would count more than a cached prefix."""
        own = load.decode_cost
        if own is None:
            return None
        seconds, typical = _reference_seconds(own), _reference_seconds(self.typical_cost)
        is_equal = seconds * SAME_SPEED_RATIO <= typical and typical * SAME_SPEED_RATIO <= seconds
        return self.typical_cost if is_equal else own


def _reference_seconds(cost: DecodeCost) -> float:
    return cost.seconds(REFERENCE_REQUESTS, REFERENCE_REQUESTS * REFERENCE_PROMPT_TOKENS)
