"""How many workers there should be, as a conductor sees it."""

from dataclasses import dataclass

MAX_POOL_ALTERNATIVES = 16
"""That a plan tells of."""


@dataclass(frozen=True, slots=True)
class PoolAlternative:
    """With so many workers of a pool ("prefill" or "decode"), so much of their time would be used,
    1 being all of it."""

    pool: str
    num_workers: int
    utilisation: float


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """``serving_prefill`` and ``serving_decode`` are those that the conductor knows to be there.
    The load that it plans for: requests per second of the whole cluster, tokens of a prompt and of
    an answer in the mean, and the share of prompts' tokens that needs no computing."""

    prefill: int
    decode: int
    reason: str
    serving_prefill: int
    serving_decode: int
    requests_per_second: float
    prompt_tokens: float
    answer_tokens: float
    cached_share: float
    alternatives: tuple[PoolAlternative, ...] = ()
