"""A simulated worker that computes prompts and answers in the same steps, as aggregated engines do.

The schedule is that of vLLM's version 1 (``vllm/v1/core/sched/scheduler.py``): a step has a budget
of tokens. Running requests come first, each with its next token or the next chunk of its prompt;
what is left of the budget goes to waiting requests in the order of arrival, as long as memory
suffices for their whole prompts. If memory does not suffice for a running request, the request that
was admitted last is preempted: its KV is dropped, and computed again later.

Consecutive steps with answers only are simulated as one event.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.core.ids import WorkerId
from conductor.load_tracker import DecodeLoadReport, MixedLoadReport, PrefillLoadReport
from conductor.policy.snapshot import QueuedPrefill
from simulator.event_queue import EventQueue
from simulator.host_cores import Cores, OwnCores
from simulator.prefill import REPORTED_JOBS
from simulator.request import SimulatedRequest
from simulator.step_cost import StepCost, StepWork

SHARE_SECONDS = 5.0
"""The time constant of the moving average of the share of time that prompts take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedWorkerLimits:
    """The limits of a worker: ``capacity_blocks`` blocks of ``block_tokens`` tokens of KV,
    ``step_tokens`` tokens per step, and ``max_requests`` running requests."""

    block_tokens: int
    capacity_blocks: int
    step_tokens: int
    max_requests: int


@dataclass(slots=True, eq=False)
class _Run:
    """A request on this worker. ``num_computed`` of its ``target`` tokens (prompt and answer so
    far) have KV, in ``num_blocks`` blocks."""

    job: SimulatedRequest
    num_computed: int
    num_generated: int
    num_blocks: int = 0

    @property
    def target(self) -> int:
        return self.job.arrival.num_prompt_tokens + self.num_generated

    @property
    def num_left(self) -> int:
        """Number of tokens of the answer that are left to generate."""
        return max(self.job.arrival.num_answer_tokens, 1) - self.num_generated


_Share = tuple[_Run, int]
"""A request, and how many of its tokens a step computes."""


@dataclass(frozen=True, slots=True)
class _Load:
    """A worker's load, which stays the same until one of its requests changes. Answers slow prompts
    down by ``prompt_slowdown``. ``queue`` has the prompts that are not computed yet. All requests
    together have ``context_tokens`` tokens, and are expected to reach ``promised_tokens``."""

    prompt_slowdown: float
    queue: tuple[QueuedPrefill, ...]
    num_prompts: int
    prompt_tokens: int
    num_requests: int
    context_tokens: int
    promised_tokens: int


