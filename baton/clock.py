"""Clocks, which are passed as arguments: the system's clock, and one that a test advances by
hand."""

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Return the seconds since an arbitrary start. The value never decreases."""
        ...

    def wall_nanoseconds(self) -> int:
        """Return the nanoseconds since 1970, for timestamps and for the generations of processes
        (:data:`baton.core.ids.Incarnation`). The value may jump."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall_nanoseconds(self) -> int:
        return time.time_ns()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """A clock that stands still until :meth:`advance` is called. Sleepers wake in the order of
    their deadlines."""

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._now = start_seconds
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        return self._now

    def wall_nanoseconds(self) -> int:
        return int(self._now * 1e9)

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        await future

    def advance(self, seconds: float) -> None:
        """Move time forward and wake every sleeper whose deadline has passed."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)
