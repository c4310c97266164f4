"""An executor for a device that works through a queue of its own, such as a GPU."""

from collections import deque
from typing import Any, Protocol

from baton.engine.executor import MAX_INFLIGHT_PLANS
from baton.engine.plan import Plan, StepOutput, fill_sampled_tokens


class LaunchedStep(Protocol):
    """A step that the device computes, or will compute once it has computed the steps before."""

    def wait(self) -> StepOutput:
        """Wait until the device has computed the step, and return its output. May be called more
        than once."""
        ...


class LaunchingRunner(Protocol):
    """A runner whose device computes one launched step after the other."""

    def prepare(self, plan: Plan) -> Any:
        """Run the part of a plan that does not depend on its token ids."""
        ...

    def launch(self, prepared: Any, previous: Any = None) -> LaunchedStep:
        """Launch a prepared plan without waiting for the device. Tokens that are still unknown are
        those that ``previous``, the step launched before, samples."""
        ...


class LaunchingExecutor:
    """Implements :class:`baton.engine.executor.PlanExecutor` without a thread: :meth:`submit`
    launches the plan, and :meth:`collect` waits for the device.

    If a plan continues requests of the plan before it, their tokens stay on the device, so that the
    device starts the second plan as soon as it has finished the first. Only penalties need those
    tokens on the host: :meth:`submit` then waits for the first plan before it launches the second.
    """

    def __init__(self, runner: LaunchingRunner) -> None:
        self._runner = runner
        self._launched: deque[LaunchedStep] = deque()

    def submit(self, plan: Plan) -> None:
        assert len(self._launched) < MAX_INFLIGHT_PLANS, "collect() comes first"
        continuing = [row for row in plan.rows if row.previous_row_index is not None]
        previous = self._launched[-1] if continuing else None
        prepared = self._runner.prepare(plan)
        if previous is not None and any(row.history for row in continuing):
            fill_sampled_tokens(plan, previous.wait())
            previous = None
        self._launched.append(self._runner.launch(prepared, previous))

    def collect(self) -> StepOutput:
        assert self._launched, "submit() comes first"
        return self._launched.popleft().wait()

    def close(self) -> None:
        while self._launched:
            self._launched.popleft().wait()
