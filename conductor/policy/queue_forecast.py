"""Forecasts a prefill worker's queue if one more prompt joins it.

The prompt with the earliest deadline is computed first; prompts that can no longer meet their
deadline get a share of each step once they are overdue (``baton.core.prefill_order``). A reported
queue has no arrivals, so all late prompts count as overdue: a cautious forecast. So the queue
determines both when the new prompt's first token comes and which queued prompts it makes late.
"""

from dataclasses import dataclass

from baton.core.prefill_order import seconds_beside_late
from conductor.policy.snapshot import PrefillView, QueuedPrefill


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
    at, unfinished = view.busy_until_seconds, list[QueuedPrefill]()
    for queued in view.queue:
        if at + queued.work_seconds <= now_seconds and not unfinished:
            at += queued.work_seconds  # the prompt has been computed since the queue was reported
        else:
            unfinished.append(queued)
    late = sum(each.work_seconds for each in unfinished if _is_late(each, now_seconds))
    without, done, num_made_late = at, -1.0, 0
    late_without = late
    for queued in unfinished:
        if _is_late(queued, now_seconds):
            continue
        if done < 0 and queued.deadline_seconds > deadline_seconds:
            at, late = _advance(max(at, ready_seconds), work_seconds, late)
            done = at
        at, late = _advance(at, queued.work_seconds, late)
        without, late_without = _advance(without, queued.work_seconds, late_without)
        num_made_late += at > queued.deadline_seconds >= without
    if done < 0:
        done, _ = _advance(max(at, ready_seconds), work_seconds, late)
    return QueueForecast(done, num_made_late)


def _is_late(queued: QueuedPrefill, now_seconds: float) -> bool:
    return queued.deadline_seconds < now_seconds + queued.work_seconds


def _advance(at: float, work_seconds: float, late_seconds: float) -> tuple[float, float]:
    """Return the time at which ``work_seconds`` of prompts in time are computed, from ``at`` on,
    beside ``late_seconds`` of late prompts, and how much of those is left then."""
    seconds = seconds_beside_late(work_seconds, late_seconds)
    return at + seconds, late_seconds - (seconds - work_seconds)
