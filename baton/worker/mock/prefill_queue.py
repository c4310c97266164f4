"""The prefill queue of a mock worker. Prompts are computed one after the other, at a configured
speed. As in a real worker, the one with the earliest virtual finish time is next
(:mod:`baton.core.fairness`), and deadlines order the prompts of a tenant."""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from operator import itemgetter

from baton.core.cost import PrefillCost
from baton.core.fairness import VirtualTokenCounters
from baton.core.worker_load import MAX_QUEUED, QueuedWork
from baton.worker.mock.job import MockJob

PATIENCE_SECONDS = 60.0
"""A prompt is never overtaken by one of its tenant that arrived this much later, as in a real
worker."""

TIMER_SECONDS = 0.001
"""How early a timer may fire: prompts that are done within this time count as done."""


class MockPrefillQueue:
    """Calls ``on_done`` for each prompt once it is computed. ``count_cached`` returns how many of a
    prompt's tokens are cached; it is called when the prompt is added, and again when its
    computation starts. There is one timer for all prompts. ``num_first_tokens`` counts the computed
    prompts that have a deadline, and ``num_late_first_tokens`` those computed after it."""

    def __init__(
        self,
        cost: PrefillCost,
        count_cached: Callable[[MockJob], int],
        on_done: Callable[[MockJob], None],
    ) -> None:
        self.cost = cost
        self._count_cached = count_cached
        self._on_done = on_done
        self._numbers = itertools.count()
        self._counters = VirtualTokenCounters()
        self._heaps: dict[bytes, list[tuple[float, int, MockJob]]] = {}
        """The waiting prompts of each tenant, and some that were removed."""
        self._waiting: dict[MockJob, None] = {}
        self._current: MockJob | None = None
        self._done_at = 0.0
        self._timer: asyncio.Handle | None = None
        self.num_first_tokens = self.num_late_first_tokens = 0

    def add(self, job: MockJob) -> None:
        job.cached_tokens = self._count_cached(job)
        slo = job.spec.ttft_slo_seconds
        job.deadline = job.arrived_at + slo + self._work_seconds(job) if slo else math.inf
        self._waiting[job] = None
        self._counters.join(job.spec.owner)
        rank = min(job.deadline, job.arrived_at + PATIENCE_SECONDS)
        heap = self._heaps.setdefault(job.spec.owner, [])
        heapq.heappush(heap, (rank, next(self._numbers), job))
        if self._current is None:
            self._start_next(job.arrived_at)
            self._schedule_finish()

    def remove(self, job: MockJob) -> None:
        """Remove a job; does nothing if it is not in the queue."""
        if job in self._waiting:
            self._stop_waiting(job)
        elif job is self._current:
            self._stop_timer()
            self._start_next(asyncio.get_running_loop().time())
            self._schedule_finish()

    @property
    def waiting(self) -> list[MockJob]:
        """The prompts whose computation has not started."""
        return list(self._waiting)

    @property
    def num_running(self) -> int:
        return int(self._current is not None)

    @property
    def queued_tokens(self) -> int:
        return sum(map(_num_new_tokens, self._unfinished))

    def num_overdue(self, now: float) -> int:
        """Return how many prompts have not been computed by their deadline."""
        return sum(job.deadline < now for job in self._unfinished)

    def queue(self, now: float) -> tuple[QueuedWork, ...]:
        """Return the remaining work of all prompts, ordered by deadline, in the form in which
        workers report it."""
        queue = []
        for job in sorted(self._unfinished, key=lambda job: job.deadline):
            remaining = self._done_at - now if job is self._current else self._work_seconds(job)
            deadline = None if job.deadline == math.inf else job.deadline - now
            queue.append(QueuedWork(deadline, max(remaining, 0.0)))
        if len(queue) > MAX_QUEUED:
            rest = sum(work.work_seconds for work in queue[MAX_QUEUED - 1 :])
            queue[MAX_QUEUED - 1 :] = [QueuedWork(None, rest)]
        return tuple(queue)

    def close(self) -> None:
        self._stop_timer()
        self._waiting.clear()
        self._current = None

    # -- timing ------------------------------------------------------------------------------

    @property
    def _unfinished(self) -> list[MockJob]:
        return [*self._waiting, *([self._current] if self._current is not None else [])]

    def _work_seconds(self, job: MockJob) -> float:
        return self.cost.seconds(_num_new_tokens(job), job.cached_tokens)

    def _start_next(self, at: float) -> None:
        """Start the next prompt as if the time were ``at``, so that timer delays do not add up."""
        self._current = job = self._next()
        if job is not None:
            self._stop_waiting(job)
            job.cached_tokens = self._count_cached(job)
            self._counters.charge(job.spec.owner, _num_new_tokens(job), 0, job.spec.weight)
            self._done_at = at + self._work_seconds(job)

    def _next(self) -> MockJob | None:
        """Return the waiting prompt with the earliest virtual finish time."""
        heads = []
        for tenant, heap in list(self._heaps.items()):
            while heap and heap[0][2] not in self._waiting:
                heapq.heappop(heap)
            if heap:
                heads.append(heap[0][2])
            else:
                del self._heaps[tenant]
        finishes = self._counters.virtual_finishes(
            (job.spec.owner, _num_new_tokens(job), job.spec.weight) for job in heads
        )
        return min(zip(finishes, heads, strict=True), key=itemgetter(0), default=(0.0, None))[1]

    def _stop_waiting(self, job: MockJob) -> None:
        del self._waiting[job]
        self._counters.leave(job.spec.owner)

    def _schedule_finish(self) -> None:
        if self._current is None or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if self._done_at <= loop.time():
            self._timer = loop.call_soon(self._finish)
        else:
            self._timer = loop.call_at(self._done_at, self._finish)

    def _finish(self) -> None:
        """Finish all prompts that are done by now."""
        self._timer = None
        latest = asyncio.get_running_loop().time() + TIMER_SECONDS
        while self._current is not None and self._done_at <= latest:
            job = self._current
            self.num_first_tokens += job.deadline < math.inf
            self.num_late_first_tokens += job.deadline < self._done_at
            self._start_next(self._done_at)
            self._on_done(job)
        self._schedule_finish()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _num_new_tokens(job: MockJob) -> int:
    return len(job.spec.token_ids) - job.cached_tokens
