"""The cores on which a worker computes: its own, or those of its host, which it shares.

Workers that share a host's cores slow one another down while they are busy. All busy workers of a
host have the same speed, which depends on how many they are (processor sharing). So each host has a
clock of work, which runs at that speed: a step of a tenth of a second ends when the clock has moved
on by a tenth, whatever the workers beside it did meanwhile. It is the virtual time of fair queueing
(Parekh and Gallager, "A generalized processor sharing approach to flow control", 1993, section 3).
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from baton.core.ids import WorkerId
from baton.errors import Invalid
from simulator.event_queue import EventQueue

MAX_SHARED_SPEEDS = 64
"""The maximum number of speeds; with more busy workers, they share what so many of them have."""


class Cores(Protocol):
    """The clock of a worker's cores. Work is in seconds of a worker at full speed."""

    @property
    def now_work(self) -> float: ...

    def schedule(self, work: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the clock shows ``work``."""
        ...

    def seconds_until(self, work: float) -> float:
        """Return the time until the clock shows ``work``, if its speed stays as it is."""
        ...

    def tell_time(self, work: float, tell: Callable[[float], None]) -> None:
        """Call ``tell`` with the time at which the clock shows ``work``, as soon as that is
        certain."""
        ...

    def set_busy(self, worker: WorkerId, *, busy: bool) -> None: ...


class OwnCores:
    """Cores of one worker, whose clock is that of the simulation."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self.schedule = events.schedule

    @property
    def now_work(self) -> float:
        return self._events.now_seconds

    def seconds_until(self, work: float) -> float:
        return work - self._events.now_seconds

    def tell_time(self, work: float, tell: Callable[[float], None]) -> None:
        tell(work)

    def set_busy(self, worker: WorkerId, *, busy: bool) -> None:
        """Do nothing: the speed is always the same."""


class SharedCores:
    """Cores of a host with several workers. While *k* of them are busy, the clock runs at
    ``speeds[k - 1]``; with more workers than speeds, they divide the last one's total equally. An
    idle host's clock has speed 1."""

    def __init__(self, events: EventQueue, speeds: Sequence[float]) -> None:
        assert speeds and all(speed > 0 for speed in speeds)
        self._events = events
        self._speeds = speeds
        self._busy: set[WorkerId] = set()
        self._speed = 1.0
        self._work = 0.0
        """The time of the clock at ``_updated_seconds``."""
        self._updated_seconds = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._plan_number = 0

    @property
    def now_work(self) -> float:
        return self._work + (self._events.now_seconds - self._updated_seconds) * self._speed

    def schedule(self, work: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (work, next(self._numbers), callback))
        if self._heap[0][2] is callback:
            self._plan()

    def seconds_until(self, work: float) -> float:
        return (work - self.now_work) / self._speed

    def tell_time(self, work: float, tell: Callable[[float], None]) -> None:
        self.schedule(work, lambda: tell(self._events.now_seconds))

    def set_busy(self, worker: WorkerId, *, busy: bool) -> None:
        if (worker in self._busy) == busy:
            return
        self._set_work(self.now_work)
        self._busy ^= {worker}
        self._speed = self._speed_of(len(self._busy))
        self._plan()

    def _speed_of(self, num_busy: int) -> float:
        known = len(self._speeds)
        if not num_busy:
            return 1.0
        return self._speeds[min(num_busy, known) - 1] * min(known / num_busy, 1.0)

    def _set_work(self, work: float) -> None:
        self._work, self._updated_seconds = work, self._events.now_seconds

    def _plan(self) -> None:
        """Schedule the next callback, at the current speed, in place of what was scheduled."""
        self._plan_number += 1
        if self._heap:
            at = self._events.now_seconds + max(self.seconds_until(self._heap[0][0]), 0.0)
            self._events.schedule(at, partial(self._run_next, self._plan_number))

    def _run_next(self, number: int) -> None:
        if number != self._plan_number:
            return
        work, _, callback = heapq.heappop(self._heap)
        self._set_work(max(work, self._work))  # exactly, whatever the rounding
        self._plan()
        callback()


def parse_shared_speeds(text: str, num_hosts: int) -> tuple[float, ...]:
    """Parse ``--shared-speeds``, like ``1,0.6``. Raises Invalid for malformed speeds, for speeds
    that rise with the number of busy workers, and if workers don't share hosts (``--hosts``)."""
    try:
        speeds = tuple(float(speed) for speed in text.split(","))
    except ValueError:
        speeds = ()
    falling = all(a >= b for a, b in itertools.pairwise((1.0, *speeds, 0.0)))
    if not falling or 0.0 in speeds or not 1 <= len(speeds) <= MAX_SHARED_SPEEDS:
        raise Invalid(
            f"--shared-speeds is {text!r}; it must be the speeds of each worker while 1, 2, … of "
            "its host are busy, above 0, at most 1 and none above the one before, like 1,0.6"
        )
    if not num_hosts:
        raise Invalid("--shared-speeds needs --hosts: without it, each worker has its own host")
    return speeds
