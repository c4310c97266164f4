"""A simulated prefill worker. It runs one step at a time, and assigns the step's token budget to
prompts by their tenants' virtual finish times (:mod:`baton.core.fairness`) and, within a tenant, in
the configured order (:mod:`baton.core.prefill_order`)."""

import math
from collections.abc import Callable
from itertools import islice
from operator import attrgetter

from baton.core.cost import PrefillCost
from baton.core.fairness import VirtualTokenCounters
from baton.core.ids import WorkerId
from baton.core.prefill_order import (
    PrefillOrder,
    allocate_step_tokens,
    seconds_beside_late,
)
from conductor.load_tracker import PrefillLoadReport
from conductor.policy.snapshot import QueuedPrefill
from simulator.event_queue import EventQueue
from simulator.host_cores import Cores, OwnCores
from simulator.request import SimulatedRequest

RANKED_JOBS = 512
"""The number of prompts, from the oldest on, that are considered for a step."""

REPORTED_JOBS = 128
"""The number of prompts, from the oldest on, that a report lists; for all others, it has only their
total work."""

_DEADLINE = attrgetter("deadline_seconds", "work_seconds")
_WORK = attrgetter("work_seconds")
_RANK = attrgetter("rank")


class SimulatedPrefillWorker:
    """Simulates a prefill worker. A prompt's KV occupies memory from its first chunk until
    :meth:`release`. ``on_last_chunk`` is called when a prompt's last chunk starts, which is the
    time to reserve memory on the decode worker; ``on_done`` is called when that chunk has ended.
    ``busy_seconds`` is the duration of all steps on cores of its own."""

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
        self.slowdown_factor = 1.0
        self.cores: Cores = OwnCores(events)
        self.busy_seconds = 0.0
        self._events = events
        self._cost = cost
        self._order = order
        self._step_tokens = step_tokens
        self._capacity_tokens = capacity_tokens
        self._on_last_chunk = on_last_chunk
        self._on_done = on_done
        self._jobs: dict[SimulatedRequest, QueuedPrefill] = {}
        """The work that remains for each prompt after the current step, with its deadline."""
        self._queued_tokens = 0
        self._overdue_seconds = 0.0
        """The remaining work of the overdue prompts in the last step."""
        self._counters = VirtualTokenCounters()
        self._kv_tokens: dict[SimulatedRequest, int] = {}
        self._num_kv_tokens = 0
        self._step_shares: dict[SimulatedRequest, int] = {}
        """Tokens per prompt in the current step."""
        self._busy = False
        self._step_ends_work = 0.0
        """The time of the cores' clock when the current step will end."""
        self._num_first_tokens = self._num_late_first_tokens = 0
        self._incarnation = 0
        self.num_changes = 0

    def submit(self, job: SimulatedRequest) -> None:
        self._jobs[job] = self._remaining_work(job, 0)
        self._queued_tokens += job.num_remaining
        self._counters.join(job.waiting.tenant)
        job.rank_until_seconds = -math.inf
        self.num_changes += 1
        self._events.schedule(job.ready_at_seconds, self._step)

    def release(self, job: SimulatedRequest) -> None:
        """Free the memory of a prompt's KV, which the decode worker has imported."""
        self._num_kv_tokens -= self._kv_tokens.pop(job, 0)
        self._step()

    def cancel(self, job: SimulatedRequest) -> None:
        """Remove a request, whether its prompt is waiting, being computed or already computed."""
        share = self._step_shares.pop(job, 0)
        if self._jobs.pop(job, None) is not None:
            self._queued_tokens -= job.num_remaining - share
            if job not in self._kv_tokens:
                self._counters.leave(job.waiting.tenant)
        self._num_kv_tokens -= self._kv_tokens.pop(job, 0)
        self.num_changes += 1
        self._events.schedule(self._events.now_seconds, self._step)

    def crash(self) -> list[SimulatedRequest]:
        """Lose all state, as in a crash. Return the requests that were on this worker."""
        lost = list({**self._jobs, **self._kv_tokens})
        self._incarnation += 1
        self.num_changes += 1
        for state in (self._jobs, self._kv_tokens, self._step_shares):
            state.clear()
        self._counters = VirtualTokenCounters()
        self._num_kv_tokens = self._queued_tokens = 0
        self._overdue_seconds = 0.0
        self._set_busy(False)
        return lost

    def report(self) -> PrefillLoadReport:
        now = self._events.now_seconds
        busy = max(self.cores.seconds_until(self._step_ends_work), 0.0) if self._busy else 0.0
        work = list(self._jobs.values())
        queue = work[:REPORTED_JOBS]
        if len(work) > REPORTED_JOBS:
            queue.append(
                QueuedPrefill(math.inf, sum(map(_WORK, islice(work, REPORTED_JOBS, None))))
            )
        queue.sort(key=_DEADLINE)
        num_overdue = sum(job.deadline_seconds < now for job in self._jobs)
        return PrefillLoadReport(
            now,
            busy,
            tuple(queue),
            len(work),
            self._queued_tokens,
            self._num_first_tokens + num_overdue,
            self._num_late_first_tokens + num_overdue,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if the counters of tokens and memory don't match the requests."""
        assert sum(self._kv_tokens.values()) == self._num_kv_tokens, "held tokens"
        assert self._num_kv_tokens <= self._capacity_tokens or len(self._kv_tokens) == 1, "memory"
        assert self._step_shares.keys() <= self._kv_tokens.keys() & self._jobs.keys(), "shares"
        assert self._busy or not self._step_shares, "a step that never ends"
        left = sum(job.num_remaining - self._step_shares.get(job, 0) for job in self._jobs)
        assert left == self._queued_tokens, "queued tokens"
        assert all(job.num_remaining > 0 for job in self._jobs), "a prompt that was computed waits"

    @property
    def is_idle(self) -> bool:
        return not (self._busy or self._jobs or self._kv_tokens)

    def _remaining_work(self, job: SimulatedRequest, share: int) -> QueuedPrefill:
        """Return the request's deadline, and the seconds of prefill that remain once ``share`` more
        tokens of its prompt are computed."""
        done = job.num_computed + share
        seconds = self._cost.seconds(job.num_prompt_tokens - done, done)
        return QueuedPrefill(job.deadline_seconds, seconds * self.slowdown_factor)

    def _step(self) -> None:
        if self._busy or not self._jobs:
            return
        now, budget, seconds = self._events.now_seconds, self._step_tokens, 0.0
        last_chunks = []
        for job, limit in self._divide_budget(self._ranked(now), now):
            if job not in self._kv_tokens and not self._allocate_kv(job):
                continue
            count = min(job.num_remaining, limit, budget)
            pairs = count * (job.num_computed + count / 2)
            seconds += self._cost.per_token_seconds * count + self._cost.per_pair_seconds * pairs
            self._step_shares[job] = count
            self._counters.charge(job.waiting.tenant, count, 0)
            self._jobs[job] = self._remaining_work(job, count)
            job.rank_until_seconds = -math.inf
            budget -= count
            if count == job.num_remaining:
                last_chunks.append(job)
            if budget == 0:
                break
        if not self._step_shares:
            return
        self._set_busy(True)
        self._queued_tokens -= self._step_tokens - budget
        self.num_changes += 1
        seconds = (seconds + self._cost.fixed_seconds) * self.slowdown_factor
        self.busy_seconds += seconds
        self._step_ends_work, life = self.cores.now_work + seconds, self._incarnation
        self.cores.schedule(self._step_ends_work, lambda: self._finish(life))
        for job in last_chunks:
            self._on_last_chunk(job)

    def _divide_budget(
        self, ranked: list[SimulatedRequest], now: float
    ) -> list[tuple[SimulatedRequest, int]]:
        if not self._order.is_preemptive or len(ranked) < 2:
            self._overdue_seconds = 0.0
            return [(job, self._step_tokens) for job in ranked]
        overdue = [job for job in ranked if job.waiting.is_overdue(now)]
        self._overdue_seconds = sum(job.waiting.remaining_seconds for job in overdue)
        least_served = self._counters.least_served({job.waiting.tenant for job in ranked})
        shares = allocate_step_tokens(
            [job.waiting for job in ranked], now, self._step_tokens, least_served
        )
        return [(ranked[index], limit) for index, limit in shares]

    def _ranked(self, now: float) -> list[SimulatedRequest]:
        window = islice(self._jobs, RANKED_JOBS)
        ready = [job for job in window if job.ready_at_seconds <= now]
        if len(ready) > 1:
            for job in ready:
                if job.rank_until_seconds < now or job not in self._kv_tokens:
                    self._rank(job, now)
            ready.sort(key=_RANK)
            if self._counters.has_several_tenants:
                finishes = self._counters.virtual_finishes(
                    (job.waiting.tenant, job.num_remaining, 1.0) for job in ready
                )
                finish = dict(zip(ready, finishes, strict=True))
                ready.sort(key=lambda job: (job.rank[0], finish[job]))
        return ready

    def _rank(self, job: SimulatedRequest, now: float) -> None:
        """Update a request's rank. That of a begun prompt is valid until more of it is computed, or
        until it is too late to meet the deadline; nothing else changes it."""
        waiting = job.waiting
        seconds = self._cost.seconds(job.num_remaining, job.num_computed)
        is_new = job not in self._kv_tokens
        waiting.remaining_seconds = (
            seconds_beside_late(seconds, self._overdue_seconds) if is_new else seconds
        )
        waiting.cached_tokens, waiting.new_tokens = job.num_computed, job.num_remaining
        waits = not self._order.is_preemptive and job not in self._kv_tokens
        job.rank = (waits, self._order.rank(waiting, now), job.number)
        latest_start = waiting.latest_start_seconds
        job.rank_until_seconds = latest_start if now <= latest_start else math.inf

    def _allocate_kv(self, job: SimulatedRequest) -> bool:
        tokens = job.num_prompt_tokens
        if self._kv_tokens and self._num_kv_tokens + tokens > self._capacity_tokens:
            return False
        self._kv_tokens[job] = tokens
        self._counters.leave(job.waiting.tenant)
        self._num_kv_tokens += tokens
        return True

    def _finish(self, life: int) -> None:
        if life != self._incarnation:
            return
        shares, self._step_shares, self._busy = self._step_shares, {}, False
        self.num_changes += 1
        for job, count in shares.items():
            job.num_computed += count
            if job.num_remaining == 0:
                del self._jobs[job]
                self._num_first_tokens += 1
                self._num_late_first_tokens += self._events.now_seconds > job.deadline_seconds
                self._on_done(job)
        self._step()
        self.cores.set_busy(self.id, busy=self._busy)

    def _set_busy(self, busy: bool) -> None:
        self._busy = busy
        self.cores.set_busy(self.id, busy=busy)
