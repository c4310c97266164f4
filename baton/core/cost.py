"""Cost models of prefill and decode: the time a prefill or a decode step takes. Workers fit the
parameters to measured steps; the engine, the conductor and the simulator predict times with
them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Cost model of a prefill. Matrix products take time in proportion to the number of new tokens,
    attention in proportion to the number of pairs of a new token and an earlier one."""

    fixed_seconds: float
    per_token_seconds: float
    per_pair_seconds: float

    def seconds(self, num_new: int, num_cached: int = 0) -> float:
        """Return the time to compute ``num_new`` tokens that follow ``num_cached`` cached ones."""
        if num_new <= 0:
            return 0.0
        pairs = num_new * (num_cached + num_new / 2)
        return self.fixed_seconds + self.per_token_seconds * num_new + self.per_pair_seconds * pairs


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Cost model of a decode step, which reads the weights once, and the KV of all its requests.
    For a mixture of experts, a step also reads the experts that its batch chooses: reading all
    ``num_experts`` takes ``expert_seconds``, and each token chooses ``experts_per_token``."""

    fixed_seconds: float
    per_request_seconds: float
    per_context_token_seconds: float
    expert_seconds: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0

    def base_seconds(self, batch: int) -> float:
        """Return the time of one step with ``batch`` requests, without the time to read their
        KV."""
        seconds = self.fixed_seconds + self.per_request_seconds * batch
        if self.num_experts:
            missed = (1 - self.experts_per_token / self.num_experts) ** batch
            seconds += self.expert_seconds * (1 - missed)
        return seconds

    def seconds(self, batch: int, context_tokens: int) -> float:
        """Return the time of one step with ``batch`` requests. ``context_tokens`` is the number of
        tokens whose KV the step reads, summed over all requests."""
        return self.base_seconds(batch) + self.per_context_token_seconds * context_tokens
