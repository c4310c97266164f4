"""Steps on their way: planned, and not applied yet."""

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
    """``sequences`` are those of the plan's rows. Of them, ``gone`` have ended since it was
    planned: what is computed for them is nobody's, and written to their blocks until it is done."""

    plan: Plan
    sequences: Seq[Sequence]
    began: float
    admitted: tuple[ScheduledPrompt, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    gone: list[Sequence] = field(default_factory=list)
    seconds: float = 0.0
    """From the end of the step before, if that was on its way still, else from its plan on."""


class InflightSteps:
    """At most two: with ``looks_ahead`` the second is planned while the first is computed, wherever
    that can be told. Then, between two calls of :meth:`land`, that one is on its way; else none is.
    ``sequences`` are the engine's."""

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: PlanExecutor,
        clock: Clock,
        sequences: Mapping[RequestId, Sequence],
        *,
        looks_ahead: bool,
    ) -> None:
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._clock = clock
        self._sequences = sequences
        self._looks_ahead = looks_ahead
        self._coming: InflightStep | None = None
        self._landed = -inf

    def has(self, sequence: Sequence) -> bool:
        """Whether something is being computed for it."""
        return self._coming is not None and sequence in self._coming.sequences

    @property
    def is_coming(self) -> bool:
        """Whether a step is on its way."""
        return self._coming is not None

    @property
    def gone(self) -> Seq[Sequence]:
        """Who has ended, and still has blocks."""
        return () if self._coming is None else self._coming.gone

    def land(self) -> tuple[InflightStep, StepOutput]:
        """The next step, once it is computed. Its plan is empty if nothing could be scheduled."""
        flight = self._coming or self._set_out()
        if not flight.plan.rows:
            return flight, StepOutput(())
        self._coming = self._set_out_ahead(flight) if self._looks_ahead else None
        output = self._pipeline.collect()
        now = self._clock.monotonic()
        flight.seconds = now - max(flight.began, self._landed)
        self._landed = now
        for sequence in flight.gone:
            self._scheduler.free(sequence)
        return flight, output

    def finish(self, sequence: Sequence) -> None:
        """As :meth:`Scheduler.finish`, but that blocks are kept while something may be written to
        them."""
        if self._coming is not None and self.has(sequence):
            self._scheduler.leave(sequence)
            self._coming.gone.append(sequence)
        else:
            self._scheduler.finish(sequence)

    def close(self) -> None:
        """Returns once nothing is being computed. The last call."""
        self._pipeline.close()

    def _set_out(self) -> InflightStep:
        began = self._clock.monotonic()
        plan = self._scheduler.schedule(began)
        admitted = tuple(
            ScheduledPrompt(each.request_id, began, began - each.arrival_seconds)
            for each in self._scheduler.admitted
        )
        preempted = tuple(each.request_id for each in self._scheduler.preempted)
        if plan.rows:
            self._pipeline.submit(plan)
        return InflightStep(plan, self._owners(plan), began, admitted, preempted)

    def _set_out_ahead(self, flight: InflightStep) -> InflightStep | None:
        """The step after ``flight``, while that is being computed; None if it can't be told yet."""
        began = self._clock.monotonic()
        plan = self._scheduler.schedule_ahead(flight.plan, flight.sequences)
        if plan is None:
            return None
        self._pipeline.submit(plan)
        return InflightStep(plan, self._owners(plan), began)

    def _owners(self, plan: Plan) -> Seq[Sequence]:
        return [self._sequences[row.request_id] for row in plan.rows]
