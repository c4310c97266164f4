"""Baton's placement policy for a batch of requests, with arrays.

It follows :mod:`conductor.policy.baton`: the same candidates, scores and reasons for a rejection.
It is an approximation in these respects:

- A batch is placed on one state of the fleet. Of its requests, the first one gets the least loaded
  worker, the second one the second-least loaded, and so on.
- The worker that served a prefix last has it cached; all others fetch it.
- Queued work is known by bins of deadlines.
- Decode workers prefill no prompts themselves.
"""

from dataclasses import dataclass

import numpy as np

from baton.core.cost import DecodeCost, PrefillCost
from conductor.policy.config import (
    IDLE_QUEUE_SECONDS,
    MAX_MARGIN_SHARE,
    SLO_MISS_PENALTY,
    BatonPolicyConfig,
)
from conductor.policy.snapshot import LinkSpeed
from simulator.large_fleet.arrays import Bools, Floats, Ints, decode_step_seconds
from simulator.large_fleet.backlog import DeadlineBins
from simulator.large_fleet.conductors import AdmissionShares, ConductorViews
from simulator.large_fleet.sample import prefill_seconds

BATCH_SHARE = 4
"""In a batch, a conductor has at most one request per this many workers of a pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicyConfig:
    policy: BatonPolicyConfig
    prefill_cost: PrefillCost
    decode_cost: DecodeCost
    link: LinkSpeed
    kv_bytes_per_token: int
    capacity_tokens: float
    ttft_slo_seconds: float
    itl_slo_seconds: float
    answer_tokens: float
    short_answer_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBatch:
    """Requests to place, ``[n]`` each, which ``conductors`` receive in turn. ``idle_seconds`` is
    the time to compute the whole prompt; ``holders`` are the workers that have the prompt's first
    ``cached_tokens`` tokens."""

    prompt_tokens: Floats
    cached_tokens: Floats
    idle_seconds: Floats
    holders: Ints
    conductors: Ints
    must_admit: bool

    def __len__(self) -> int:
        return len(self.prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDecision:
    """The decision on each request of a batch, ``[n]``. ``bins`` are positions in the backlog.
    ``service_seconds`` is the predicted time to compute the part of the prompt that is neither
    cached nor fetched (``cached_tokens``), once it has been fetched in ``fetch_seconds``."""

    prefills: Ints
    decodes: Ints
    admitted: Bools
    bins: Ints
    service_seconds: Floats
    fetch_seconds: Floats
    cached_tokens: Floats


class BatchPolicy:
    def __init__(
        self, config: BatchPolicyConfig, bins: DeadlineBins, generator: np.random.Generator
    ) -> None:
        self._config = config
        self._bins = bins
        self._generator = generator

    def place(
        self,
        now_seconds: float,
        views: ConductorViews,
        prefills: Ints,
        decodes: Ints,
        batch: RequestBatch,
        shares: AdmissionShares,
    ) -> BatchDecision:
        """Place a batch on the workers ``prefills`` and ``decodes``, of which there is at least one
        each."""
        config = self._config
        deadlines = now_seconds + config.ttft_slo_seconds + batch.idle_seconds
        bins = self._bins.index(self._bins.number(deadlines))
        candidates = self._candidates(views, prefills, batch)
        seen = candidates + (batch.conductors * views.num_prefill)[:, None]
        cached, fetch = self._cached(batch, candidates)
        service = prefill_seconds(
            config.prefill_cost, batch.prompt_tokens[:, None] - cached, cached
        )
        ahead = np.maximum(views.backlog.due_seconds[seen, bins[:, None]], fetch)
        queued = views.backlog.total_seconds[seen]
        margin = min(config.policy.ttft_margin_seconds, config.ttft_slo_seconds * MAX_MARGIN_SHARE)
        late = ahead + service - (deadlines - margin - now_seconds)[:, None]
        made_late = self._made_late(now_seconds, views, seen, bins, service, queued)
        score = queued + fetch + config.policy.service_weight * service
        score += SLO_MISS_PENALTY * ((late > 0) + 1.0 * made_late)
        rows = np.arange(len(batch))
        best = np.argmin(score, axis=1)
        chosen = self._decodes(views, decodes, batch)
        admitted = np.ones(len(batch), dtype=np.bool_)
        if config.policy.admission and not batch.must_admit:
            is_late = (late > 0)[rows, best]
            admitted &= ~(is_late & (ahead[rows, best] > IDLE_QUEUE_SECONDS))
            admitted &= is_late | ~made_late[rows, best]
            admitted &= self._decode_admits(views, chosen, batch, shares)
        return BatchDecision(
            prefills=candidates[rows, best],
            decodes=chosen,
            admitted=admitted,
            bins=bins,
            service_seconds=service[rows, best],
            fetch_seconds=fetch[rows, best],
            cached_tokens=cached[rows, best],
        )

    # -- prefill ---------------------------------------------------------------------------

    def _candidates(self, views: ConductorViews, prefills: Ints, batch: RequestBatch) -> Ints:
        """Return the candidates for each request, ``[n, num_candidates]``: random workers in place
        of those that the hash ring would give, the worker with the prefix, and one of the least
        loaded."""
        count, policy = len(batch), self._config.policy
        ring = prefills[
            self._generator.integers(len(prefills), size=(count, policy.ring_candidates))
        ]
        totals = views.backlog.total_seconds.reshape(views.num_conductors, -1)[:, prefills]
        least = self._least(totals, count, policy.least_loaded_candidates)
        has_prefix = batch.cached_tokens > 0
        holders = np.where(has_prefix, batch.holders, ring[:, 0])
        return np.column_stack((ring, holders, prefills[least]))

    def _least(self, loads: Floats, count: int, num_spare: int) -> Ints:
        """Return the positions of the least loaded workers, ``[count]``, for ``count`` requests
        that the conductors receive in turn. ``loads`` (``[num_conductors, num_workers]``) are what
        each of them knows. Some of the least loaded workers are replaced by the next
        ``num_spare - 1`` ones. If there are too few workers, some come more than once."""
        num_each = -(-count // len(loads))
        num_least = min(num_each + num_spare - 1, loads.shape[1])
        least = np.argpartition(loads, num_least - 1, axis=1)[:, :num_least]
        if num_spare > 1:
            least = self._generator.permuted(least, axis=1)
        by_turn = least.take(np.arange(num_each) % num_least, axis=1)
        positions: Ints = by_turn.T.ravel()[:count]
        return positions

    def _cached(self, batch: RequestBatch, candidates: Ints) -> tuple[Floats, Floats]:
        """Return the cached tokens and the time to fetch them, ``[n, num_candidates]``."""
        config = self._config
        cached = np.broadcast_to(batch.cached_tokens[:, None], candidates.shape)
        is_local = candidates == batch.holders[:, None]
        size = cached * config.kv_bytes_per_token
        fetch = config.link.latency_seconds + size / config.link.bytes_per_second
        computed = prefill_seconds(
            config.prefill_cost, batch.prompt_tokens - batch.cached_tokens, batch.cached_tokens
        )
        is_faster = fetch + computed[:, None] < batch.idle_seconds[:, None]
        is_fetched = ~is_local & is_faster & (cached > 0)
        return (
            np.where(is_local | is_fetched, cached, 0.0),
            np.where(is_fetched, fetch, 0.0),
        )

    def _made_late(
        self,
        now_seconds: float,
        views: ConductorViews,
        candidates: Ints,
        bins: Ints,
        service: Floats,
        queued: Floats,
    ) -> Bools:
        """Return whether each candidate (a position in the views) has prompts that would miss their
        deadline only because of the new one, ``[n, num_candidates]``. They have later deadlines
        than the new one, so there are none if all work ends before the new prompt's deadline."""
        middles = self._bins.middles() - now_seconds
        made_late: Bools = np.zeros(candidates.shape, dtype=np.bool_)
        rows, columns = np.nonzero(queued + service > middles[bins][:, None])
        if len(rows):
            due = views.backlog.due_seconds[candidates[rows, columns]]
            is_later = np.arange(due.shape[1]) > bins[rows][:, None]
            is_later[:, 1:] &= due[:, 1:] > due[:, :-1]
            slack = middles - due
            is_hit = (slack >= 0) & (slack < service[rows, columns][:, None])
            made_late[rows, columns] = np.any(is_later & is_hit, axis=1)
        return made_late

    # -- decode ----------------------------------------------------------------------------

    def _decodes(self, views: ConductorViews, decodes: Ints, batch: RequestBatch) -> Ints:
        loads = views.projected_tokens.reshape(views.num_conductors, -1)[:, decodes]
        return decodes[self._least(loads, len(batch), 1)]

    def _decode_admits(
        self, views: ConductorViews, chosen: Ints, batch: RequestBatch, shares: AdmissionShares
    ) -> Bools:
        """Return whether each request fits on its decode worker, in time and in memory."""
        config = self._config
        seen = batch.conductors * views.num_decode + chosen
        requests, context = views.num_requests[seen], views.context_tokens[seen]
        projected = views.projected_tokens[seen]
        itl = decode_step_seconds(config.decode_cost, requests + 1, context + batch.prompt_tokens)
        in_time = (itl <= config.itl_slo_seconds) | (requests == 0)
        step = decode_step_seconds(config.decode_cost, requests, context)
        free = config.capacity_tokens - projected
        needed = batch.prompt_tokens + config.answer_tokens
        is_favoured = (
            shares.advantages(batch.prompt_tokens) > config.policy.max_short_prompt_advantage
        )
        needed = needed + np.where(is_favoured, shares.large_tokens, 0.0)
        deficit = np.maximum(needed - free, 0.0)
        drain = deficit / np.maximum(projected, 1.0) * step
        spare = np.maximum(config.itl_slo_seconds - step, 0.0) * config.short_answer_tokens
        waits = (deficit > 0) & (requests > 0) & (drain * config.answer_tokens > spare)
        admits: Bools = in_time & ~waits
        return admits
