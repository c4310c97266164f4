"""A request in the simulated cluster: its state and its results."""

import math
from dataclasses import dataclass, field

from baton.core.ids import WorkerId
from baton.core.prefill_order import Rank, WaitingPrompt
from baton.traces.trace import TraceRequest
from conductor.policy.snapshot import AnyBlockKey


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """Times are in seconds; a time of -1 means that the event has not happened. ``keys`` are the
    block keys of the prompt's full blocks. ``idle_prefill_seconds`` is the time to prefill the
    whole prompt on an idle worker with an empty cache."""

    number: int
    arrival: TraceRequest
    keys: tuple[AnyBlockKey, ...]
    idle_prefill_seconds: float
    deadline_seconds: float
    waiting: WaitingPrompt
    # The decision
    prefill: WorkerId | None = None
    decode: WorkerId | None = None
    rejected: bool = False
    # Progress
    num_prompt_tokens: int = field(init=False)
    """Tokens to prefill; after a restart, they include the answer tokens sent before."""
    num_computed: int = 0
    tier_tokens: dict[str, int] = field(default_factory=dict)
    ready_at_seconds: float = 0.0
    rank: tuple[bool, Rank, int] = (False, (True, False, 0.0), 0)
    rank_until_seconds: float = -math.inf
    has_room: bool = False
    expected_tokens: int = 0
    first_token_at_seconds: float = -1.0
    num_generated_tokens: int = 1
    """Tokens of the answer, once the prompt is prefilled; updated when the request joins or leaves
    a batch."""
    joined_step: int = -1
    finished_at_seconds: float = -1.0
    num_restarts: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.arrival.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        return self.num_prompt_tokens - self.num_computed

    @property
    def context_tokens(self) -> int:
        """The number of tokens in the prompt and in the answer so far
        (``num_generated_tokens``)."""
        return self.arrival.num_prompt_tokens + self.num_generated_tokens

    @property
    def is_answer_complete(self) -> bool:
        """Whether ``num_generated_tokens`` has reached the length of the answer."""
        return self.num_generated_tokens >= self.arrival.num_answer_tokens

    def restart(self) -> None:
        """Reset the request after a crash. The tokens that were already sent to the client become
        part of the prompt."""
        emitted = self.num_generated_tokens - (self.num_remaining > 0)
        self.num_restarts += 1
        self.num_prompt_tokens = self.arrival.num_prompt_tokens + emitted
        self.num_generated_tokens = emitted + 1
        self.num_computed, self.joined_step = 0, -1
        self.has_room = False
        self.tier_tokens.clear()

    @property
    def cached_tokens(self) -> int:
        return sum(self.tier_tokens.values())

    @property
    def ttft_seconds(self) -> float:
        return self.first_token_at_seconds - self.arrival.arrival_seconds

    @property
    def itl_seconds(self) -> float:
        """Mean inter-token latency of the answer; 0 if the answer has only one token."""
        gaps = self.arrival.num_answer_tokens - 1
        return (self.finished_at_seconds - self.first_token_at_seconds) / gaps if gaps > 0 else 0.0

    def meets_slo(self, itl_slo_seconds: float) -> bool:
        """Whether the request met its TTFT deadline and the ITL SLO."""
        if self.rejected or self.finished_at_seconds < 0:
            return False
        in_time = self.first_token_at_seconds <= self.deadline_seconds
        return in_time and self.itl_seconds <= itl_slo_seconds
