"""How long something took: what a user waits, and what the machine spent on it."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Action = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ElapsedTime:
    """Seconds. ``cpu`` is of all threads of the process: what else the machine does falsifies it
    less."""

    wall: float
    cpu: float


def time_once(
    action: Action, wall: Clock = time.perf_counter, cpu: Clock = time.process_time
) -> ElapsedTime:
    began, spent = wall(), cpu()
    action()
    return ElapsedTime(wall() - began, cpu() - spent)


def time_mean(action: Action, count: int) -> ElapsedTime:
    """Of so many in a row."""
    spent = time_once(lambda: [action() for _ in range(count)])
    return ElapsedTime(spent.wall / count, spent.cpu / count)


def median_time(times: Sequence[ElapsedTime]) -> ElapsedTime:
    return ElapsedTime(
        statistics.median(each.wall for each in times),
        statistics.median(each.cpu for each in times),
    )


def min_time(times: Sequence[ElapsedTime]) -> ElapsedTime:
    return ElapsedTime(min(each.wall for each in times), min(each.cpu for each in times))


def time_repeatedly(action: Action, rounds: int, most_seconds: float) -> list[ElapsedTime]:
    """``rounds`` times, after one that warms up; fewer once they took ``most_seconds``."""
    action()
    times = [time_once(action)]
    while len(times) < rounds and sum(each.wall for each in times) < most_seconds:
        times.append(time_once(action))
    return times
