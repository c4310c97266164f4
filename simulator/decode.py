"""A simulated decode worker with continuous batching. Consecutive steps with the same batch are
simulated as one event."""

import heapq
import math
from collections import deque
from collections.abc import Callable

from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import WorkerId
from conductor.load_tracker import DecodeLoadReport
from simulator.event_queue import EventQueue
from simulator.host_cores import Cores, OwnCores
from simulator.request import SimulatedRequest


class SimulatedDecodeWorker:
    """Simulates a decode worker. Memory for a request's prompt and expected answer is reserved
    before the request's KV is transferred, first come first served. ``on_room`` is called when the
    memory is reserved, ``on_done`` after the answer's last token. When answers get longer than
    expected and memory is full, the request that joined the batch last is preempted. Its KV is kept
    in the host's store, and it is the first request to get memory again."""

    def __init__(
        self,
        worker_id: WorkerId,
        events: EventQueue,
        cost: DecodeCost,
        prefill_cost: PrefillCost,
        *,
        capacity_tokens: int,
        max_batch: int,
        on_room: Callable[[SimulatedRequest], None],
        on_done: Callable[[SimulatedRequest], None],
    ) -> None:
        self.id = worker_id
        self.slowdown_factor = 1.0
        self.cores: Cores = OwnCores(events)
        self.max_context_tokens = 0
        self.num_preempted = 0
        self.num_generated_tokens = 0
        self._events = events
        self._cost = cost
        self._prefill_cost = prefill_cost
        self._capacity_tokens = capacity_tokens
        self._max_batch = max_batch
        self._on_room = on_room
        self._on_done = on_done
        self._announced: dict[SimulatedRequest, None] = {}
        self._waiting: deque[SimulatedRequest] = deque()
        self._incoming_tokens = self._incoming_expected_tokens = 0
        """Prompt tokens and expected tokens of the announced and waiting requests."""
        self._with_room: dict[SimulatedRequest, None] = {}
        self._reserved_tokens = 0
        self._arriving_tokens = 0
        """Context tokens of requests with reserved memory that are not in the batch."""
        self._joining: list[SimulatedRequest] = []
        self._ends: list[tuple[int, int, SimulatedRequest]] = []
        """A heap of the requests in the batch: (last step, request number, request)."""
        self._context_tokens = 0
        self._step = 0
        self._accounted_until_work = 0.0
        """The time up to which steps are accounted for, by the clock of the cores."""
        self._plan_number = 0

    def announce(self, job: SimulatedRequest) -> None:
        """Record a request that was placed on this worker, before its KV arrives."""
        self._announced[job] = None
        self._count_incoming(job, 1)

    def request_room(self, job: SimulatedRequest) -> None:
        """Request memory for a request that :meth:`announce` has recorded. ``on_room`` is called
        once the memory is reserved."""
        del self._announced[job]
        self._waiting.append(job)
        self._reserve_rooms()

    def join(self, job: SimulatedRequest) -> None:
        """Add a request to the batch, from the next step on. Its KV has arrived, or its prompt is
        prefilled locally as soon as it joins."""
        self._joining.append(job)
        self._account_until_now()

    def cancel(self, job: SimulatedRequest) -> None:
        """Remove a request that has not joined the batch."""
        if job in self._with_room:
            self._arriving_tokens -= job.context_tokens
            self._release_room(job)
        else:
            self._count_incoming(job, -1)
            if job in self._announced:
                del self._announced[job]
            else:
                self._waiting.remove(job)
        self._events.schedule(self._events.now_seconds, self._reserve_rooms)

    def finish_received(self, job: SimulatedRequest) -> None:
        """Finish a request whose answer has ended with the token that its prefill sampled. Its KV
        has arrived, but the request never joins the batch."""
        self._arriving_tokens -= job.context_tokens
        self._release_room(job)
        job.finished_at_seconds = self._events.now_seconds
        self._on_done(job)
        self._reserve_rooms()

    def crash(self) -> list[SimulatedRequest]:
        """Lose all state, as in a crash. Return all unfinished requests that were placed on this
        worker."""
        if self._batch:
            self._advance(self._steps_until(self.cores.now_work))
        for _, _, job in self._ends:
            self._remove_from_batch(job)
            if not 0 <= job.first_token_at_seconds <= self._events.now_seconds:
                job.first_token_at_seconds, job.num_computed = -1.0, 0  # was in its local prefill
        lost = [*self._announced, *self._waiting, *self._with_room]
        for state in (self._announced, self._waiting, self._with_room, self._joining, self._ends):
            state.clear()
        self._reserved_tokens = self._context_tokens = self._arriving_tokens = 0
        self._incoming_tokens = self._incoming_expected_tokens = 0
        self._plan_number += 1
        self.cores.set_busy(self.id, busy=False)
        return lost

    def report(self) -> DecodeLoadReport:
        requests = len(self._announced) + len(self._waiting) + len(self._with_room)
        held = self._used_tokens
        promised = max(self._reserved_tokens, held) + self._incoming_expected_tokens
        context = held + self._incoming_tokens
        return DecodeLoadReport(self._events.now_seconds, requests, context, promised)

    def check_integrity(self) -> None:
        """Raise AssertionError if the counters of tokens and memory don't match the requests."""
        incoming = [*self._announced, *self._waiting]
        assert sum(job.num_prompt_tokens for job in incoming) == self._incoming_tokens, "incoming"
        expected = sum(job.expected_tokens for job in incoming)
        assert expected == self._incoming_expected_tokens, "expected tokens of incoming requests"
        reserved = sum(job.expected_tokens for job in self._with_room)
        assert reserved == self._reserved_tokens, "reserved tokens"
        assert reserved <= self._capacity_tokens or len(self._with_room) == 1, "memory"
        answering = {job for _, _, job in self._ends}
        assert answering <= self._with_room.keys(), "an answer without reserved memory"
        grown = sum(job.context_tokens + self._step - job.joined_step for job in answering)
        assert grown == self._context_tokens, "context"
        arriving = sum(job.context_tokens for job in self._with_room.keys() - answering)
        assert arriving == self._arriving_tokens, "arriving tokens"
        assert all(end > self._step for end, _, _ in self._ends), "an ended answer in the batch"

    @property
    def is_idle(self) -> bool:
        return not (self._announced or self._waiting or self._with_room)

    @property
    def _batch(self) -> int:
        return len(self._ends)

    @property
    def _used_tokens(self) -> int:
        """The number of tokens whose KV is in use on this worker or is being transferred to it."""
        return self._context_tokens + self._arriving_tokens

    def _count_incoming(self, job: SimulatedRequest, sign: int) -> None:
        """Add an incoming request to the token counters (``sign`` is 1), or subtract it from them
        (-1)."""
        self._incoming_tokens += sign * job.num_prompt_tokens
        self._incoming_expected_tokens += sign * job.expected_tokens

    # -- memory ----------------------------------------------------------------------------

    def _reserve_rooms(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            taken = max(self._reserved_tokens, self._used_tokens)
            full = taken + job.expected_tokens > self._capacity_tokens
            if self._with_room and (full or len(self._with_room) >= self._max_batch):
                return
            self._waiting.popleft()
            self._count_incoming(job, -1)
            self._with_room[job] = None
            self._arriving_tokens += job.context_tokens
            self._reserved_tokens += job.expected_tokens
            self._on_room(job)

    def _release_room(self, job: SimulatedRequest) -> None:
        del self._with_room[job]
        self._reserved_tokens -= job.expected_tokens

    # -- steps -----------------------------------------------------------------------------

    def _account_until_now(self) -> None:
        """Count the steps that the batch has completed since steps were last counted. Then schedule
        the next event anew, since another request waits to join the batch. If the batch is empty,
        the request joins at once."""
        now = self.cores.now_work
        if not self._batch:
            self._accounted_until_work = now
            self._add_joining()
        else:
            self._advance(self._steps_until(now))
        self._schedule_next_event()

    def _seconds(self, steps: int) -> float:
        """Return the duration of ``steps`` steps with an unchanged batch; each context grows by one
        token per step."""
        cost, batch = self._cost, len(self._ends)
        growth = batch * steps * (steps - 1) / 2
        context = cost.per_context_token_seconds * (self._context_tokens * steps + growth)
        return (steps * cost.base_seconds(batch) + context) * self.slowdown_factor

    def _steps_until(self, now: float) -> int:
        """Return how many steps have been completed from ``_accounted_until_work`` to ``now``:
        the inverse of ``_seconds``. The step in which the next request finishes is never included,
        since the event that is scheduled for the end of that step counts it."""
        cost, batch = self._cost, len(self._ends)
        elapsed = max(now - self._accounted_until_work, 0.0) / self.slowdown_factor
        half = cost.per_context_token_seconds * batch / 2
        linear = cost.base_seconds(batch) - half
        linear += cost.per_context_token_seconds * self._context_tokens
        if half == 0:
            steps = elapsed / linear
        else:
            steps = (math.sqrt(linear * linear + 4 * half * elapsed) - linear) / (2 * half)
        return max(min(int(steps + 1e-6), self._ends[0][0] - self._step - 1), 0)

    def _advance(self, steps: int) -> None:
        self._accounted_until_work += self._seconds(steps)
        self._step += steps
        made = len(self._ends) * steps
        self._context_tokens += made
        self.num_generated_tokens += made
        self.max_context_tokens = max(self.max_context_tokens, self._context_tokens)

    def _schedule_next_event(self) -> None:
        """Schedule the next event. If requests wait to join the batch, this is the end of the
        current step; otherwise it is the step in which a request finishes or memory is full,
        whichever is first."""
        self._plan_number += 1
        self.cores.set_busy(self.id, busy=self._batch > 0)
        if not self._batch:
            return
        number = self._plan_number
        steps = self._ends[0][0] - self._step
        if self._joining:
            steps = 1
        elif self._batch > 1:
            steps = min(steps, max(self._spare_steps, 1))
        ends = self._accounted_until_work + self._seconds(steps)
        self.cores.schedule(ends, lambda: self._on_planned_event(number, steps))

    def _on_planned_event(self, number: int, steps: int) -> None:
        if number != self._plan_number:
            return
        self._advance(steps)
        self._accounted_until_work = self.cores.now_work
        done = []
        while self._ends and self._ends[0][0] <= self._step:
            done.append(heapq.heappop(self._ends)[2])
        for job in done:
            job.finished_at_seconds = self._events.now_seconds
            self._remove_from_batch(job)
            self._release_room(job)
        while self._batch > 1 and self._spare_steps < 1:
            self._preempt()
        self._add_joining()
        self._schedule_next_event()
        for job in done:
            self._on_done(job)
        if done:
            self._reserve_rooms()

    @property
    def _spare_steps(self) -> int:
        """The number of steps that the batch can run before the memory is full."""
        return (self._capacity_tokens - self._context_tokens) // self._batch

    def _preempt(self) -> None:
        last = max(self._ends, key=lambda end: (end[2].joined_step, end[1]))
        self._ends.remove(last)
        heapq.heapify(self._ends)
        job = last[2]
        self._remove_from_batch(job)
        self._release_room(job)
        job.joined_step = -1
        job.expected_tokens = max(job.expected_tokens, job.context_tokens)
        self._waiting.appendleft(job)
        self._count_incoming(job, 1)
        self.num_preempted += 1

    def _remove_from_batch(self, job: SimulatedRequest) -> None:
        job.num_generated_tokens += self._step - job.joined_step
        self._context_tokens -= job.context_tokens

    def _add_joining(self) -> None:
        """Add the waiting requests to the batch. Each has its first token from its prefill. If the
        prefill is local, it is run here and delays the whole batch."""
        for job in self._joining:
            if job.num_remaining:
                self._prefill_locally(job)
            remaining = job.arrival.num_answer_tokens - job.num_generated_tokens
            heapq.heappush(self._ends, (self._step + remaining, job.number, job))
            job.joined_step = self._step
            self._arriving_tokens -= job.context_tokens
            self._context_tokens += job.context_tokens
        self._joining.clear()

    def _prefill_locally(self, job: SimulatedRequest) -> None:
        seconds = self._prefill_cost.seconds(job.num_remaining, job.num_computed)
        self._accounted_until_work += seconds * self.slowdown_factor
        job.num_computed = job.num_prompt_tokens
        if job.first_token_at_seconds < 0:
            epoch = job.num_restarts

            def tell(seconds: float) -> None:
                if job.num_restarts == epoch:
                    job.first_token_at_seconds = seconds

            self.cores.tell_time(self._accounted_until_work, tell)
