"""Limits the prefill tokens of a step that also decodes, to keep the inter-token latency low."""

import math
from collections import deque
from collections.abc import Callable

from baton.core.cost import DecodeCost
from baton.engine.least_squares import fit_nonnegative
from baton.engine.result import StepWork

WINDOW_STEPS = 32
MIN_STEPS = 4

INITIAL_PREFILL_TOKENS = 32

MIN_PREFILL_TOKENS = 16
"""Number of prefill tokens that are always allowed in a step, so that prompts advance however slow
the machine is."""

MAX_SLOWDOWN = 2.0
"""A mixed step may always take this many times as long as its decodes alone, even if that exceeds
the target: otherwise a slow machine would hardly prefill at all, for little gain."""

MaxPrefillTokens = Callable[[int, int, int, int], int]
"""The signature of :meth:`PrefillBudget.max_prefill_tokens`."""

Coefficients = tuple[float, float, float]


def unlimited_tokens(num_answers: int, context_tokens: int, start: int, limit: int) -> int:
    return limit


class PrefillBudget:
    """Predicts how many prefill tokens can be added to a step's decodes within the target
    inter-token latency, or within ``MAX_SLOWDOWN`` times the decodes' own time if that is longer.

    The durations of mixed steps, which have prefill and decodes, are fitted as seconds = fixed + a
    · tokens + b · attended. ``tokens`` counts prefilled and decoded tokens, and ``attended`` the
    positions to which they attend. Until there are enough measurements, mixed steps get few prefill
    tokens: each may have twice as many as the one before."""

    def __init__(
        self,
        target_inter_token_latency_seconds: float | None,
        decode_cost: Callable[[], DecodeCost | None],
    ) -> None:
        self._target_seconds = target_inter_token_latency_seconds
        self._decode_cost = decode_cost
        self._steps: deque[StepWork] = deque(maxlen=WINDOW_STEPS)
        self._coefficients: Coefficients | None = None

    def set_target(self, target_inter_token_latency_seconds: float | None) -> None:
        """Change the target for the steps that are scheduled from now on."""
        self._target_seconds = target_inter_token_latency_seconds

    def record(self, work: StepWork) -> None:
        """Record a step. Steps that don't have both prefill and decodes are ignored."""
        if self._target_seconds is None or work.is_prefill or work.is_decode or work.seconds <= 0:
            return
        self._steps.append(work)
        self._coefficients = None

    def max_prefill_tokens(
        self, num_answers: int, context_tokens: int, start: int, limit: int
    ) -> int:
        """Return how many prefill tokens may be computed in a step that also has ``num_answers``
        decodes with ``context_tokens`` in total. Once enough mixed steps were measured, the result
        is the largest number with which the step is predicted to stay within the time that the
        class docstring describes, but at least ``MIN_PREFILL_TOKENS``. It never exceeds ``limit``,
        and is ``limit`` if there is no target or no decode. ``start`` is the highest number of
        computed tokens that any partly computed prompt has."""
        if self._target_seconds is None or not num_answers:
            return limit
        parts = self._fit()
        if parts is None:
            return min(limit, INITIAL_PREFILL_TOKENS << len(self._steps))
        fixed, linear, quadratic = parts
        spent = fixed + linear * num_answers + quadratic * context_tokens
        remaining = self._allowed_seconds(self._target_seconds, num_answers, context_tokens) - spent
        tokens = _solve(linear + quadratic * start, quadratic / 2, max(remaining, 0.0))
        return min(limit, max(MIN_PREFILL_TOKENS, int(min(tokens, limit))))

    def predict_added_seconds(self, start: int, end: int) -> float | None:
        """Predict how much longer mixed steps take because they also compute tokens [start, end) of
        a prompt. Return None until enough mixed steps have been measured."""
        parts = self._fit()
        if parts is None:
            return None
        _, linear, quadratic = parts
        count = end - start
        return linear * count + quadratic * (count * start + count * (count + 1) / 2)

    def max_step_seconds(self, num_answers: int, context_tokens: int) -> float | None:
        """Return how long a step with prefill may take beside ``num_answers`` decodes with
        ``context_tokens`` in total; None if there is no target."""
        if self._target_seconds is None:
            return None
        return self._allowed_seconds(self._target_seconds, num_answers, context_tokens)

    def _allowed_seconds(self, target: float, num_answers: int, context_tokens: int) -> float:
        cost = self._decode_cost()
        alone = 0.0 if cost is None else cost.seconds(num_answers, context_tokens)
        return max(target, MAX_SLOWDOWN * alone)

    def _fit(self) -> Coefficients | None:
        if self._coefficients is None and len(self._steps) >= MIN_STEPS:
            columns = [(1.0, step.num_tokens, step.num_attended_tokens) for step in self._steps]
            fixed, linear, quadratic = fit_nonnegative(columns, [s.seconds for s in self._steps])
            self._coefficients = fixed, linear, quadratic
        return self._coefficients


def _solve(linear: float, quadratic: float, right: float) -> float:
    """Solve linear · x + quadratic · x² = right for x >= 0; no coefficient is negative."""
    if right == 0.0:
        return 0.0
    if quadratic == 0.0:
        return right / linear if linear else math.inf
    return 2 * right / (linear + math.sqrt(linear * linear + 4 * quadratic * right))
