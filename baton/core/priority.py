"""Who goes behind whom: the classes of requests, and how long each stands back."""

import math
from enum import IntEnum


class Priority(IntEnum):
    """The lower, the sooner, as vLLM counts. Between classes neither fairness nor order counts:
    whoever is of a lower one gets what the others leave."""

    HIGH = -1
    NORMAL = 0
    LOW = 1
    BATCH = 2


STARVATION_LIMIT_SECONDS = {
    Priority.HIGH: 60.0,
    Priority.NORMAL: 60.0,
    Priority.LOW: 600.0,
    Priority.BATCH: math.inf,
}
"""After so long a request gets some of each step, whoever else is there: no class starves but that
of batches, for which nobody waits."""


MAX_PRIORITY_STEPS = Priority.BATCH - Priority.HIGH
"""Steps that lead from any class to that of batches."""


def lower_priority(priority: Priority, steps: int) -> Priority:
    """A request may stand behind others of its tenant (``steps`` from 0), never before them."""
    assert steps >= 0, steps
    return Priority(min(priority + steps, Priority.BATCH))
