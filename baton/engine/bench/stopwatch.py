"""How long something took: what a user waits, and what the machine spent on it."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Action = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds. ``cpu`` is of all threads of the process: what else the machine does falsifies it
    less."""

    wall: float
    cpu: float


def take(action: Action, wall: Clock = time.perf_counter, cpu: Clock = time.process_time) -> Spent:
    began, spent = wall(), cpu()
    action()
    return Spent(wall() - began, cpu() - spent)


def mean(action: Action, count: int) -> Spent:
    """Of so many in a row."""
    spent = take(lambda: [action() for _ in range(count)])
    return Spent(spent.wall / count, spent.cpu / count)


def median(times: Sequence[Spent]) -> Spent:
    return Spent(
        statistics.median(each.wall for each in times),
        statistics.median(each.cpu for each in times),
    )


def least(times: Sequence[Spent]) -> Spent:
    return Spent(min(each.wall for each in times), min(each.cpu for each in times))


def repeated(action: Action, rounds: int, most_seconds: float) -> list[Spent]:
    """``rounds`` times, after one that warms up; fewer once they took ``most_seconds``."""
    action()
    times = [take(action)]
    while len(times) < rounds and sum(each.wall for each in times) < most_seconds:
        times.append(take(action))
    return times