class SimulatedMixedWorker:
    """Has the interface of :class:`simulator.decode.SimulatedDecodeWorker`, as far as a request
    that is placed on one worker needs it. ``on_prefilled`` is called when a prompt has been
    computed, and ``on_done`` after an answer's last token."""

    def __init__(
        self,
        worker_id: WorkerId,
        events: EventQueue,
        cost: StepCost,
        limits: MixedWorkerLimits,
        *,
        on_prefilled: Callable[[SimulatedRequest], None],
        on_done: Callable[[SimulatedRequest], None],
    ) -> None:
        self.id = worker_id
        self.slowdown_factor = 1.0
        self.cores: Cores = OwnCores(events)
        self.num_preempted = 0
        self.num_generated_tokens = 0
        self._events = events
        self._cost = cost
        self._limits = limits
        self._on_prefilled = on_prefilled
        self._num_first_tokens = self._num_late_first_tokens = 0
        self._on_done = on_done
        self._announced: dict[SimulatedRequest, None] = {}
        self._waiting: deque[_Run] = deque()
        self._running: list[_Run] = []
        self._free_blocks = limits.capacity_blocks
        self._shares: list[_Share] = []
        """What the current step computes; empty if the worker is idle."""
        self._work = StepWork(0, 0, 0.0, 0)
        """The current step's work, from which its duration follows."""
        self._is_decode_only = True
        """True if the current step computes no prompt."""
        self._load: _Load | None = None
        """The worker's current load; None if it has to be measured again, since it has changed."""
        self._num_steps = 0
        """How many steps like the current one are simulated as one event; 0 if the worker is
        idle."""
        self._is_starting = False
        self._began_work = 0.0
        """The time of the cores' clock when the current event's first step began."""
        self._plan_number = 0
        self._prompt_share, self._recorded_seconds = 0.0, 0.0

    def announce(self, job: SimulatedRequest) -> None:
        """Record a request that was placed on this worker and fetches its prefix."""
        self._announced[job] = None
        self._load = None

    def request_room(self, job: SimulatedRequest) -> None:
        """Queue an announced request."""
        del self._announced[job]
        self._waiting.append(_Run(job, job.num_computed, job.num_generated_tokens - 1))
        self._load = None
        if self._num_steps > 1:
            self._stop_after_current_step()
        elif not self._shares and not self._is_starting:
            self._is_starting = True  # after all other requests that arrive at the same time
            self._events.schedule(self._events.now_seconds, self._start)

    def cancel(self, job: SimulatedRequest) -> None:
        """Remove an announced request."""
        del self._announced[job]
        self._load = None

    def crash(self) -> list[SimulatedRequest]:
        """Lose all state, as in a crash. Return all unfinished requests of this worker."""
        if self._shares:
            self._advance(min(self._steps_done(), self._num_steps - 1))
        for run in (*self._running, *self._waiting):
            job = run.job
            job.num_computed = min(run.num_computed, job.num_prompt_tokens)
            job.num_generated_tokens = run.num_generated + (job.num_remaining > 0)
        lost = [*self._announced, *(run.job for run in (*self._running, *self._waiting))]
        for state in (self._announced, self._waiting, self._running, self._shares):
            state.clear()
        self._free_blocks = self._limits.capacity_blocks
        self._num_steps = 0
        self._plan_number += 1
        self._load = None
        self.cores.set_busy(self.id, busy=False)
        return lost

    def report(self) -> MixedLoadReport:
        now = self._events.now_seconds
        computes_prompt = bool(self._shares) and not self._is_decode_only
        self._record_time(is_prompt=computes_prompt)
        if self._load is None:
            self._load = self._measure_load()
        load, busy = self._load, 0.0
        if computes_prompt:
            busy = max(self.cores.seconds_until(self._began_work + self._seconds(1)), 0.0)
        return MixedLoadReport(
            PrefillLoadReport(
                now,
                busy,
                load.queue,
                load.num_prompts,
                load.prompt_tokens,
                self._num_first_tokens,
                self._num_late_first_tokens,
            ),
            DecodeLoadReport(now, load.num_requests, load.context_tokens, load.promised_tokens),
            load.prompt_slowdown,
            self._prompt_share,
        )

    def _measure_load(self) -> _Load:
        """Return the current load. Prompt tokens that the current step computes count as computed:
        the report says separately how long the step still takes."""
        slowdown = self._prompt_slowdown()
        computing = {} if self._is_decode_only else dict(self._shares)
        runs = [*self._running, *self._waiting]
        left = []
        context = promised = 0
        for run in runs:
            target = run.target
            context += target
            promised += max(run.job.expected_tokens, target)
            if target - run.num_computed > 1:
                done = run.num_computed + computing.get(run, 0)
                if target > done:
                    left.append((run.job, done, target - done))
        for job in self._announced:
            context += job.num_prompt_tokens
            promised += job.expected_tokens
            if job.num_remaining > 0:
                left.append((job, job.num_computed, job.num_remaining))
        work = [
            QueuedPrefill(job.deadline_seconds, self._alone_seconds(count, done) * slowdown)
            for job, done, count in left
        ]
        queue = sorted(work[:REPORTED_JOBS])
        if rest := sum(each.work_seconds for each in work[REPORTED_JOBS:]):
            queue.append(QueuedPrefill(math.inf, rest))
        return _Load(
            slowdown,
            tuple(queue),
            len(left),
            sum(count for _, _, count in left),
            len(runs) + len(self._announced),
            context,
            promised,
        )

    def _alone_seconds(self, num_tokens: int, num_computed: int) -> float:
        """Return how long tokens of a prompt take in steps without answers."""
        cost, most = self._cost, self._limits.step_tokens
        seconds = cost.per_pair_seconds * num_tokens * (num_computed + num_tokens / 2)
        seconds += num_tokens // most * cost.base_seconds(most, 1)
        if rest := num_tokens % most:
            seconds += cost.base_seconds(rest, 1)
        return seconds * self.slowdown_factor

    def _prompt_slowdown(self) -> float:
        """Return by how much the answers that run now lengthen a step that is full of prompts."""
        answers = [run for run in self._running if run.num_generated]
        context = sum(run.target for run in answers)
        most = self._limits.step_tokens
        alone = self._cost.base_seconds(most, 1)
        room = max(most - len(answers), 1)
        beside = self._cost.base_seconds(most, 1 + len(answers))
        beside += self._cost.per_context_token_seconds * context
        return beside / alone * most / room

    def _record_time(self, *, is_prompt: bool) -> None:
        """Record what the time since the last record was used for."""
        now = self._events.now_seconds
        kept = math.exp(-(now - self._recorded_seconds) / SHARE_SECONDS)
        self._prompt_share = self._prompt_share * kept + (1 - kept) * is_prompt
        self._recorded_seconds = now

    def check_integrity(self) -> None:
        """Raise AssertionError if the counters of memory don't match the requests."""
        used = sum(run.num_blocks for run in self._running)
        assert used + self._free_blocks == self._limits.capacity_blocks, "blocks"
        assert all(run.num_blocks == 0 for run in self._waiting), "a waiting request has blocks"
        assert len(self._running) <= self._limits.max_requests, "too many requests"
        is_active = self._shares or self._is_starting
        assert is_active or not (self._running or self._waiting), "work, but no step"

    @property
    def is_idle(self) -> bool:
        return not (self._announced or self._waiting or self._running)

    # -- scheduling ------------------------------------------------------------------------

    def _start(self) -> None:
        self._is_starting = False
        if not self._shares:
            self._begin_step()

    def _begin_step(self) -> None:
        """Plan the next step and schedule its end. Do nothing if there is no request."""
        if not self._num_steps:
            self._record_time(is_prompt=False)  # the worker was idle
        self._shares = self._schedule()
        self._is_decode_only = all(count == 1 and run.num_generated for run, count in self._shares)
        self._work = self._work_of_step()
        self._load = None
        self._plan_number += 1
        self.cores.set_busy(self.id, busy=bool(self._shares))
        if not self._shares:
            self._num_steps = 0
            return
        self._began_work = self.cores.now_work
        self._num_steps = self._num_equal_steps()
        self._schedule_end()

    def _schedule(self) -> list[_Share]:
        budget, shares, preempts = self._limits.step_tokens, list[_Share](), False
        index = 0
        while index < len(self._running) and budget:
            run = self._running[index]
            count = min(run.target - run.num_computed, budget)
            while not self._allocate(run, run.num_computed + count):
                preempts = True
                last = self._running[-1]
                self._preempt(last)
                if last is run:
                    break
            if index == len(self._running):
                break
            shares.append((run, count))
            budget -= count
            index += 1
        while self._waiting and budget and not preempts:
            run = self._waiting[0]
            if len(self._running) == self._limits.max_requests or not self._fits(run):
                break
            self._waiting.popleft()
            count = min(run.target - run.num_computed, budget)
            self._allocate(run, run.num_computed + count)
            self._running.append(run)
            shares.append((run, count))
            budget -= count
        return shares

    def _fits(self, run: _Run) -> bool:
        """Whether memory suffices for a waiting request's whole prompt. A request that is alone
        may take all of it."""
        return self._blocks_for(run.target) <= self._free_blocks or not self._running

    def _allocate(self, run: _Run, num_tokens: int) -> bool:
        """Allocate the blocks for a request's first ``num_tokens`` tokens, if there are as many.
        A request that is alone gets what it needs: its length was validated."""
        missing = self._blocks_for(num_tokens) - run.num_blocks
        if missing > self._free_blocks and len(self._running) > 1:
            return False
        run.num_blocks += missing
        self._free_blocks -= missing
        return True

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_tokens)

    def _preempt(self, run: _Run) -> None:
        """Drop the KV of the request that was admitted last, and queue it again, first."""
        assert self._running[-1] is run
        self._running.pop()
        self._free(run)
        run.num_computed = 0
        self._waiting.appendleft(run)
        self.num_preempted += 1

    def _free(self, run: _Run) -> None:
        self._free_blocks += run.num_blocks
        run.num_blocks = 0

    # -- steps -----------------------------------------------------------------------------

    def _num_equal_steps(self) -> int:
        """Return how many steps, beginning with the current one, compute the next token of the same
        requests. A waiting request does not change that: it could not be admitted, and memory only
        gets less until a request finishes."""
        if not self._is_decode_only or len(self._shares) < len(self._running):
            return 1
        most = min(run.num_left for run, _ in self._shares)
        low, high = 1, most
        if len(self._shares) * (self._blocks_for(most) + 1) <= self._free_blocks:
            return most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._has_memory_for(middle) else (low, middle - 1)
        return low

    def _has_memory_for(self, steps: int) -> bool:
        """Whether memory suffices for this many steps with answers only."""
        runs = (run for run, _ in self._shares)
        missing = sum(self._blocks_for(run.num_computed + steps) - run.num_blocks for run in runs)
        return missing <= self._free_blocks

    def _seconds(self, steps: int) -> float:
        """Return the duration of this many steps, the first of which is the current one."""
        cost, batch = self._cost, len(self._shares)
        growth = batch * steps * (steps - 1) / 2  # of contexts, by a token per request and step
        seconds = steps * cost.seconds(self._work) + cost.per_context_token_seconds * growth
        return seconds * self.slowdown_factor

    def _work_of_step(self) -> StepWork:
        pairs, context, num_tokens = 0.0, 0, 0
        for run, count in self._shares:
            num_tokens += count
            if count == 1 and run.num_generated:
                context += run.num_computed + 1
            else:
                pairs += count * (run.num_computed + count / 2)
        return StepWork(num_tokens, len(self._shares), pairs, context)

    def _steps_done(self) -> int:
        """Return how many of the steps since ``_began_work`` are complete."""
        elapsed = self.cores.now_work - self._began_work + 1e-12
        low, high = 0, self._num_steps
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._seconds(middle) <= elapsed else (low, middle - 1)
        return low

    def _stop_after_current_step(self) -> None:
        """Let the event of several equal steps end with the step that is running now, because a
        request has arrived that may join the next one."""
        done = min(self._steps_done(), self._num_steps - 1)
        self._began_work += self._seconds(done)
        self._advance(done)
        self._num_steps = 1
        self._schedule_end()

    def _schedule_end(self) -> None:
        self._plan_number += 1
        number = self._plan_number
        end = self._began_work + self._seconds(self._num_steps)
        self.cores.schedule(end, lambda: self._on_end(number))

    def _advance(self, steps: int) -> None:
        """Count that many steps with answers only, and allocate memory for the step after them,
        which is one of the current event."""
        if not steps:
            return
        for run, _ in self._shares:
            run.num_computed += steps
            run.num_generated += steps
            missing = self._blocks_for(run.num_computed + 1) - run.num_blocks
            run.num_blocks += missing
            self._free_blocks -= missing
        made = steps * len(self._shares)
        self._work = replace(self._work, context_tokens=self._work.context_tokens + made)
        self._load = None
        self.num_generated_tokens += made

    def _on_end(self, number: int) -> None:
        if number != self._plan_number:
            return
        self._record_time(is_prompt=not self._is_decode_only)
        self._advance(self._num_steps - 1)
        shares, self._shares = self._shares, []
        prefilled, done = [], []
        for run, count in shares:
            run.num_computed += count
            if run.num_computed < run.target:
                continue
            run.num_generated += 1
            self.num_generated_tokens += 1
            job = run.job
            if job.num_remaining:
                job.num_computed = job.num_prompt_tokens
                self._num_first_tokens += 1
                self._num_late_first_tokens += self._events.now_seconds > job.deadline_seconds
                prefilled.append(job)
            if run.num_left <= 0:
                done.append(run)
        finished = set(done)
        self._running = [run for run in self._running if run not in finished]
        for run in done:
            self._free(run)
            run.job.num_generated_tokens = run.num_generated
            run.job.finished_at_seconds = self._events.now_seconds
        self._begin_step()
        for job in prefilled:
            self._on_prefilled(job)
        for run in done:
            self._on_done(run.job)
