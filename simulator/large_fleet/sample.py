"""The requests from which a fleet's requests are drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.core.cost import PrefillCost
from baton.errors import Invalid
from conductor.policy.snapshot import AnyBlockKey
from simulator.cluster import SimulatedCluster
from simulator.large_fleet.arrays import Floats, Ints
from simulator.request import SimulatedRequest

WARM_UP_SHARE = 0.2
"""The first requests of a simulation are not part of a sample, since they find empty caches."""

MIN_REQUESTS = 10


@dataclass(frozen=True, slots=True)
class RequestSample:
    """Requests that were simulated exactly, ``[num_requests]`` each: their lengths in tokens, how
    many tokens of the prompt were cached, and how long ago the cached part had been used before."""

    prompt_tokens: Floats
    answer_tokens: Floats
    cached_tokens: Floats
    reuse_seconds: Floats

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def draw(self, generator: np.random.Generator, count: int) -> Ints:
        """Draw the numbers of ``count`` requests, with replacement."""
        return generator.integers(len(self), size=count)

    def idle_seconds(self, cost: PrefillCost) -> Floats:
        """Return the time to prefill each prompt on an idle worker without a cache."""
        return prefill_seconds(cost, self.prompt_tokens, np.zeros(len(self)))


def prefill_seconds(cost: PrefillCost, new_tokens: Floats, cached_tokens: Floats) -> Floats:
    """Return :meth:`baton.core.cost.PrefillCost.seconds` for each element; there must be at least
    one new token."""
    return cost.fixed_seconds + work_seconds(cost, new_tokens, cached_tokens)


def work_seconds(cost: PrefillCost, new_tokens: Floats, cached_tokens: Floats) -> Floats:
    """Return the part of a prefill's time that depends on its tokens."""
    pairs = new_tokens * (cached_tokens + new_tokens / 2)
    return cost.per_token_seconds * new_tokens + cost.per_pair_seconds * pairs


def sample_of(cluster: SimulatedCluster, block_tokens: int) -> RequestSample:
    """Return the requests of a run, without those that found its caches cold. For a rejected
    request it is not known what would have been cached, so it gets the values of the served request
    with the next longer prompt. Raises Invalid if there are too few requests."""
    first = int(len(cluster.jobs) * WARM_UP_SHARE)
    jobs = cluster.jobs[first:]
    served = [index for index, job in enumerate(jobs) if not job.rejected]
    if len(served) < MIN_REQUESTS:
        raise Invalid(
            f"{len(served)} requests are too few to draw a fleet's requests from; of a run, there "
            f"must be at least {MIN_REQUESTS} after its first {WARM_UP_SHARE:.0%}"
        )
    prompts = np.array([float(job.arrival.num_prompt_tokens) for job in jobs])
    cached = np.array([float(job.cached_tokens) for job in jobs])
    reuse = np.array(_reuse_seconds(cluster.jobs, block_tokens)[first:])
    order = np.array(sorted(served, key=lambda index: prompts[index]))
    is_rejected = np.array([job.rejected for job in jobs])
    place = np.searchsorted(prompts[order], prompts[is_rejected])
    donors = order[np.minimum(place, len(order) - 1)]
    cached[is_rejected] = np.minimum(cached[donors], prompts[is_rejected] - 1)
    reuse[is_rejected] = reuse[donors]
    answers = np.array([float(max(job.arrival.num_answer_tokens, 1)) for job in jobs])
    return RequestSample(prompts, answers, cached, reuse)


def _reuse_seconds(jobs: Sequence[SimulatedRequest], block_tokens: int) -> list[float]:
    """Return, for each request, the time since the last block of its cached prefix was used before;
    0 if nothing was cached."""
    used_at: dict[AnyBlockKey, float] = {}
    found = []
    for job in jobs:
        now = job.arrival.arrival_seconds
        depth = min(-(-job.cached_tokens // block_tokens), len(job.keys))
        found.append(now - used_at.get(job.keys[depth - 1], now) if depth else 0.0)
        if not job.rejected:
            used_at.update(dict.fromkeys(job.keys, now))
    return found
