"""How much of prompts a step may read beside answers, so that their next tokens come in time."""

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
"""Of prompts, in any step: a prompt goes on, however slow the machine is."""

MAX_SLOWDOWN = 2.0
"""A step beside prompts may take so many times what its answers take alone, even if that is longer
than the gap: else a slow machine would read no prompts, for little gain."""

MaxPrefillTokens = Callable[[int, int, int, int], int]
"""As :meth:`PrefillBudget.tokens`."""

Parts = tuple[float, float, float]


def unlimited_tokens(num_answers: int, context_tokens: int, start: int, limit: int) -> int:
    return limit


class PrefillBudget:
    """Steps that do both are fitted as seconds = fixed + a · tokens + b · attended, with those of
    the answers counted in. The first few read little, each twice as much as the one before."""

    def __init__(
        self, gap_seconds: float | None, decode_cost: Callable[[], DecodeCost | None]
    ) -> None:
        self._gap_seconds = gap_seconds
        self._decode_cost = decode_cost
        self._steps: deque[StepWork] = deque(maxlen=WINDOW_STEPS)
        self._parts: Parts | None = None

    def record(self, work: StepWork) -> None:
        """Only steps that did both count."""
        if self._gap_seconds is None or work.is_prefill or work.is_decode or work.seconds <= 0:
            return
        self._steps.append(work)
        self._parts = None

    def tokens(self, num_answers: int, context_tokens: int, start: int, limit: int) -> int:
        """How many tokens of prompts, ``limit`` at most, fit into a step beside ``num_answers``
        with ``context_tokens`` together. ``start`` is how deep the deepest of the prompts is."""
        if self._gap_seconds is None or not num_answers:
            return limit
        parts = self._fitted()
        if parts is None:
            return min(limit, INITIAL_PREFILL_TOKENS << len(self._steps))
        fixed, linear, quadratic = parts
        spent = fixed + linear * num_answers + quadratic * context_tokens
        left = self._allowed(num_answers, context_tokens) - spent
        most = _solve(linear + quadratic * start, quadratic / 2, max(left, 0.0))
        return min(limit, max(MIN_PREFILL_TOKENS, int(min(most, limit))))

    def _allowed(self, num_answers: int, context_tokens: int) -> float:
        assert self._gap_seconds is not None
        cost = self._decode_cost()
        alone = 0.0 if cost is None else cost.seconds(num_answers, context_tokens)
        return max(self._gap_seconds, MAX_SLOWDOWN * alone)

    def _fitted(self) -> Parts | None:
        if self._parts is None and len(self._steps) >= MIN_STEPS:
            columns = [(1.0, step.num_tokens, step.num_attended) for step in self._steps]
            fixed, linear, quadratic = fit_nonnegative(columns, [s.seconds for s in self._steps])
            self._parts = fixed, linear, quadratic
        return self._parts


def _solve(linear: float, quadratic: float, right: float) -> float:
    """The x of linear · x + quadratic · x² = right, none of them negative."""
    if right == 0.0:
        return 0.0
    if quadratic == 0.0:
        return right / linear if linear else math.inf
    return 2 * right / (linear + math.sqrt(linear * linear + 4 * quadratic * right))
