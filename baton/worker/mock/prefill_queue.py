"""Prompts at a mock worker: computed one after the other, by deadline, in as much time as a set
speed gives them."""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable

from baton.core.cost import PrefillCost
from baton.core.worker_load import MAX_QUEUED, QueuedWork
from baton.worker.mock.job import MockJob

PATIENCE_SECONDS = 60.0
"""Nobody waits for those who came so much later, as in a real worker."""

TIMER_SECONDS = 0.001
"""What a timer may be early by."""


class MockPrefillQueue:
    """Calls ``on_done`` for each prompt when it is computed. ``begin`` says how many of a prompt's
    tokens are cached, when its turn comes. One timer, whatever waits."""

    def __init__(
        self,
        cost: PrefillCost,
        begin: Callable[[MockJob], int],
        on_done: Callable[[MockJob], None],
    ) -> None:
        self.cost = cost
        self._begin = begin
        self._on_done = on_done
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, MockJob]] = []
        self._waiting: dict[MockJob, None] = {}
        self._current: MockJob | None = None
        self._done_at = 0.0
        self._timer: asyncio.Handle | None = None

    def add(self, job: MockJob) -> None:
        job.cached_tokens = self._begin(job)
        promised = job.spec.first_token_seconds
        job.deadline = job.arrived_at + promised + self._work(job) if promised else math.inf
        self._waiting[job] = None
        turn = min(job.deadline, job.arrived_at + PATIENCE_SECONDS)
        heapq.heappush(self._heap, (turn, next(self._numbers), job))
        if self._current is None:
            self._take_next(job.arrived_at)
            self._arm()

    def remove(self, job: MockJob) -> None:
        """Does nothing for one that is not here."""
        self._waiting.pop(job, None)
        if job is self._current:
            self._stop_timer()
            self._take_next(asyncio.get_running_loop().time())
            self._arm()

    @property
    def waiting(self) -> list[MockJob]:
        """Those that have not begun."""
        return list(self._waiting)

    @property
    def num_running(self) -> int:
        return int(self._current is not None)

    @property
    def queued_tokens(self) -> int:
        return sum(len(job.spec.token_ids) - job.cached_tokens for job in self._here)

    def queue(self, now: float) -> tuple[QueuedWork, ...]:
        """By deadline, as a worker reports it."""
        queue = []
        for job in sorted(self._here, key=lambda job: job.deadline):
            left = self._done_at - now if job is self._current else self._work(job)
            deadline = None if job.deadline == math.inf else job.deadline - now
            queue.append(QueuedWork(deadline, max(left, 0.0)))
        if len(queue) > MAX_QUEUED:
            rest = sum(work.work_seconds for work in queue[MAX_QUEUED - 1 :])
            queue[MAX_QUEUED - 1 :] = [QueuedWork(None, rest)]
        return tuple(queue)

    def close(self) -> None:
        self._stop_timer()
        self._waiting.clear()
        self._current = None

    # -- one after the other -----------------------------------------------------------------

    @property
    def _here(self) -> list[MockJob]:
        return [*self._waiting, *([self._current] if self._current is not None else [])]

    def _work(self, job: MockJob) -> float:
        return self.cost.seconds(len(job.spec.token_ids) - job.cached_tokens, job.cached_tokens)

    def _take_next(self, at: float) -> None:
        """It begins as of ``at``: what timers are late by is not lost."""
        self._current = None
        while self._heap and self._current is None:
            _, _, job = heapq.heappop(self._heap)
            if job in self._waiting:
                del self._waiting[job]
                self._current = job
        if self._current is not None:
            self._current.cached_tokens = self._begin(self._current)
            self._done_at = at + self._work(self._current)

    def _arm(self) -> None:
        if self._current is None or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if self._done_at <= loop.time():
            self._timer = loop.call_soon(self._finish)
        else:
            self._timer = loop.call_at(self._done_at, self._finish)

    def _finish(self) -> None:
        """All that are done by now."""
        self._timer = None
        latest = asyncio.get_running_loop().time() + TIMER_SECONDS
        while self._current is not None and self._done_at <= latest:
            job = self._current
            self._take_next(self._done_at)
            self._on_done(job)
        self._arm()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
