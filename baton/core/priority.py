"""Priority classes of requests, and how long each class may be passed over."""

import math
from enum import IntEnum


class Priority(IntEnum):
    """Lower values are served first, as in vLLM. Between classes neither fairness nor the prefill
    order applies: a lower class gets what the higher ones leave."""

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
"""After waiting this long, a request gets a part of each step, whatever else is queued. No class
starves except BATCH, for which no client waits."""


MAX_PRIORITY_STEPS = Priority.BATCH - Priority.HIGH
"""Number of steps from the highest class to BATCH."""


def lower_priority(priority: Priority, steps: int) -> Priority:
    """Lower the tenant's priority by ``steps`` (0 or more): a request may rank behind others of
    its tenant, never before them."""
    assert steps >= 0, steps
    return Priority(min(priority + steps, Priority.BATCH))
