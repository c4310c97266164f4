"""How plans get to a runner: one after another, or the next one before this one is done."""

from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from baton.engine.plan import Plan, Runner, StepOutput, fill_sampled_tokens

MAX_INFLIGHT_PLANS = 2
"""One that is being computed, and the next."""


class PlanExecutor(Protocol):
    """Computes plans in the order in which they come, two at a time at most: rows of the second may
    follow rows of the first. All calls come from one thread."""

    def submit(self, plan: Plan) -> None: ...

    def collect(self) -> StepOutput:
        """Waits for the oldest plan's output. Raises what its run has raised, and is of no use
        then."""
        ...

    def close(self) -> None:
        """Returns once nothing is being computed. The last call."""
        ...


class SyncExecutor:
    """Computes a plan when its output is asked for."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plans: deque[Plan] = deque()
        self._last = StepOutput(())

    def submit(self, plan: Plan) -> None:
        assert len(self._plans) < MAX_INFLIGHT_PLANS, "collect() comes first"
        self._plans.append(plan)

    def collect(self) -> StepOutput:
        plan = self._plans.popleft()
        fill_sampled_tokens(plan, self._last)
        self._last = self._runner.run(plan)
        return self._last

    def close(self) -> None:
        self._plans.clear()


class TwoStageRunner(Protocol):
    """A runner whose run has two parts, of which the first can be done while another plan is being
    computed: ``run(plan)`` is ``compute(prepare(plan))``."""

    def prepare(self, plan: Plan) -> Any:
        """What of a plan's run depends on no token."""
        ...

    def compute(self, prepared: Any, on_start: Callable[[], None]) -> StepOutput:
        """The rest, once :func:`fill_sampled_tokens` has told the plan's tokens. Calls ``on_start``
        when the device is at work and this thread has nothing to do until it is done."""
        ...


class ThreadedExecutor:
    """Computes plans in a thread of its own, while the caller does what else there is to do.

    An output is told once the step after it has started, if that is here: else the caller would do
    its part, holding the interpreter's lock, before the device has anything to do.
    """

    def __init__(self, runner: TwoStageRunner) -> None:
        self._runner = runner
        self._num_plans = 0
        # Bounded by MAX_PLANS: see submit().
        self._plans: SimpleQueue[tuple[Plan, Any] | None] = SimpleQueue()
        self._outputs: SimpleQueue[StepOutput | BaseException] = SimpleQueue()
        self._last = StepOutput(())
        self._untold: StepOutput | None = None
        self._thread = Thread(target=self._main, name="runner", daemon=True)
        self._thread.start()

    def submit(self, plan: Plan) -> None:
        assert self._num_plans < MAX_INFLIGHT_PLANS, "collect() comes first"
        self._num_plans += 1
        self._plans.put((plan, self._runner.prepare(plan)))

    def collect(self) -> StepOutput:
        assert self._num_plans > 0, "submit() comes first"
        output = self._outputs.get()
        self._num_plans -= 1
        if isinstance(output, BaseException):
            raise output
        return output

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()

    def _main(self) -> None:
        try:
            while (next_one := self._plans.get()) is not None:
                self._compute(*next_one)
        except BaseException as error:
            self._tell()
            self._outputs.put(error)

    def _compute(self, plan: Plan, prepared: Any) -> None:
        fill_sampled_tokens(plan, self._last)
        self._last = self._runner.compute(prepared, self._tell)
        self._tell()
        self._untold = self._last
        if self._plans.empty():
            self._tell()

    def _tell(self) -> None:
        """What is not told yet: the step's before."""
        if self._untold is not None:
            untold, self._untold = self._untold, None
            self._outputs.put(untold)
