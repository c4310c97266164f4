"""Measures what steps cost on this machine, and limits a step's prefill tokens accordingly."""

from baton.core.cost import DecodeCost, PrefillCost
from baton.engine.config import EngineConfig
from baton.engine.decode_cost_model import DecodeCostModel
from baton.engine.prefill_budget import PrefillBudget
from baton.engine.prefill_cost_model import PrefillCostModel
from baton.engine.result import StepWork


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
        else. Return None until enough steps have been measured."""
        return self._prefill_cost_model.predict_seconds_alone(start, end, self._max_chunk_tokens)

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
