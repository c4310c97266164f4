"""The decode speed of this worker, fitted to the measured times of its steps."""

from collections import deque

from baton.core.cost import DecodeCost
from baton.engine.least_squares import fit_nonnegative
from baton.engine.result import StepWork

WINDOW_STEPS = 256
MIN_STEPS = 16

MIN_SPREAD = 2.0
"""Minimum ratio of the largest to the smallest value of a variable for it to be fitted. The cost of
a variable that varied less can't be told apart from a step's fixed cost, and a guessed coefficient
would later be multiplied by batch sizes that were never observed."""


class DecodeCostModel:
    """Fits seconds = fixed + a · batch + b · context to the last decode-only steps without drafts.
    ``batch`` is the number of requests, and ``context`` is the sum of their context lengths."""

    def __init__(self) -> None:
        self._steps: deque[StepWork] = deque(maxlen=WINDOW_STEPS)
        self._fitted: DecodeCost | None = None

    def record(self, work: StepWork) -> None:
        if work.is_decode and not work.num_drafts and work.seconds > 0:
            self._steps.append(work)
            self._fitted = None

    def cost(self) -> DecodeCost | None:
        """Return the fitted cost; None before enough steps were measured."""
        if self._fitted is None and len(self._steps) >= MIN_STEPS:
            self._fitted = self._fit()
        return self._fitted

    def _fit(self) -> DecodeCost:
        batches = [float(step.num_tokens) for step in self._steps]
        contexts = [float(step.num_attended_tokens) for step in self._steps]
        columns = [[1.0] * len(self._steps)]
        columns += [each for each in (batches, contexts) if _varies(each)]
        parts = fit_nonnegative(list(zip(*columns, strict=True)), [s.seconds for s in self._steps])
        fixed, *others = parts
        per_request = others.pop(0) if _varies(batches) else 0.0
        return DecodeCost(fixed, per_request, others.pop(0) if others else 0.0)


def _varies(values: list[float]) -> bool:
    return max(values) >= MIN_SPREAD * min(values)
