"""The cost of a step that computes prompts and answers together, as engines with chunked prefill
run it."""

from dataclasses import dataclass

from baton.core.cost import DecodeCost, PrefillCost


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes: ``num_tokens`` tokens of ``num_requests`` requests. Prompts' tokens
    attend to ``num_pairs`` pairs of a query token and a key token, and answers' tokens read
    ``context_tokens`` tokens of KV."""

    num_tokens: int
    num_requests: int
    num_pairs: float
    context_tokens: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost model of a step, in seconds. Matrix products take the time to read the weights, or that
    of ``per_token_seconds`` for each token, whichever is longer. Attention takes
    ``per_pair_seconds`` for each pair in prompts, and ``per_context_token_seconds`` for each token
    of KV that answers read. ``overhead_seconds`` and ``per_request_seconds`` are what the host,
    sampling and small kernels add, and ``communication_per_token_seconds`` is what the GPUs of a
    worker take to communicate. The weights of a mixture's experts are read as far as the step's
    tokens choose them (see :class:`baton.core.cost.DecodeCost`)."""

    overhead_seconds: float
    weights_seconds: float
    per_token_seconds: float
    per_pair_seconds: float
    per_context_token_seconds: float
    per_request_seconds: float = 0.0
    expert_seconds: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0
    communication_per_token_seconds: float = 0.0

    @classmethod
    def from_measured(cls, prefill: PrefillCost, decode: DecodeCost) -> "StepCost":
        """Return the costs that follow from those of steps with prompts only and with answers
        only. The fixed part of a prefill is overhead, since its weights are read while it
        computes."""
        overhead = min(prefill.fixed_seconds, decode.fixed_seconds)
        return cls(
            overhead,
            decode.fixed_seconds - overhead,
            prefill.per_token_seconds,
            prefill.per_pair_seconds,
            decode.per_context_token_seconds,
            decode.per_request_seconds,
            decode.expert_seconds,
            decode.num_experts,
            decode.experts_per_token,
        )

    def read_seconds(self, num_tokens: int) -> float:
        """Return the time to read the weights that ``num_tokens`` tokens need."""
        seconds = self.weights_seconds
        if self.num_experts:
            missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
            seconds += self.expert_seconds * (1 - missed)
        return seconds

    def base_seconds(self, num_tokens: int, num_requests: int) -> float:
        """Return the time of a step without attention."""
        products = max(self.read_seconds(num_tokens), self.per_token_seconds * num_tokens)
        products += self.communication_per_token_seconds * num_tokens
        return self.overhead_seconds + products + self.per_request_seconds * num_requests

    def seconds(self, work: StepWork) -> float:
        attention = self.per_pair_seconds * work.num_pairs
        attention += self.per_context_token_seconds * work.context_tokens
        return self.base_seconds(work.num_tokens, work.num_requests) + attention


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """Costs and KV capacity of one worker, which may have several GPUs."""

    prefill: PrefillCost
    decode: DecodeCost
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    step: StepCost
