"""How fast this worker reads prompts: fitted to what its steps took."""

from collections import deque

from baton.core.cost import PrefillCost
from baton.core.worker_load import REFERENCE_PROMPT_TOKENS
from baton.engine.least_squares import fit_nonnegative, relative_error
from baton.engine.result import StepWork

WINDOW_STEPS = 64
MIN_STEPS = 4


class PrefillCostModel:
    """seconds = overhead + a · tokens + b · attended, by least squares over the last steps that
    only read prompts. The linear part is the matrix products, the quadratic one attention; the
    overhead is that of a step, whatever it computes."""

    def __init__(self) -> None:
        self._steps: deque[StepWork] = deque(maxlen=WINDOW_STEPS)
        self._fitted: tuple[float, float, float] | None = None
        self._error: float | None = None

    def record(self, work: StepWork) -> None:
        if work.is_prefill and work.seconds > 0:
            self._steps.append(work)
            self._fitted = None

    def seconds(self, start: int, end: int) -> float | None:
        """What tokens [start, end) of a prompt whose first ``start`` are there add to its steps;
        None before enough was measured."""
        return self.seconds_alone(start, end, 0)

    def seconds_alone(self, start: int, end: int, chunk_tokens: int) -> float | None:
        """The same with the overhead of steps that compute nothing else, ``chunk_tokens`` each."""
        parts = self._parts()
        if parts is None:
            return None
        overhead, linear, quadratic = parts
        count = end - start
        num_steps = -(-count // chunk_tokens) if chunk_tokens else 0
        attended = count * start + count * (count + 1) / 2
        return overhead * num_steps + linear * count + quadratic * attended

    def cost(self, chunk_tokens: int) -> PrefillCost | None:
        """For others to predict by. Chunks that are not full are taken for so much of a step,
        and the first one for a whole one."""
        parts = self._parts()
        if parts is None:
            return None
        overhead, linear, quadratic = parts
        return PrefillCost(overhead, linear + overhead / chunk_tokens, quadratic)

    def error(self) -> float | None:
        """Of the cost for a prompt of ``REFERENCE_PROMPT_TOKENS``, relative; None while nobody can
        tell."""
        return None if self._parts() is None else self._error

    def _parts(self) -> tuple[float, float, float] | None:
        if len(self._steps) < MIN_STEPS:
            return None
        if self._fitted is None:
            columns = [(1.0, step.num_tokens, step.num_attended) for step in self._steps]
            seconds = [step.seconds for step in self._steps]
            overhead, linear, quadratic = parts = fit_nonnegative(columns, seconds)
            self._fitted = overhead, linear, quadratic
            typical = (
                1.0,
                REFERENCE_PROMPT_TOKENS,
                REFERENCE_PROMPT_TOKENS * (REFERENCE_PROMPT_TOKENS + 1) / 2,
            )
            self._error = relative_error(columns, seconds, parts, typical)
        return self._fitted
