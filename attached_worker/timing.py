"""What a server costs, as measured at the worker: time per prompt token, and per step."""

import math

from baton.core.cost import DecodeCost, PrefillCost

WEIGHT = 0.2
"""Share of a new measurement in the running mean."""

MAX_STEP_TOKENS = 8192
"""The most prompt tokens that a server is assumed to compute in one step, during which it reports
nothing."""

PATIENCE = 3.0
LEAST_STALL_SECONDS = 1.0
SLOW_DECAY = 0.8
"""What is left of the slowest probe's time with each probe after it."""


class ServerTiming:
    """Running means. A prompt counts only if no other prompt was waiting when it was sent."""

    def __init__(self) -> None:
        self._least_seconds = math.inf
        self._per_token_seconds: float | None = None
        self._step_seconds: float | None = None
        self._slow_probe_seconds = 0.0

    def record_prompt(self, num_tokens: int, seconds: float) -> None:
        """Record the time to the first token of a prompt of which ``num_tokens`` tokens were not
        cached. The shortest time that there was is what a request costs beside its tokens."""
        self._least_seconds = min(self._least_seconds, seconds)
        if num_tokens > 0:
            each = (seconds - self._least_seconds) / num_tokens
            self._per_token_seconds = _mean(self._per_token_seconds, each)

    def record_step(self, seconds: float) -> None:
        """Record the time between two tokens of an answer."""
        self._step_seconds = _mean(self._step_seconds, seconds)

    @property
    def prefill_cost(self) -> PrefillCost | None:
        if self._per_token_seconds is None:
            return None
        return PrefillCost(self._least_seconds, self._per_token_seconds, 0.0)

    @property
    def decode_cost(self) -> DecodeCost | None:
        return None if self._step_seconds is None else DecodeCost(self._step_seconds, 0.0, 0.0)

    def record_probe(self, seconds: float) -> None:
        """Record how long the server took for one token."""
        self._least_seconds = min(self._least_seconds, seconds)
        self._slow_probe_seconds = max(seconds, SLOW_DECAY * self._slow_probe_seconds)

    def record_progress(self, num_probes: float) -> None:
        """Record that tokens came for as long as ``num_probes`` probes of an idle server would have
        taken. While they come, nobody probes it."""
        self._slow_probe_seconds *= SLOW_DECAY**num_probes

    def stall_seconds(self, num_waiting_tokens: int) -> float:
        """Return how long a server that works may take for a probe while prompts of
        ``num_waiting_tokens`` tokens are being computed."""
        step = min(num_waiting_tokens, MAX_STEP_TOKENS) * (self._per_token_seconds or 0.0)
        return max(LEAST_STALL_SECONDS, PATIENCE * (step + self._slow_probe_seconds))


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + WEIGHT * (value - mean)
