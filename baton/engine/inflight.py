"""Keeps the steps in flight: those that have been submitted to the executor, but whose results
have not been applied yet."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf

from baton.clock import Clock
from baton.core.ids import RequestId
from baton.engine.executor import PlanExecutor
from baton.engine.plan import Plan, StepOutput
from baton.engine.result import ScheduledPrompt
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence


@dataclass(slots=True)
class InflightStep:
    """A submitted step. ``sequences`` are the sequences of the plan's rows. ``ended_sequences`` are
    those that have ended since the step was submitted: what the step computes for them is dropped,
    but their blocks must be kept until the step is complete, because it writes to them."""

    plan: Plan
    sequences: Seq[Sequence]
    start_seconds: float
    admitted: tuple[ScheduledPrompt, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    ended_sequences: list[Sequence] = field(default_factory=list)
    duration_seconds: float = 0.0
    """Duration of the step. It is counted from the end of the previous step if that was still in
    flight when this step was planned, else from the start of planning."""


class InflightSteps:
    """The steps in flight, at most two.

    If ``schedules_ahead`` is set (async scheduling), :meth:`collect` plans and submits the next
    step before it waits for the current one, if the next step can be planned without the tokens
    that the current one samples. The next step is then still in flight when ``collect`` returns. If
    the next step can't be planned yet, or ``schedules_ahead`` is not set, no step is in flight when
    ``collect`` returns. ``sequences`` are all sequences of the engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: PlanExecutor,
        clock: Clock,
        sequences: Mapping[RequestId, Sequence],
        *,
        schedules_ahead: bool,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._sequences = sequences
        self._schedules_ahead = schedules_ahead
        self._submitted: InflightStep | None = None
        self._last_end_seconds = -inf

    def is_computing(self, sequence: Sequence) -> bool:
        """Whether a step in flight computes tokens of this sequence."""
        return self._submitted is not None and sequence in self._submitted.sequences

    @property
    def has_step(self) -> bool:
        """Whether a step is in flight."""
        return self._submitted is not None

    @property
    def ended_sequences(self) -> Seq[Sequence]:
        """Sequences that have ended but still own blocks."""
        return () if self._submitted is None else self._submitted.ended_sequences

    def collect(self) -> tuple[InflightStep, StepOutput]:
        """Wait for the oldest step in flight and return it with its output. If no step is in
        flight, plan and submit one first; its plan is empty if nothing could be scheduled."""
        flight = self._submitted or self._submit_next()
        if not flight.plan.rows:
            return flight, StepOutput(())
        self._submitted = self._submit_ahead(flight) if self._schedules_ahead else None
        output = self._executor.collect()
        now = self._clock.monotonic()
        flight.duration_seconds = now - max(flight.start_seconds, self._last_end_seconds)
        self._last_end_seconds = now
        for sequence in flight.ended_sequences:
            self._scheduler.free_blocks(sequence)
        return flight, output

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence and release its blocks; but while a step in flight may write to the
        blocks, keep them until that step is complete."""
        if self._submitted is not None and self.is_computing(sequence):
            self._scheduler.remove_keeping_blocks(sequence)
            self._submitted.ended_sequences.append(sequence)
        else:
            self._scheduler.finish(sequence)

    def close(self) -> None:
        """Wait until nothing is being computed. Must be the last call."""
        self._executor.close()

    def _submit_next(self) -> InflightStep:
        began = self._clock.monotonic()
        plan = self._scheduler.schedule(began)
        admitted = tuple(
            ScheduledPrompt(each.request_id, began, began - each.arrival_seconds)
            for each in self._scheduler.admitted
        )
        preempted = tuple(each.request_id for each in self._scheduler.preempted)
        if plan.rows:
            self._executor.submit(plan)
        return InflightStep(plan, self._sequences_of(plan), began, admitted, preempted)

    def _submit_ahead(self, flight: InflightStep) -> InflightStep | None:
        """Plan and submit the step after ``flight`` while ``flight`` is being computed. Return None
        if it can't be planned yet."""
        began = self._clock.monotonic()
        plan = self._scheduler.schedule_ahead(flight.plan, flight.sequences)
        if plan is None:
            return None
        self._executor.submit(plan)
        return InflightStep(plan, self._sequences_of(plan), began)

    def _sequences_of(self, plan: Plan) -> Seq[Sequence]:
        return [self._sequences[row.request_id] for row in plan.rows]
