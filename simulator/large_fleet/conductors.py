"""What the conductors of a fleet know of its workers."""

import numpy as np

from baton.core.cost import DecodeCost
from simulator.large_fleet.arrays import Bools, Floats, Ints, decode_step_seconds, sums_by_group
from simulator.large_fleet.backlog import PrefillBacklog

EWMA_WEIGHT = 0.003
"""As in :mod:`conductor.admission_rates`."""


class AdmissionShares:
    """The shares of recent requests that were admitted, by quartile of prompt length, in the way of
    :class:`conductor.admission_rates.AdmissionTracker`. The quartiles are those of the sample."""

    def __init__(self, prompt_tokens: Floats) -> None:
        *edges, large = np.percentile(prompt_tokens, [25, 50, 75, 99.5])
        self.edges: Floats = np.array(edges)
        self.large_tokens = float(large)
        self._admitted: Floats = np.ones(4)

    def record(self, prompt_tokens: Floats, admitted: Bools) -> None:
        quartiles = np.searchsorted(self.edges, prompt_tokens)
        counts = np.bincount(quartiles, minlength=4)
        shares = np.bincount(quartiles, weights=admitted, minlength=4) / np.maximum(counts, 1)
        weights = 1 - (1 - EWMA_WEIGHT) ** counts
        self._admitted += weights * (shares - self._admitted)

    def advantages(self, prompt_tokens: Floats) -> Floats:
        """Return :meth:`conductor.policy.snapshot.AdmissionRates.advantage` for each prompt."""
        shares: Floats = self._admitted - self._admitted.min()
        return shares[np.searchsorted(self.edges, prompt_tokens)]


class ConductorViews:
    """The workers' loads as each conductor believes them to be: as reported, plus what it has
    placed since, less what has probably been done since. Like the production load tracker, a
    conductor counts the prefill work that it places once for each conductor.

    Arrays have the workers of the first conductor's view first, then those of the second one's:
    ``[num_conductors * num_workers]``."""

    def __init__(self, num_prefill: int, num_decode: int, num_conductors: int) -> None:
        self.num_conductors = num_conductors
        self.num_prefill, self.num_decode = num_prefill, num_decode
        self.backlog = PrefillBacklog(num_conductors * num_prefill)
        self.num_requests: Floats = np.zeros(num_conductors * num_decode)
        self.context_tokens: Floats = np.zeros(num_conductors * num_decode)
        self.projected_tokens: Floats = np.zeros(num_conductors * num_decode)

    def report(
        self,
        backlog: PrefillBacklog,
        is_prefill_up: Bools,
        decode_loads: tuple[Floats, Floats, Floats],
        is_decode_up: Bools,
    ) -> None:
        """Take over the loads of the workers that are up; the others report nothing."""
        known = (self.num_requests, self.context_tokens, self.projected_tokens)
        for values, reported in zip(known, decode_loads, strict=True):
            rows = values.reshape(self.num_conductors, -1)
            np.copyto(rows, reported, where=is_decode_up)
        due = self.backlog.due_seconds.reshape(self.num_conductors, self.num_prefill, -1)
        np.copyto(due, backlog.due_seconds, where=is_prefill_up[:, None])

    def advance(self, seconds: float, cost: DecodeCost, answer_tokens: float) -> None:
        self.backlog.advance(seconds)
        steps = decode_step_seconds(cost, self.num_requests, self.context_tokens)
        kept = 1 - np.minimum(seconds / np.maximum(steps * answer_tokens, seconds), 1.0)
        self.context_tokens *= kept
        self.projected_tokens *= kept

    def add(
        self, prefills: Ints, bins: Ints, seconds: Floats, decodes: Ints, prompt_tokens: Floats,
        answer_tokens: float,
    ) -> None:  # fmt: skip
        """Add requests that the conductors have placed. Workers are positions in the arrays."""
        self.backlog.add(prefills, bins, seconds * self.num_conductors)
        size = len(self.num_requests)
        prompts = sums_by_group(decodes, prompt_tokens, size)
        counts = np.bincount(decodes, minlength=size)
        self.num_requests += counts
        self.context_tokens += prompts
        self.projected_tokens += prompts + answer_tokens * counts
