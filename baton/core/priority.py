"""Priority classes of requests, and how long each class may be passed over."""

import math
from enum import IntEnum


class Priority(IntEnum):
    """The priority class of a request. The smaller the value, the higher the priority, as in vLLM.
    Fairness and the prefill order apply only within a class. A class gets what the classes of
    higher priority leave. Only requests that have waited for :data:`STARVATION_LIMIT_SECONDS` get a
    part of each step in any case."""

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
    """Return the class that is ``steps`` (0 or more) classes below ``priority``, which is the
    tenant's own, or BATCH if there is none that low. So a request may rank behind its tenant's
    other requests, but can't get a higher priority than the tenant has."""
    assert steps >= 0, steps
    return Priority(min(priority + steps, Priority.BATCH))
