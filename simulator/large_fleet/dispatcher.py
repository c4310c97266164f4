"""Places a large fleet's requests: several conductors, each with its own view."""

import numpy as np

from conductor.policy.config import BatonPolicyConfig
from simulator.large_fleet.arrays import Ints
from simulator.large_fleet.autoscaling import PlanWindow
from simulator.large_fleet.conductors import AdmissionShares, ConductorViews
from simulator.large_fleet.placement import (
    BATCH_SHARE,
    BatchDecision,
    BatchPolicy,
    BatchPolicyConfig,
    RequestBatch,
)
from simulator.large_fleet.sample import RequestSample, prefill_seconds
from simulator.large_fleet.state import FleetState
from simulator.large_fleet.statistics import FleetStatistics


class Dispatcher:
    """Places requests in batches. ``window`` counts them for the planner."""

    def __init__(
        self,
        state: FleetState,
        sample: RequestSample,
        statistics: FleetStatistics,
        generator: np.random.Generator,
    ) -> None:
        cluster = state.cluster
        self.window = PlanWindow()
        self.num_placed = 0
        self._state, self._statistics, self._generator = state, statistics, generator
        self._answer_tokens = float(sample.answer_tokens.mean())
        self._shares = AdmissionShares(sample.prompt_tokens)
        self._policy = BatchPolicy(_policy_config(state, sample), state.bins, generator)
        # Conductors whose reports are never old know the same.
        num_views = cluster.num_conductors if cluster.report_seconds else 1
        self._views = ConductorViews(cluster.num_prefill, cluster.num_decode, num_views)
        self._next_report_seconds = 0.0

    @property
    def projected_tokens(self) -> float:
        """The tokens of KV that all requests will take, as the first conductor knows it."""
        return float(self._views.projected_tokens[: self._views.num_decode].sum())

    def advance(self, seconds: float, num_passed_bins: int) -> None:
        """Bring all views up to date: to the reports, if it is time for them; otherwise by what
        workers have presumably done in the last ``seconds``."""
        state = self._state
        self._views.backlog.pass_bins(num_passed_bins)
        self._views.advance(seconds, state.cluster.decode_cost, self._answer_tokens)
        if state.now_seconds >= self._next_report_seconds:
            self._next_report_seconds = state.now_seconds + state.cluster.report_seconds
            loads = state.decode_pool.loads(self._answer_tokens)
            self._views.report(state.backlog, state.prefill.is_up, loads, state.decode.is_up)

    def place(self, slots: Ints, must_admit: bool) -> Ints:
        """Place requests, which the conductors receive in turn. Those that are rejected are
        released. Return those that were placed on workers that are down. There must be workers to
        place on."""
        smaller = min(len(self._state.prefill.known), len(self._state.decode.known))
        size = max(smaller // BATCH_SHARE, 1) * self._views.num_conductors
        return np.concatenate(
            [
                self._place_batch(slots[first : first + size], must_admit)
                for first in range(0, len(slots), size)
            ]
        )

    def _place_batch(self, slots: Ints, must_admit: bool) -> Ints:
        state, table = self._state, self._state.table
        batch = self._batch(slots, must_admit)
        decision = self._policy.place(
            state.now_seconds,
            self._views,
            state.prefill.known,
            state.decode.known,
            batch,
            self._shares,
        )
        if not must_admit:
            self._shares.record(batch.prompt_tokens, decision.admitted)
            self._record(batch, decision)
            rejected = slots[~decision.admitted]
            self._statistics.record_rejected(state.now_seconds, len(rejected))
            table.release(rejected)
        return self._dispatch(slots, batch, decision)

    def _batch(self, slots: Ints, must_admit: bool) -> RequestBatch:
        """Return the requests as the policy sees them. A worker that has failed or started since it
        served a prefix doesn't have it any more. A restarted request's prefix is where it was
        computed; which worker has another request's prefix is drawn at random."""
        state, table = self._state, self._state.table
        prompts = table.prompt_tokens[slots] + table.emitted_tokens[slots]
        wanted = state.prefill.wanted
        holders = table.prefill[slots]
        if not must_admit:
            holders = wanted[self._generator.integers(len(wanted), size=len(slots))]
        used_at = state.now_seconds - table.reuse_seconds[slots]
        is_kept = state.prefill.is_up[holders] & (
            state.prefill.up_since_seconds[holders] <= used_at
        )
        cached = np.where(is_kept, np.minimum(table.cached_tokens[slots], prompts - 1), 0.0)
        return RequestBatch(
            prompt_tokens=prompts,
            cached_tokens=cached,
            idle_seconds=prefill_seconds(
                state.cluster.prefill_cost, prompts, np.zeros(len(prompts))
            ),
            holders=holders,
            conductors=np.arange(len(slots)) % self._views.num_conductors,
            must_admit=must_admit,
        )

    def _record(self, batch: RequestBatch, decision: BatchDecision) -> None:
        admitted, window = decision.admitted, self.window
        window.num_requests += len(batch)
        window.prompt_tokens += float(batch.prompt_tokens.sum())
        window.placed_tokens += float(batch.prompt_tokens[admitted].sum())
        window.cached_tokens += float(decision.cached_tokens[admitted].sum())
        window.work_seconds += float(decision.service_seconds[admitted].sum())

    def _dispatch(self, slots: Ints, batch: RequestBatch, decision: BatchDecision) -> Ints:
        state, table, chosen = self._state, self._state.table, decision.admitted
        slots, prompts = slots[chosen], batch.prompt_tokens[chosen]
        bins, cached = decision.bins[chosen], decision.cached_tokens[chosen]
        prefills, decodes = decision.prefills[chosen], decision.decodes[chosen]
        service = decision.service_seconds[chosen]
        views, conductors = self._views, batch.conductors[chosen]
        views.add(
            conductors * views.num_prefill + prefills,
            bins,
            service,
            conductors * views.num_decode + decodes,
            prompts,
            self._answer_tokens,
        )
        table.prefill[slots], table.decode[slots] = prefills, decodes
        table.cached_tokens[slots] = cached
        self.num_placed += len(slots)
        placed = float(prompts.sum()), float(cached.sum())
        self._statistics.record_placed(state.now_seconds, *placed)
        is_up = state.prefill.is_up[prefills] & state.decode.is_up[decodes]
        ready = np.maximum(table.arrival_seconds[slots] - state.now_seconds, 0.0)
        ready += decision.fetch_seconds[chosen]
        state.submit(
            slots[is_up], bins[is_up], (prompts - cached)[is_up], cached[is_up], ready[is_up]
        )
        return slots[~is_up]


def _policy_config(state: FleetState, sample: RequestSample) -> BatchPolicyConfig:
    cluster = state.cluster
    return BatchPolicyConfig(
        policy=BatonPolicyConfig(),
        prefill_cost=cluster.prefill_cost,
        decode_cost=cluster.decode_cost,
        link=cluster.link,
        kv_bytes_per_token=cluster.kv_bytes_per_token,
        capacity_tokens=float(cluster.device_tokens),
        ttft_slo_seconds=cluster.ttft_slo_seconds,
        itl_slo_seconds=cluster.itl_slo_seconds,
        answer_tokens=float(sample.answer_tokens.mean()),
        short_answer_tokens=float(np.percentile(sample.answer_tokens, 10)),
    )
