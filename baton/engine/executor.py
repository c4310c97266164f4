"""Executors pass plans to a runner. One kind computes a plan in the caller's thread; the second has
a thread of its own, so that the next plan can be made while the current one is computed; the third
is for a device that works through a queue of its own, such as a GPU."""

from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from baton.engine.plan import Plan, Runner, StepOutput, fill_sampled_tokens

MAX_INFLIGHT_PLANS = 2
"""Maximum number of plans in flight: the one that is being computed, and the next one."""


class PlanExecutor(Protocol):
    """Computes plans in the order of submission. At most two plans may be submitted and not yet
    collected; rows of the second may continue requests of the first. All calls must come from one
    thread."""

    def submit(self, plan: Plan) -> None: ...

    def collect(self) -> StepOutput:
        """Wait for the oldest plan's output. If the runner raised an exception, this raises it, and
        the executor can't be used afterwards."""
        ...

    def close(self) -> None:
        """Wait until nothing is being computed. Must be the last call."""
        ...


class SyncExecutor:
    """Computes a plan in :meth:`collect`, in the caller's thread."""

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
    """A runner that splits ``run(plan)`` into ``compute(prepare(plan))``, where ``prepare`` can be
    called while another plan is being computed."""

    def prepare(self, plan: Plan) -> Any:
        """Run the part of a plan that does not depend on its token ids."""
        ...

    def compute(self, prepared: Any, on_start: Callable[[], None]) -> StepOutput:
        """Run the rest of a plan; ``prepared`` is what :meth:`prepare` has returned for it. The
        caller has filled in the plan's tokens with :func:`fill_sampled_tokens`. This method calls
        ``on_start`` when the device is computing and this thread only has to wait for it."""
        ...


class ThreadedExecutor:
    """Computes plans in its own thread, so that the caller can work in the meantime.

    If the next plan is already submitted, an output is delivered only after that plan has started
    on the device. If it were delivered earlier, the caller would process it, holding the GIL, while
    the device is idle.
    """

    def __init__(self, runner: TwoStageRunner) -> None:
        self._runner = runner
        self._num_plans = 0
        # Bounded by MAX_INFLIGHT_PLANS: see submit().
        self._plans: SimpleQueue[tuple[Plan, Any] | None] = SimpleQueue()
        self._outputs: SimpleQueue[StepOutput | BaseException] = SimpleQueue()
        self._last = StepOutput(())
        self._undelivered: StepOutput | None = None
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
            while (submitted := self._plans.get()) is not None:
                self._compute(*submitted)
        except BaseException as error:
            self._deliver_output()
            self._outputs.put(error)

    def _compute(self, plan: Plan, prepared: Any) -> None:
        fill_sampled_tokens(plan, self._last)
        self._last = self._runner.compute(prepared, self._deliver_output)
        self._deliver_output()
        self._undelivered = self._last
        if self._plans.empty():
            self._deliver_output()

    def _deliver_output(self) -> None:
        """Deliver the previous step's output, if it was not delivered yet."""
        if self._undelivered is not None:
            output, self._undelivered = self._undelivered, None
            self._outputs.put(output)


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
