"""What becomes of a worker's queue if one more prompt joins it.

Prompts are computed by earliest deadline, those that can't be in time any more behind all others
(``baton.core.prefill_order``), so both the newcomer's first token and what it does to the others
can be told from the queue.
"""

from dataclasses import dataclass

from conductor.policy.snapshot import PrefillView


@dataclass(frozen=True, slots=True)
class QueueForecast:
    """``done_seconds``: when the newcomer is computed. ``num_harmed`` of those that would have
    been in time will not be."""

    done_seconds: float
    num_harmed: int


def forecast_queue(
    view: PrefillView, now_seconds: float, ready_seconds: float, deadline_seconds: float,
    work_seconds: float,
) -> QueueForecast:  # fmt: skip
    """Of a prompt that may start at ``ready_seconds``, now or later."""
    at, done, harmed = view.busy_until_seconds, -1.0, 0
    for due in view.queue:
        if at + due.work_seconds <= now_seconds:
            at += due.work_seconds  # done since the queue was told
            continue
        if due.deadline_seconds < now_seconds + due.work_seconds:
            continue  # it has lost; it waits for all others
        if done < 0 and due.deadline_seconds > deadline_seconds:
            at = done = max(at, ready_seconds) + work_seconds
        at += due.work_seconds
        in_time = at <= due.deadline_seconds
        harmed += done >= 0 and not in_time and at - work_seconds <= due.deadline_seconds
    if done < 0:
        done = max(at, ready_seconds) + work_seconds
    return QueueForecast(done, harmed)
