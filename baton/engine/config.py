"""The engine's settings: every bound of a step, a queue and a request."""

from dataclasses import dataclass

from baton.core.fairness import SLACK_TOKENS
from baton.core.prefill_order import PREFILL_ORDERS
from baton.errors import Invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Bounds of one engine. Tokens and blocks are counts; wrong values raise Invalid.

    ``max_step_tokens`` is the token budget of a step: it bounds the time between two tokens
    of a decoding request. ``chunk_tokens`` is the most that one prompt gets of it (default:
    all). ``max_running`` bounds the batch, reservations included, and is never above the
    budget, so that every running request advances.

    ``token_gap_seconds`` is what a step may take that reads prompts beside answers, if it can: they
    get so much less of the budget then (:mod:`baton.engine.prefill_budget`). None: no limit.

    ``watermark_blocks`` stay allocatable when a request is admitted beside others, so that it
    isn't preempted at once. With ``forecast`` it is admitted beside others only if memory is
    predicted to suffice until all have ended; ``growth_tokens`` are what an answer is taken for
    while no answers are known.

    Prompts are computed in the ``order`` (a name in ``baton.core.prefill_order.PREFILL_ORDERS``);
    ``admission_window`` bounds how many of those that wait are looked at closely in one step
    (each costs a walk along its cached prefix). With ``fairness``, a tenant that was given more
    than another by ``fairness_slack_tokens`` goes behind it.

    Token ids of requests are below ``vocab_size``; None: not checked.
    """

    block_tokens: int
    max_model_tokens: int
    max_step_tokens: int = 512
    chunk_tokens: int | None = None
    token_gap_seconds: float | None = None
    max_running: int = 64
    max_waiting: int = 1024
    watermark_blocks: int = 2
    forecast: bool = True
    growth_tokens: int = 256
    order: str = "deadline"
    fairness: bool = True
    fairness_slack_tokens: int = SLACK_TOKENS
    admission_window: int = 32
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name, least in _MINIMUMS.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise Invalid(f"{name} is {value}, and must be at least {least}", param=name)
        if self.chunk_tokens is not None and self.chunk_tokens > self.max_step_tokens:
            raise Invalid(
                f"chunk_tokens is {self.chunk_tokens}, and must be at most max_step_tokens "
                f"({self.max_step_tokens})",
                param="chunk_tokens",
            )
        if self.token_gap_seconds is not None and not self.token_gap_seconds > 0:
            told = f"token_gap_seconds is {self.token_gap_seconds}, and must be above 0"
            raise Invalid(told, param="token_gap_seconds")
        if self.order not in PREFILL_ORDERS:
            known = ", ".join(PREFILL_ORDERS)
            raise Invalid(f"order is {self.order!r}, and must be one of {known}", param="order")

    @property
    def chunk_limit(self) -> int:
        """The most tokens of one prompt in one step."""
        return self.max_step_tokens if self.chunk_tokens is None else self.chunk_tokens

    @property
    def running_limit(self) -> int:
        """The most requests in a batch: each needs at least one token of the budget."""
        return min(self.max_running, self.max_step_tokens)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_tokens)


_MINIMUMS: dict[str, float] = {
    "block_tokens": 1,
    "max_model_tokens": 2,
    "max_step_tokens": 1,
    "chunk_tokens": 1,
    "max_running": 1,
    "max_waiting": 0,
    "watermark_blocks": 0,
    "growth_tokens": 0,
    "fairness_slack_tokens": 1,
    "admission_window": 1,
    "vocab_size": 1,
}
