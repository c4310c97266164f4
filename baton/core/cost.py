"""What work takes: the same two models for what is measured and for what is simulated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Matrix products are linear in tokens, attention in pairs of a new token and one before it."""

    fixed_seconds: float
    per_token_seconds: float
    per_pair_seconds: float

    def seconds(self, num_new: int, num_cached: int = 0) -> float:
        """To read ``num_new`` tokens that follow on ``num_cached`` ones."""
        if num_new <= 0:
            return 0.0
        pairs = num_new * (num_cached + num_new / 2)
        return self.fixed_seconds + self.per_token_seconds * num_new + self.per_pair_seconds * pairs


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """A step reads the weights once and everybody's KV. Of a mixture of experts, a step reads the
    experts that its batch chooses: ``expert_seconds`` for all ``num_experts``, of which each token
    takes ``experts_per_token``."""

    fixed_seconds: float
    per_request_seconds: float
    per_context_token_seconds: float
    expert_seconds: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0

    def base_seconds(self, batch: int) -> float:
        """Of one step, without the context."""
        seconds = self.fixed_seconds + self.per_request_seconds * batch
        if self.num_experts:
            missed = (1 - self.experts_per_token / self.num_experts) ** batch
            seconds += self.expert_seconds * (1 - missed)
        return seconds

    def seconds(self, batch: int, context_tokens: int) -> float:
        """Of one step that makes ``batch`` tokens; ``context_tokens`` are those of all together."""
        return self.base_seconds(batch) + self.per_context_token_seconds * context_tokens
