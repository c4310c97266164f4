"""A conductor's plan of how many workers each pool should have."""

from dataclasses import dataclass

from baton.core.states import Role

PLANNED_ROLES = (Role.PREFILL, Role.DECODE)
"""The roles whose pools are planned and resized; others keep their sizes."""

MAX_POOL_ALTERNATIVES = 16
"""Maximum number of alternatives in a plan."""


@dataclass(frozen=True, slots=True)
class PoolAlternative:
    """The predicted utilisation (0 to 1) of a pool ("prefill" or "decode") with ``num_workers``."""

    pool: str
    num_workers: int
    utilisation: float


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The planned sizes of both pools. ``serving_prefill`` and ``serving_decode`` are the numbers
    of workers that serve now, as far as the conductor knows. The remaining numbers are the load for
    which the plan is made: requests per second of the whole cluster, mean tokens of a prompt and of
    an answer, and the fraction of prompt tokens that are cached."""

    prefill: int
    decode: int
    reason: str
    serving_prefill: int
    serving_decode: int
    requests_per_second: float
    prompt_tokens: float
    answer_tokens: float
    cached_fraction: float
    alternatives: tuple[PoolAlternative, ...] = ()

    @property
    def sizes(self) -> dict[Role, int]:
        return dict(zip(PLANNED_ROLES, (self.prefill, self.decode), strict=True))

    @property
    def num_serving(self) -> dict[Role, int]:
        return dict(zip(PLANNED_ROLES, (self.serving_prefill, self.serving_decode), strict=True))
