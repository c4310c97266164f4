"""Measures what steps cost on this machine, and limits a step's prefill tokens accordingly."""

from collections import deque

from baton.core.cost import DecodeCost, PrefillCost
from baton.engine.config import EngineConfig
from baton.engine.least_squares import fit_nonnegative
from baton.engine.prefill_budget import PrefillBudget
from baton.engine.prefill_cost_model import PrefillCostModel
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


class MeasuredCosts:
    """The cost model of prefill, the cost model of decoding, and the limit on prefill tokens in a
    step that also decodes. Each is fitted to the most recent steps of its kind: prefill-only
    steps, decode-only steps, or steps with both."""

    def __init__(self, config: EngineConfig) -> None:
        self._max_chunk_tokens = config.max_chunk_tokens
        self._prefill_cost_model = PrefillCostModel()
        self._decode_cost_model = DecodeCostModel()
        self._prefill_budget = PrefillBudget(
            config.target_inter_token_latency_seconds, self._decode_cost_model.cost
        )
        self.max_prefill_tokens = self._prefill_budget.max_prefill_tokens
        self.max_shared_step_seconds = self._prefill_budget.max_step_seconds
        self.set_target_inter_token_latency = self._prefill_budget.set_target

    def record(self, work: StepWork) -> None:
        """Record the measured duration of a step."""
        self._prefill_cost_model.record(work)
        self._decode_cost_model.record(work)
        self._prefill_budget.record(work)

    def prefill_seconds(self, start: int, end: int) -> float | None:
        """Predict the time to compute tokens [start, end) of a prompt in steps that compute nothing
        else; until enough of these have been measured, how much it lengthens steps with decodes,
        since under load a worker may have few others. Return None until enough steps of either kind
        have been measured."""
        alone = self._prefill_cost_model.predict_seconds_alone(start, end, self._max_chunk_tokens)
        return self._prefill_budget.predict_added_seconds(start, end) if alone is None else alone

    def prompt_slowdown(self, num_answers: int, context_tokens: int) -> float:
        """Return how many times as long as alone prompts take beside ``num_answers`` decodes with
        ``context_tokens`` in total: those take their part of a step's time, and the rest is left
        for prompts. It is 1 if there are no decodes, or as long as their cost is unknown."""
        longest, cost = (
            self.max_shared_step_seconds(num_answers, context_tokens),
            self.decode_cost(),
        )
        if longest is None or cost is None or not num_answers:
            return 1.0
        return longest / (longest - cost.seconds(num_answers, context_tokens))

    def prefill_cost(self) -> PrefillCost | None:
        """Return the fitted cost of prefill; None before enough steps were measured."""
        return self._prefill_cost_model.cost(self._max_chunk_tokens)

    def prefill_cost_relative_error(self) -> float | None:
        """Return the relative standard error of :meth:`prefill_cost`, which is reported as
        :attr:`WorkerLoad.prefill_error`; None while it is unknown."""
        return self._prefill_cost_model.relative_error()

    def decode_cost(self) -> DecodeCost | None:
        """Return the fitted cost of decoding; None before enough steps were measured."""
        return self._decode_cost_model.cost()
