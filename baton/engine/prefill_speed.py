"""How fast this worker reads prompts: fitted to what its steps took."""

from collections import deque

import numpy as np

from baton.engine.result import StepWork

WINDOW_STEPS = 64
MIN_STEPS = 4


class PrefillSpeed:
    """seconds = overhead + a · tokens + b · attended, by least squares over the last steps that
    only read prompts, each relative to its own time. The linear part is the matrix products, the
    quadratic one attention; the overhead is that of a step, whatever it computes."""

    def __init__(self) -> None:
        self._steps: deque[StepWork] = deque(maxlen=WINDOW_STEPS)
        self._fitted: tuple[float, float, float] | None = None

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
        if len(self._steps) < MIN_STEPS:
            return None
        if self._fitted is None:
            self._fitted = self._fit()
        overhead, linear, quadratic = self._fitted
        count = end - start
        num_steps = -(-count // chunk_tokens) if chunk_tokens else 0
        attended = count * start + count * (count + 1) / 2
        return overhead * num_steps + linear * count + quadratic * attended

    def _fit(self) -> tuple[float, float, float]:
        """No coefficient is negative: what would be is left out, and the others fitted anew."""
        seconds = np.array([step.seconds for step in self._steps])
        columns = np.array([(1.0, step.num_tokens, step.num_attended) for step in self._steps])
        scaled = columns / seconds[:, None]
        used = [0, 1, 2]
        while used:
            solution = np.linalg.lstsq(scaled[:, used], np.ones(len(seconds)), rcond=None)[0]
            if (solution >= 0).all():
                found = dict(zip(used, solution.tolist(), strict=True))
                return found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0)
            used.pop(int(solution.argmin()))
        return 0.0, 0.0, 0.0
