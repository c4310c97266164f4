"""A simulated decode worker: continuous batching, many steps at once where nothing changes."""

import heapq
import math
from collections import deque
from collections.abc import Callable

from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import WorkerId
from conductor.load_tracker import DecodeLoadReport
from simulator.event_queue import EventQueue
from simulator.request import SimulatedRequest


class SimulatedDecodeWorker:
    """Room for a job is given before its KV comes, first come first served: for its prompt and
    the answer that is to be expected. ``on_room`` is told of that, ``on_done`` of the last token.
    When answers outgrow what was expected and memory is full, who joined last leaves the batch
    (preemption), and is the first to get room again; its KV waits in the host's store."""

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
        self.slowness = 1.0
        self.most_tokens = 0
        self.num_preempted = 0
        self.num_made_tokens = 0
        self._events = events
        self._cost = cost
        self._prefill_cost = prefill_cost
        self._capacity_tokens = capacity_tokens
        self._max_batch = max_batch
        self._on_room = on_room
        self._on_done = on_done
        self._announced: dict[SimulatedRequest, None] = {}
        self._waiting: deque[SimulatedRequest] = deque()
        self._coming_tokens = self._coming_expected_tokens = 0
        """Of those two: what they bring, and what that is expected to grow to."""
        self._with_room: dict[SimulatedRequest, None] = {}
        self._promised_tokens = 0
        self._arriving_tokens = 0
        """Of those with room that are not in the batch."""
        self._joining: list[SimulatedRequest] = []
        self._ends: list[tuple[int, int, SimulatedRequest]] = []
        """Who is in the batch, and after which step each has finished."""
        self._context_tokens = 0
        self._step = 0
        self._since_seconds = 0.0
        """The last moment that is accounted for."""
        self._plan_number = 0

    def announce(self, job: SimulatedRequest) -> None:
        """It was placed here, and will come."""
        self._announced[job] = None
        self._expect(job, 1)

    def ask_for_room(self, job: SimulatedRequest) -> None:
        """It was announced."""
        del self._announced[job]
        self._waiting.append(job)
        self._give_room()

    def join(self, job: SimulatedRequest) -> None:
        """Its KV is here; it takes part from the next step on."""
        self._joining.append(job)
        self._catch_up()

    def cancel(self, job: SimulatedRequest) -> None:
        """Nobody wants it any more; it had not joined."""
        if job in self._with_room:
            self._arriving_tokens -= job.context_tokens
            self._free(job)
        else:
            self._expect(job, -1)
            if job in self._announced:
                del self._announced[job]
            else:
                self._waiting.remove(job)
        self._events.at(self._events.now_seconds, self._give_room)

    def leave(self, job: SimulatedRequest) -> None:
        """All its tokens were made already."""
        self._arriving_tokens -= job.context_tokens
        self._free(job)
        job.finished_seconds = self._events.now_seconds
        self._on_done(job)
        self._give_room()

    def die(self) -> list[SimulatedRequest]:
        """Forgets everything. Returns whose answers it had or was to have."""
        if self._batch:
            self._count(self._steps_until(self._events.now_seconds))
        for _, _, job in self._ends:
            self._count_out(job)
            if job.first_token_seconds > self._events.now_seconds:
                job.first_token_seconds, job.num_computed = -1.0, 0  # it was just being read
        lost = [*self._announced, *self._waiting, *self._with_room]
        for had in (self._announced, self._waiting, self._with_room, self._joining, self._ends):
            had.clear()
        self._promised_tokens = self._context_tokens = self._arriving_tokens = 0
        self._coming_tokens = self._coming_expected_tokens = 0
        self._plan_number += 1
        return lost

    def report(self) -> DecodeLoadReport:
        requests = len(self._announced) + len(self._waiting) + len(self._with_room)
        held = self._held_tokens
        promised = max(self._promised_tokens, held) + self._coming_expected_tokens
        context = held + self._coming_tokens
        return DecodeLoadReport(self._events.now_seconds, requests, context, promised)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books don't balance."""
        coming = [*self._announced, *self._waiting]
        assert sum(job.num_prompt_tokens for job in coming) == self._coming_tokens, "coming"
        expected = sum(job.expected_tokens for job in coming)
        assert expected == self._coming_expected_tokens, "expected of those that come"
        promised = sum(job.expected_tokens for job in self._with_room)
        assert promised == self._promised_tokens, "promised tokens"
        assert promised <= self._capacity_tokens or len(self._with_room) == 1, "memory"
        answering = {job for _, _, job in self._ends}
        assert answering <= self._with_room.keys(), "an answer without room"
        grown = sum(job.context_tokens + self._step - job.joined_step for job in answering)
        assert grown == self._context_tokens, "context"
        arriving = sum(job.context_tokens for job in self._with_room.keys() - answering)
        assert arriving == self._arriving_tokens, "arriving tokens"
        assert all(end > self._step for end, _, _ in self._ends), "an answer that has ended"

    @property
    def is_idle(self) -> bool:
        return not (self._announced or self._waiting or self._with_room)

    @property
    def _batch(self) -> int:
        return len(self._ends)

    @property
    def _held_tokens(self) -> int:
        """In use, or promised to KV that is on its way."""
        return self._context_tokens + self._arriving_tokens

    def _expect(self, job: SimulatedRequest, sign: int) -> None:
        """One more that comes, or one less."""
        self._coming_tokens += sign * job.num_prompt_tokens
        self._coming_expected_tokens += sign * job.expected_tokens

    # -- room ------------------------------------------------------------------------------

    def _give_room(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            taken = max(self._promised_tokens, self._held_tokens)
            full = taken + job.expected_tokens > self._capacity_tokens
            if self._with_room and (full or len(self._with_room) >= self._max_batch):
                return
            self._waiting.popleft()
            self._expect(job, -1)
            self._with_room[job] = None
            self._arriving_tokens += job.context_tokens
            self._promised_tokens += job.expected_tokens
            self._on_room(job)

    def _free(self, job: SimulatedRequest) -> None:
        del self._with_room[job]
        self._promised_tokens -= job.expected_tokens

    # -- steps -----------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Somebody waits: those steps that are over are counted, and a short plan made."""
        now = self._events.now_seconds
        if not self._batch:
            self._since_seconds = now
            self._take_in()
        else:
            self._count(self._steps_until(now))
        self._plan()

    def _seconds(self, steps: int) -> float:
        """Of so many steps with nobody coming or going; each context grows by one a step."""
        cost, batch = self._cost, len(self._ends)
        growth = batch * steps * (steps - 1) / 2
        context = cost.per_context_token_seconds * (self._context_tokens * steps + growth)
        return (steps * cost.base_seconds(batch) + context) * self.slowness

    def _steps_until(self, now: float) -> int:
        """Whole steps since ``_since_seconds`` that are over: the inverse of ``_seconds``. The one
        in which somebody finishes is not among them."""
        cost, batch = self._cost, len(self._ends)
        elapsed = max(now - self._since_seconds, 0.0) / self.slowness
        half = cost.per_context_token_seconds * batch / 2
        linear = cost.base_seconds(batch) - half
        linear += cost.per_context_token_seconds * self._context_tokens
        if half == 0:
            steps = elapsed / linear
        else:
            steps = (math.sqrt(linear * linear + 4 * half * elapsed) - linear) / (2 * half)
        return max(min(int(steps + 1e-6), self._ends[0][0] - self._step - 1), 0)

    def _count(self, steps: int) -> None:
        self._since_seconds += self._seconds(steps)
        self._step += steps
        made = len(self._ends) * steps
        self._context_tokens += made
        self.num_made_tokens += made
        self.most_tokens = max(self.most_tokens, self._context_tokens)

    def _plan(self) -> None:
        """The next event: somebody finishes, or the step ends that newcomers wait for."""
        self._plan_number += 1
        if not self._batch:
            return
        number = self._plan_number
        steps = self._ends[0][0] - self._step
        if self._joining:
            steps = 1
        elif self._batch > 1:
            steps = min(steps, max(self._spare_steps, 1))
        ends = self._since_seconds + self._seconds(steps)
        self._events.at(ends, lambda: self._reach(number, steps))

    def _reach(self, number: int, steps: int) -> None:
        if number != self._plan_number:
            return
        self._count(steps)
        self._since_seconds = self._events.now_seconds
        done = []
        while self._ends and self._ends[0][0] <= self._step:
            done.append(heapq.heappop(self._ends)[2])
        for job in done:
            job.finished_seconds = self._events.now_seconds
            self._count_out(job)
            self._free(job)
        while self._batch > 1 and self._spare_steps < 1:
            self._preempt()
        self._take_in()
        self._plan()
        for job in done:
            self._on_done(job)
        if done:
            self._give_room()

    @property
    def _spare_steps(self) -> int:
        """How many steps the memory has room for."""
        return (self._capacity_tokens - self._context_tokens) // self._batch

    def _preempt(self) -> None:
        last = max(self._ends, key=lambda end: (end[2].joined_step, end[1]))
        self._ends.remove(last)
        heapq.heapify(self._ends)
        job = last[2]
        self._count_out(job)
        self._free(job)
        job.joined_step = -1
        job.expected_tokens = max(job.expected_tokens, job.context_tokens)
        self._waiting.appendleft(job)
        self._expect(job, 1)
        self.num_preempted += 1

    def _count_out(self, job: SimulatedRequest) -> None:
        job.num_answered += self._step - job.joined_step
        self._context_tokens -= job.context_tokens

    def _take_in(self) -> None:
        """The first token was made with the prompt; who has a prompt to read holds up all."""
        for job in self._joining:
            if job.num_remaining:
                self._read(job)
            left = job.arrival.num_answer_tokens - job.num_answered
            heapq.heappush(self._ends, (self._step + left, job.number, job))
            job.joined_step = self._step
            self._arriving_tokens -= job.context_tokens
            self._context_tokens += job.context_tokens
        self._joining.clear()

    def _read(self, job: SimulatedRequest) -> None:
        seconds = self._prefill_cost.seconds(job.num_remaining, job.num_computed)
        self._since_seconds += seconds * self.slowness
        job.num_computed = job.num_prompt_tokens
        if job.first_token_seconds < 0:
            job.first_token_seconds = self._since_seconds
