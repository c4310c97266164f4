"""A request on its way through the simulated cluster, and what became of it."""

import math
from dataclasses import dataclass, field

from baton.core.ids import WorkerId
from baton.core.prefill_order import Rank, WaitingPrompt
from baton.traces.trace import TraceRequest
from conductor.policy.snapshot import AnyBlockKey


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """Times are seconds, -1 for what has not happened. ``keys`` are those of the prompt's full
    blocks; ``own_seconds`` is what reading all of it takes an idle worker with an empty cache."""

    number: int
    arrival: TraceRequest
    keys: tuple[AnyBlockKey, ...]
    own_seconds: float
    deadline_seconds: float
    waiting: WaitingPrompt
    # What was decided
    prefill: WorkerId | None = None
    decode: WorkerId | None = None
    rejected: bool = False
    # How far it is
    num_prompt_tokens: int = field(init=False)
    """To be read; after a restart, what was answered until then belongs to it."""
    num_computed: int = 0
    tier_tokens: dict[str, int] = field(default_factory=dict)
    ready_seconds: float = 0.0
    rank: tuple[bool, Rank, int] = (False, (0.0, 0.0), 0)
    rank_until_seconds: float = -math.inf
    has_room: bool = False
    expected_tokens: int = 0
    first_token_seconds: float = -1.0
    num_answered: int = 1
    """Tokens of the answer, once it is read, and when it last joined a batch or left one."""
    joined_step: int = -1
    finished_seconds: float = -1.0
    num_restarts: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.arrival.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        return self.num_prompt_tokens - self.num_computed

    @property
    def context_tokens(self) -> int:
        """Of KV, as of ``num_answered``."""
        return self.arrival.num_prompt_tokens + self.num_answered

    @property
    def has_answer(self) -> bool:
        """All of it, as of ``num_answered``."""
        return self.num_answered >= self.arrival.num_answer_tokens

    def begin_anew(self) -> None:
        """It is nowhere any more; the client has what was answered."""
        emitted = self.num_answered - (self.num_remaining > 0)
        self.num_restarts += 1
        self.num_prompt_tokens = self.arrival.num_prompt_tokens + emitted
        self.num_answered = emitted + 1
        self.num_computed, self.joined_step = 0, -1
        self.has_room = False
        self.tier_tokens.clear()

    @property
    def cached_tokens(self) -> int:
        return sum(self.tier_tokens.values())

    @property
    def ttft_seconds(self) -> float:
        return self.first_token_seconds - self.arrival.at_seconds

    @property
    def tbt_seconds(self) -> float:
        """Mean over the answer; 0 for a single token."""
        gaps = self.arrival.num_answer_tokens - 1
        return (self.finished_seconds - self.first_token_seconds) / gaps if gaps > 0 else 0.0

    def meets(self, token_gap_seconds: float) -> bool:
        """Its deadline, and the mean gap."""
        if self.rejected or self.finished_seconds < 0:
            return False
        in_time = self.first_token_seconds <= self.deadline_seconds
        return in_time and self.tbt_seconds <= token_gap_seconds
