"""A simulated prefill worker: one step at a time, its budget of tokens shared in order of rank."""

import math
from collections.abc import Callable
from itertools import islice
from operator import attrgetter

from baton.core.cost import PrefillCost
from baton.core.ids import WorkerId
from baton.core.prefill_order import PrefillOrder
from conductor.load_tracker import PrefillLoadReport
from conductor.policy.snapshot import QueuedPrefill
from simulator.event_queue import EventQueue
from simulator.request import SimulatedRequest

RANKED_JOBS = 512
"""The oldest, which are looked at for a step."""

REPORTED_JOBS = 128
"""The oldest, which a report names; of all others it tells the sum."""


_DUE = attrgetter("deadline_seconds", "work_seconds")
_WORK = attrgetter("work_seconds")
_RANK = attrgetter("rank")


class SimulatedPrefillWorker:
    """A prompt's KV is held from its first chunk until :meth:`release`. ``on_last_chunk`` is told
    when a prompt's last chunk begins (it is time to ask for room to decode), ``on_done`` when it
    has ended."""

    def __init__(
        self,
        worker_id: WorkerId,
        events: EventQueue,
        cost: PrefillCost,
        order: PrefillOrder,
        *,
        step_tokens: int,
        capacity_tokens: int,
        on_last_chunk: Callable[[SimulatedRequest], None],
        on_done: Callable[[SimulatedRequest], None],
    ) -> None:
        self.id = worker_id
        self.slowness = 1.0
        self.busy_seconds = 0.0
        self._events = events
        self._cost = cost
        self._order = order
        self._step_tokens = step_tokens
        self._capacity_tokens = capacity_tokens
        self._on_last_chunk = on_last_chunk
        self._on_done = on_done
        self._jobs: dict[SimulatedRequest, QueuedPrefill] = {}
        """What each will still have to compute after the step that is under way."""
        self._queued_tokens = 0
        self._held: dict[SimulatedRequest, int] = {}
        self._held_tokens = 0
        self._shares: dict[SimulatedRequest, int] = {}
        """Of the step that is under way."""
        self._busy = False
        self._step_ends_seconds = 0.0
        self._life = 0
        self.num_changes = 0

    def submit(self, job: SimulatedRequest) -> None:
        self._jobs[job] = self._due(job, 0)
        self._queued_tokens += job.num_remaining
        job.rank_until_seconds = -math.inf
        self.num_changes += 1
        self._events.at(job.ready_seconds, self._step)

    def release(self, job: SimulatedRequest) -> None:
        """The decode worker has it, or nobody wants it any more."""
        self._held_tokens -= self._held.pop(job, 0)
        self._step()

    def cancel(self, job: SimulatedRequest) -> None:
        """Nobody wants it any more."""
        share = self._shares.pop(job, 0)
        if self._jobs.pop(job, None) is not None:
            self._queued_tokens -= job.num_remaining - share
        self._held_tokens -= self._held.pop(job, 0)
        self.num_changes += 1
        self._events.at(self._events.now_seconds, self._step)

    def die(self) -> list[SimulatedRequest]:
        """Forgets everything. Returns whose prompts it had."""
        lost = list({**self._jobs, **self._held})
        self._life += 1
        self.num_changes += 1
        for had in (self._jobs, self._held, self._shares):
            had.clear()
        self._held_tokens = self._queued_tokens = 0
        self._busy = False
        return lost

    def report(self) -> PrefillLoadReport:
        now = self._events.now_seconds
        busy = max(self._step_ends_seconds - now, 0.0) if self._busy else 0.0
        dues = list(self._jobs.values())
        queue = dues[:REPORTED_JOBS]
        if len(dues) > REPORTED_JOBS:
            queue.append(
                QueuedPrefill(math.inf, sum(map(_WORK, islice(dues, REPORTED_JOBS, None))))
            )
        queue.sort(key=_DUE)
        return PrefillLoadReport(now, busy, tuple(queue), len(dues), self._queued_tokens)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books don't balance."""
        assert sum(self._held.values()) == self._held_tokens, "held tokens"
        assert self._held_tokens <= self._capacity_tokens or len(self._held) == 1, "memory"
        assert self._shares.keys() <= self._held.keys() & self._jobs.keys(), "shares"
        assert self._busy or not self._shares, "a step that never ends"
        left = sum(job.num_remaining - self._shares.get(job, 0) for job in self._jobs)
        assert left == self._queued_tokens, "queued tokens"
        assert all(job.num_remaining > 0 for job in self._jobs), "a prompt that was computed waits"

    @property
    def is_idle(self) -> bool:
        return not (self._busy or self._jobs or self._held)

    def _due(self, job: SimulatedRequest, share: int) -> QueuedPrefill:
        """Once so much more of it has been computed."""
        done = job.num_computed + share
        seconds = self._cost.seconds(job.num_prompt_tokens - done, done)
        return QueuedPrefill(job.deadline_seconds, seconds * self.slowness)

    def _step(self) -> None:
        if self._busy or not self._jobs:
            return
        now, budget, seconds = self._events.now_seconds, self._step_tokens, 0.0
        last_chunks = []
        for job in self._ranked(now):
            if job not in self._held and not self._hold(job):
                continue
            count = min(job.num_remaining, budget)
            pairs = count * (job.num_computed + count / 2)
            seconds += self._cost.per_token_seconds * count + self._cost.per_pair_seconds * pairs
            self._shares[job] = count
            self._jobs[job] = self._due(job, count)
            job.rank_until_seconds = -math.inf
            budget -= count
            if count == job.num_remaining:
                last_chunks.append(job)
            if budget == 0:
                break
        if not self._shares:
            return
        self._busy = True
        self._queued_tokens -= self._step_tokens - budget
        self.num_changes += 1
        seconds = (seconds + self._cost.fixed_seconds) * self.slowness
        self.busy_seconds += seconds
        self._step_ends_seconds, life = now + seconds, self._life
        self._events.at(self._step_ends_seconds, lambda: self._finish(life))
        for job in last_chunks:
            self._on_last_chunk(job)

    def _ranked(self, now: float) -> list[SimulatedRequest]:
        window = islice(self._jobs, RANKED_JOBS)
        ready = [job for job in window if job.ready_seconds <= now]
        if len(ready) > 1:
            for job in ready:
                if job.rank_until_seconds < now:
                    self._rank(job, now)
            ready.sort(key=_RANK)
        return ready

    def _rank(self, job: SimulatedRequest, now: float) -> None:
        """It stays until more has been computed, or until it is too late to be in time: of all
        orders, time changes no more than that."""
        waiting = job.waiting
        waiting.remaining_seconds = self._cost.seconds(job.num_remaining, job.num_computed)
        waiting.cached_tokens = job.num_computed
        waits = not self._order.preemptive and job not in self._held
        job.rank = (waits, self._order.rank(waiting, now), job.number)
        latest_start = waiting.deadline_seconds - waiting.remaining_seconds
        job.rank_until_seconds = latest_start if now <= latest_start else math.inf

    def _hold(self, job: SimulatedRequest) -> bool:
        tokens = job.num_prompt_tokens
        if self._held and self._held_tokens + tokens > self._capacity_tokens:
            return False
        self._held[job] = tokens
        self._held_tokens += tokens
        return True

    def _finish(self, life: int) -> None:
        if life != self._life:
            return
        shares, self._shares, self._busy = self._shares, {}, False
        self.num_changes += 1
        for job, count in shares.items():
            job.num_computed += count
            if job.num_remaining == 0:
                del self._jobs[job]
                self._on_done(job)
        self._step()
