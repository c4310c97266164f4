"""The live conductor of one model. It maintains the inputs of the placement policy, applies the
policy, and records its decisions. The process serves the conductors of all models, as a
:class:`~conductor.model_conductors.ModelConductors` in a
:class:`~conductor.telemetry.ConductorTelemetry`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.clock import Clock
from baton.core.ids import BlockKey, WorkerId
from baton.core.member import Member
from baton.core.placement import (
    MAX_ALTERNATIVES,
    Placement,
    PlacementQuery,
)
from baton.core.pool_plan import PoolPlan
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import Overloaded
from baton.placement.refusal import PlacementRefused
from baton.registry.member_codec import member_to_json
from baton.registry.membership import MemberView
from conductor.admission_rates import AdmissionTracker
from conductor.cache_index import CacheIndex
from conductor.limits import MAX_REPORT_AGE_SECONDS
from conductor.load_tracker import LoadTracker
from conductor.planner import Planner, PlannerConfig
from conductor.policy.baselines import PlacementPolicy
from conductor.policy.config import MAX_SHORT_PROMPT_ADVANTAGE, BatonPolicyConfig
from conductor.policy.decision import Decision
from conductor.policy.policies import DEFAULT_POLICY, get_policy
from conductor.policy.snapshot import PolicyQuery, Snapshot
from conductor.store_mirror import StoreMirror
from conductor.worker_directory import WorkerDirectory


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    """A conductor's settings. ``admission`` says whether requests may be rejected; None means True
    unless a worker runs on a CPU. If ``local_prefill`` is True, decode workers may prefill prompts
    themselves; if None, only decode workers that do not run on a CPU may. If ``ttft_slo_seconds``
    is 0, there is no TTFT SLO. ``max_short_prompt_advantage`` is that of
    :class:`conductor.policy.config.BatonPolicyConfig`."""

    policy: str = DEFAULT_POLICY
    admission: bool | None = None
    max_short_prompt_advantage: float = MAX_SHORT_PROMPT_ADVANTAGE
    local_prefill: bool | None = None
    ttft_slo_seconds: float = 2.0
    itl_slo_seconds: float = 0.05
    planner: PlannerConfig = field(default_factory=PlannerConfig)


def _policy_of(config: ConductorConfig) -> PlacementPolicy:
    advantage = config.max_short_prompt_advantage
    return get_policy(config.policy, BatonPolicyConfig(max_short_prompt_advantage=advantage))


def describe_members(members: Sequence[Member]) -> tuple[Sequence[str], str]:
    """Return the members, each as JSON, and the hash ring: the ids of all workers, sorted and
    separated by spaces."""
    workers = [member.id for member in members if member.role in WORKER_KINDS]
    return [member_to_json(member).decode() for member in members], " ".join(sorted(workers))


class Conductor:
    """Places the requests of one model. Implements
    :class:`baton.rpc.conductor_service.ConductorCore`. Raises Invalid for an unknown policy."""

    def __init__(
        self,
        membership: MemberView,
        mirror: StoreMirror,
        clock: Clock,
        config: ConductorConfig,
        reported: StoreMirror | None = None,
    ) -> None:
        """``reported``: see :class:`conductor.cache_index.CacheIndex`."""
        self._membership = membership
        self._clock = clock
        self._config = config
        self._place = _policy_of(config)
        self._load_tracker = LoadTracker()
        self._cache_index = CacheIndex(mirror, reported)
        self._directory = WorkerDirectory(
            membership, self._load_tracker, self._cache_index, clock, config.local_prefill
        )
        self._admission_tracker = AdmissionTracker()
        self._planner = Planner(config.planner, clock.monotonic())
        self._num_placed = 0

    def place(self, query: PlacementQuery) -> Placement:
        """Place a request on workers of one variant. Raises Unavailable if none of them is ready or
        no worker has loaded the request's adapter, PlacementRefused if the request is rejected, and
        Invalid if it fits no worker. The query's trace is not used here:
        :class:`ConductorTelemetry` handles it."""
        snapshot = self.snapshot(query.variant)
        num_tokens, keys = query.num_tokens, query.block_keys
        excluded = query.excluded | self._directory.workers_outside(query.variant)
        if query.adapter is not None:
            excluded |= self._directory.workers_without(query.adapter)
        policy_query = PolicyQuery(
            query.request_id,
            num_tokens,
            query.max_new_tokens,
            keys,
            excluded=excluded,
            ttft_slo_seconds=self._config.ttft_slo_seconds or math.inf,
            itl_slo_seconds=self._config.itl_slo_seconds,
            must_admit=query.epoch > 1 or not self._may_reject(snapshot.now_seconds),
            session=query.session,
            exact_kv=query.exact_kv,
            max_attended_tokens=query.max_attended_tokens,
        )
        try:
            decision = self._place(snapshot, policy_query)
        except Overloaded as error:
            self._admission_tracker.record(num_tokens, admitted=False)
            if len(snapshot.prefills) or len(snapshot.decodes):
                self._planner.record_rejected(num_tokens)
            would_be = self._place(snapshot, replace(policy_query, must_admit=True))
            raise PlacementRefused(error, self._placement(would_be, keys)) from None
        finally:
            self._cache_index.popularity.record(keys)
        if query.epoch <= 1:
            self._admission_tracker.record(num_tokens, admitted=True)
            self._planner.record_placed(snapshot, num_tokens, decision)
        self._record_decision(snapshot, policy_query, decision)
        return self._placement(decision, keys)

    def snapshot(self, variant: str = "") -> Snapshot:
        """Return the current snapshot, for a request that is placed on workers of ``variant``. It
        shares state with the load tracker, so it is valid for one decision only."""
        now, directory = self._clock.monotonic(), self._directory
        self._load_tracker.advance(now, directory.answer_tokens)
        directory.refresh()
        return Snapshot(
            now,
            self._num_placed,
            self._load_tracker.prefills,
            self._load_tracker.decodes,
            self._cache_index,
            *directory.block_of(variant),
            directory.link,
            directory.answer_tokens,
            directory.short_answer_tokens,
            self._admission_tracker.view,
            self._load_tracker.mixed,
        )

    def set_config(self, config: ConductorConfig) -> None:
        """Use the admission, the SLOs and the planner's configuration of ``config`` from now on;
        the policy's name and ``local_prefill`` stay as they are."""
        kept = self._config
        self._config = replace(config, policy=kept.policy, local_prefill=kept.local_prefill)
        self._place = _policy_of(self._config)
        self._planner.config = config.planner

    def set_leaving_workers(self, leaving: frozenset[WorkerId]) -> None:
        """Set the workers that are about to terminate, on which nothing is placed from now on. This
        replaces the previous set."""
        self._directory.set_leaving_workers(leaving)

    def plan_pools(self) -> PoolPlan | None:
        """Make a new plan from the load's trend, after updating the trend with the requests since
        the last plan. Return None before the first request."""
        return self._planner.plan(self.snapshot(), self._load_tracker.num_conductors)

    def pool_plan(self, model: str = "") -> PoolPlan | None:
        """Return the latest plan. ``model`` is not used, since a conductor serves one model."""
        return self._planner.last_plan

    def describe(self) -> tuple[Sequence[str], str]:
        return describe_members(self._membership.current.members)

    def _may_reject(self, now: float) -> bool:
        if now - self._membership.last_answer_seconds > MAX_REPORT_AGE_SECONDS:
            return False
        if self._config.admission is None:
            return not self._directory.has_cpu_workers
        return self._config.admission

    def _record_decision(self, snapshot: Snapshot, query: PolicyQuery, decision: Decision) -> None:
        self._num_placed += 1
        self._load_tracker.record_dispatch(
            snapshot.now_seconds, query, decision, snapshot.answer_tokens
        )
        is_mixed = decision.decode in snapshot.mixed
        computing = decision.decode if is_mixed else decision.prefill
        if computing is not None:
            self._cache_index.prefill_index.record(computing, query.keys)
        if decision.decode in snapshot.decodes:
            self._cache_index.decode_index.record(decision.decode, query.keys)

    def _placement(self, decision: Decision, keys: tuple[BlockKey, ...]) -> Placement:
        directory, tracker = self._directory, self._load_tracker
        prefill, decode = decision.prefill or decision.decode, decision.decode
        computing, answering = tracker.view(prefill), tracker.view(decode)
        prompts, answers = computing and computing.prefill, answering and answering.decode
        return Placement(
            directory.worker_ref(decision.prefill) if decision.prefill is not None else None,
            directory.worker_ref(decision.decode),
            decision.reason,
            self._cache_index.store_hint(directory.store_node_of(prefill), keys),
            policy=self._config.policy,
            ttft_seconds=decision.ttft_seconds if prompts and prompts.is_measured else None,
            itl_seconds=decision.itl_seconds if answers and answers.is_measured else None,
            prefill_alternatives=decision.prefill_scores[:MAX_ALTERNATIVES],
            decode_alternatives=decision.decode_scores[:MAX_ALTERNATIVES],
            mixed_alternatives=decision.mixed_scores[:MAX_ALTERNATIVES],
            kv_codec=decision.kv_codec,
            codec_alternatives=decision.codec_scores,
        )
