"""Forecasts a prefill worker's queue if one more prompt joins it.

The prompt with the earliest deadline is computed first; prompts that can no longer meet their
deadline come after all others (``baton.core.prefill_order``). So the queue determines both when the
new prompt's first token comes and which queued prompts it makes late.
"""

from dataclasses import dataclass

from conductor.policy.snapshot import PrefillView


@dataclass(frozen=True, slots=True)
class QueueForecast:
    """The forecast for a queue with a new prompt. ``done_seconds`` is the time at which the new
    prompt has been computed. ``num_made_late`` is the number of queued prompts that would miss
    their deadline only because of the new prompt."""

    done_seconds: float
    num_made_late: int


def forecast_queue(
    view: PrefillView, now_seconds: float, ready_seconds: float, deadline_seconds: float,
    work_seconds: float,
) -> QueueForecast:  # fmt: skip
    """Forecast the queue with a new prompt of ``work_seconds`` that can start at ``ready_seconds``,
    which is now or later."""
    at, done, num_made_late = view.busy_until_seconds, -1.0, 0
    for queued in view.queue:
        if at + queued.work_seconds <= now_seconds:
            at += queued.work_seconds  # the prompt has been computed since the queue was reported
            continue
        if queued.deadline_seconds < now_seconds + queued.work_seconds:
            continue  # the prompt will be late anyway, and waits behind all others
        if done < 0 and queued.deadline_seconds > deadline_seconds:
            at = done = max(at, ready_seconds) + work_seconds
        at += queued.work_seconds
        in_time = at <= queued.deadline_seconds
        num_made_late += done >= 0 and not in_time and at - work_seconds <= queued.deadline_seconds
    if done < 0:
        done = max(at, ready_seconds) + work_seconds
    return QueueForecast(done, num_made_late)
