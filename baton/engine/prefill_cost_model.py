"""The prefill speed of this worker, fitted to the measured times of its steps."""

from collections import deque

from baton.core.cost import PrefillCost
from baton.core.worker_load import REFERENCE_PROMPT_TOKENS
from baton.engine.least_squares import fit_nonnegative, relative_error
from baton.engine.result import StepWork

WINDOW_STEPS = 64
MIN_STEPS = 4

MIN_COMPARABLE_STEPS, MIN_COMPARABLE_TOKENS = 16, REFERENCE_PROMPT_TOKENS // 4
"""The error is known once the window is full and so many of its steps have computed so many tokens.
Before that, the time of a reference prompt is extrapolated from a few short steps, the first ones
of which are slow, and workers of equal hardware differ several times."""


class PrefillCostModel:
    """Predicts a step's seconds as ``overhead + a · tokens + b · attended``, where ``attended`` is
    the number of positions to which each token attends, summed over the step's tokens. The
    coefficients are fitted by least squares to the last ``WINDOW_STEPS`` steps that only prefilled:
    ``a`` stands for the matrix products, ``b`` for attention, and the overhead is the same for
    every step."""

    def __init__(self) -> None:
        self._steps: deque[StepWork] = deque(maxlen=WINDOW_STEPS)
        self._coefficients: tuple[float, float, float] | None = None
        self._error: float | None = None

    def record(self, work: StepWork) -> None:
        if work.is_prefill and work.seconds > 0:
            self._steps.append(work)
            self._coefficients = None

    def predict_added_seconds(self, start: int, end: int) -> float | None:
        """Predict how much longer steps take because they also compute tokens [start, end) of a
        prompt whose first ``start`` tokens are computed already. Return None until enough steps
        have been measured, and while longer steps have not taken longer, as among the first few of
        a worker: then nothing is known about what a token costs."""
        return self.predict_seconds_alone(start, end, 0) or None

    def predict_seconds_alone(self, start: int, end: int, chunk_tokens: int) -> float | None:
        """Predict the time of steps that compute only tokens [start, end) of a prompt,
        ``chunk_tokens`` at a time: the time of :meth:`predict_added_seconds` plus the overhead of
        each step."""
        parts = self._fit()
        if parts is None:
            return None
        overhead, linear, quadratic = parts
        count = end - start
        num_steps = -(-count // chunk_tokens) if chunk_tokens else 0
        attended = count * start + count * (count + 1) / 2
        return overhead * num_steps + linear * count + quadratic * attended

    def cost(self, chunk_tokens: int) -> PrefillCost | None:
        """Return the fitted cost, for predictions outside of this worker; None until enough steps
        have been measured. The overhead of a step is divided among the ``chunk_tokens`` tokens that
        a step computes, and added once more for each prompt."""
        parts = self._fit()
        if parts is None:
            return None
        overhead, linear, quadratic = parts
        return PrefillCost(overhead, linear + overhead / chunk_tokens, quadratic)

    def relative_error(self) -> float | None:
        """Return the relative standard error of the cost of a prompt of
        ``REFERENCE_PROMPT_TOKENS``; None while it is unknown (see
        :data:`MIN_COMPARABLE_STEPS`)."""
        long = sum(step.num_tokens >= MIN_COMPARABLE_TOKENS for step in self._steps)
        is_known = len(self._steps) == WINDOW_STEPS and long >= MIN_COMPARABLE_STEPS
        return self._error if is_known and self._fit() is not None else None

    def _fit(self) -> tuple[float, float, float] | None:
        if len(self._steps) < MIN_STEPS:
            return None
        if self._coefficients is None:
            columns = [(1.0, step.num_tokens, step.num_attended_tokens) for step in self._steps]
            seconds = [step.seconds for step in self._steps]
            overhead, linear, quadratic = parts = fit_nonnegative(columns, seconds)
            self._coefficients = overhead, linear, quadratic
            typical = (
                1.0,
                REFERENCE_PROMPT_TOKENS,
                REFERENCE_PROMPT_TOKENS * (REFERENCE_PROMPT_TOKENS + 1) / 2,
            )
            self._error = relative_error(columns, seconds, parts, typical)
        return self._coefficients
