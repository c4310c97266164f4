"""A simulated prefill worker: one step at a time, its budget of tokens shared in order of rank."""

import math
from collections.abc import Callable
from itertools import islice

from baton.core.cost import PrefillCost
from baton.core.ids import WorkerId
from baton.core.order import Order, Rank
from conductor.ledger import PrefillReport
from conductor.policy.fleet import Due
from conductor.simulator.events import Events
from conductor.simulator.job import Job

RANKED_JOBS = 512
"""The oldest, which are looked at for a step."""

REPORTED_JOBS = 128
"""The oldest, which a report names; of all others it tells the sum."""


class PrefillWorker:
    """A prompt's KV is held from its first chunk until :meth:`release`. ``on_last_chunk`` is told
    when a prompt's last chunk begins (it is time to ask for room to decode), ``on_done`` when it
    has ended."""

    def __init__(
        self,
        worker_id: WorkerId,
        events: Events,
        cost: PrefillCost,
        order: Order,
        *,
        step_tokens: int,
        capacity_tokens: int,
        on_last_chunk: Callable[[Job], None],
        on_done: Callable[[Job], None],
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
        self._jobs: dict[Job, None] = {}
        self._held: dict[Job, int] = {}
        self._held_tokens = 0
        self._shares: dict[Job, int] = {}
        """Of the step that is under way."""
        self._step_ends_seconds = 0.0
        self._life = 0
        self.num_changes = 0

    def submit(self, job: Job) -> None:
        self._jobs[job] = None
        self.num_changes += 1
        self._events.at(job.ready_seconds, self._step)

    def release(self, job: Job) -> None:
        """The decode worker has it, or nobody wants it any more."""
        self._held_tokens -= self._held.pop(job, 0)
        self._step()

    def cancel(self, job: Job) -> None:
        """Nobody wants it any more."""
        self._jobs.pop(job, None)
        self.num_changes += 1
        self.release(job)

    def die(self) -> list[Job]:
        """Forgets everything. Returns whose prompts it had."""
        lost = list({**self._jobs, **self._held})
        self._life += 1
        self.num_changes += 1
        for had in (self._jobs, self._held, self._shares):
            had.clear()
        self._held_tokens = 0
        return lost

    def report(self) -> PrefillReport:
        now = self._events.now_seconds
        busy = max(self._step_ends_seconds - now, 0.0) if self._shares else 0.0
        jobs = list(self._jobs)
        queue = [self._due(job) for job in jobs[:REPORTED_JOBS]]
        if len(jobs) > REPORTED_JOBS:
            rest = sum(self._due(job).work_seconds for job in jobs[REPORTED_JOBS:])
            queue.append(Due(math.inf, rest))
        queue.sort()
        tokens = sum(job.num_remaining - self._shares.get(job, 0) for job in jobs)
        return PrefillReport(now, busy, tuple(queue), len(jobs), tokens)

    def _due(self, job: Job) -> Due:
        done = job.num_computed + self._shares.get(job, 0)
        seconds = self._cost.seconds(job.num_prompt_tokens - done, done)
        return Due(job.deadline_seconds, seconds * self.slowness)

    def _step(self) -> None:
        if self._shares or not self._jobs:
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
            budget -= count
            if count == job.num_remaining:
                last_chunks.append(job)
            if budget == 0:
                break
        if not self._shares:
            return
        self.num_changes += 1
        seconds = (seconds + self._cost.fixed_seconds) * self.slowness
        self.busy_seconds += seconds
        self._step_ends_seconds, life = now + seconds, self._life
        self._events.at(self._step_ends_seconds, lambda: self._finish(life))
        for job in last_chunks:
            self._on_last_chunk(job)

    def _ranked(self, now: float) -> list[Job]:
        window = islice(self._jobs, RANKED_JOBS)
        ready = [job for job in window if job.ready_seconds <= now]
        if len(ready) < 2:
            return ready

        def rank(job: Job) -> tuple[bool, Rank, int]:
            waiting = job.waiting
            waiting.remaining_seconds = self._cost.seconds(job.num_remaining, job.num_computed)
            waiting.cached_tokens = job.num_computed
            waits = not self._order.preemptive and job not in self._held
            return waits, self._order.rank(waiting, now), job.number

        ready.sort(key=rank)
        return ready

    def _hold(self, job: Job) -> bool:
        tokens = job.num_prompt_tokens
        if self._held and self._held_tokens + tokens > self._capacity_tokens:
            return False
        self._held[job] = tokens
        self._held_tokens += tokens
        return True

    def _finish(self, life: int) -> None:
        if life != self._life:
            return
        shares, self._shares = self._shares, {}
        self.num_changes += 1
        for job, count in shares.items():
            job.num_computed += count
            if job.num_remaining == 0:
                del self._jobs[job]
                self._on_done(job)
        self._step()
