"""Measures elapsed wall-clock and CPU time."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Action = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ElapsedTime:
    """Wall-clock and CPU time, in seconds. ``cpu`` is the CPU time of all threads of the process,
    which is disturbed less by other load on the machine."""

    wall: float
    cpu: float


def time_once(
    action: Action, wall: Clock = time.perf_counter, cpu: Clock = time.process_time
) -> ElapsedTime:
    start_wall, start_cpu = wall(), cpu()
    action()
    return ElapsedTime(wall() - start_wall, cpu() - start_cpu)


def time_mean(action: Action, count: int) -> ElapsedTime:
    """Return the mean time of ``count`` runs in a row."""
    spent = time_once(lambda: [action() for _ in range(count)])
    return ElapsedTime(spent.wall / count, spent.cpu / count)


def median_time(times: Sequence[ElapsedTime]) -> ElapsedTime:
    return ElapsedTime(
        statistics.median(each.wall for each in times),
        statistics.median(each.cpu for each in times),
    )


def min_time(times: Sequence[ElapsedTime]) -> ElapsedTime:
    return ElapsedTime(min(each.wall for each in times), min(each.cpu for each in times))


def time_repeatedly(action: Action, rounds: int, max_seconds: float) -> list[ElapsedTime]:
    """Measure ``rounds`` runs after a warm-up run, or fewer if they take more than ``max_seconds``
    in total."""
    action()
    times = [time_once(action)]
    while len(times) < rounds and sum(each.wall for each in times) < max_seconds:
        times.append(time_once(action))
    return times
