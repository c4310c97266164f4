"""The live conductor: keeps what policies decide from, asks one, and remembers what it decided."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.core.ids import BlockKey, WorkerId
from baton.core.placement import MAX_ALTERNATIVES, Placement, PlacementAlternative
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role
from baton.errors import Overloaded
from baton.registry.member_codec import member_to_json
from baton.registry.membership import Membership
from conductor.admission_rates import AdmissionTracker
from conductor.cache_index import CacheIndex
from conductor.load_tracker import LoadTracker
from conductor.planner import Planner, PlannerConfig
from conductor.policy.decision import Decision, ScoredWorker
from conductor.policy.policies import DEFAULT_POLICY, get_policy
from conductor.policy.snapshot import PolicyQuery, Snapshot
from conductor.store_mirror import StoreMirror
from conductor.worker_directory import WorkerDirectory

MAX_REGISTRY_AGE_SECONDS = 10.0
"""Who has heard nothing from the registry for so long refuses nobody."""


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    """``admission`` None: on, unless a worker computes on a CPU. ``read_alone``: whether a decode
    worker may read a prompt itself; None: unless it computes on a CPU. ``first_token_seconds`` 0:
    no first token is promised."""

    policy: str = DEFAULT_POLICY
    admission: bool | None = None
    read_alone: bool | None = None
    first_token_seconds: float = 2.0
    token_gap_seconds: float = 0.05
    planner: PlannerConfig = field(default_factory=PlannerConfig)


class Conductor:
    """Implements :class:`baton.rpc.conductor_service.ConductorCore`. Raises Invalid for a policy
    that there isn't."""

    def __init__(
        self, membership: Membership, mirror: StoreMirror, clock: Clock, config: ConductorConfig
    ) -> None:
        self._membership = membership
        self._clock = clock
        self._config = config
        self._place = get_policy(config.policy)
        self._ledger = LoadTracker()
        self._beliefs = CacheIndex(mirror)
        self._roster = WorkerDirectory(
            membership, self._ledger, self._beliefs, clock, config.read_alone
        )
        self._admissions = AdmissionTracker()
        self._planner = Planner(config.planner, clock.monotonic())
        self._num_placed = 0

    def place(
        self,
        *,
        request_id: str,
        epoch: int,
        num_tokens: int,
        max_new_tokens: int,
        keys: tuple[BlockKey, ...],
        excluded: frozenset[str],
        trace: str = "",
        session: str = "",
    ) -> Placement:
        """Raises Unavailable, Overloaded, Invalid. Whoever traces sees to ``trace``."""
        snapshot = self.snapshot()
        query = PolicyQuery(
            request_id,
            num_tokens,
            max_new_tokens,
            keys,
            excluded=frozenset(WorkerId(name) for name in excluded),
            first_token_seconds=self._config.first_token_seconds or math.inf,
            token_gap_seconds=self._config.token_gap_seconds,
            promised=epoch > 1 or not self._may_refuse(snapshot.now_seconds),
            session=session,
        )
        try:
            decision = self._place(snapshot, query)
        except Overloaded:
            self._admissions.record(num_tokens, admitted=False)
            self._planner.refused(num_tokens)
            raise
        finally:
            self._beliefs.heads.record(keys)
        if epoch <= 1:
            self._admissions.record(num_tokens, admitted=True)
            self._planner.placed(snapshot, num_tokens, decision)
        self._note(snapshot, query, decision)
        return self._placement(decision, keys)

    def snapshot(self) -> Snapshot:
        """As of now. The ledger goes on under it: it is for one decision."""
        now, roster = self._clock.monotonic(), self._roster
        self._ledger.advance(now, roster.answer_tokens)
        roster.follow()
        return Snapshot(
            now,
            self._num_placed,
            self._ledger.prefills,
            self._ledger.decodes,
            self._beliefs,
            roster.block_tokens,
            roster.kv_bytes_per_token,
            roster.link,
            roster.answer_tokens,
            roster.short_answer_tokens,
            self._admissions.view,
        )

    def leave(self, leaving: frozenset[WorkerId]) -> None:
        """Nothing is placed on these from now on; those of the last time that are not among them
        may be placed on again."""
        self._roster.leave(leaving)

    def plan_pools(self) -> PoolPlan | None:
        """Anew, from what came since the last time."""
        return self._planner.plan(self.snapshot(), self._ledger.num_conductors)

    def pool_plan(self) -> PoolPlan | None:
        return self._planner.last

    def describe(self) -> tuple[Sequence[str], str]:
        members = self._membership.members
        workers = [m.id for m in members if m.role in (Role.PREFILL, Role.DECODE)]
        return [member_to_json(member).decode() for member in members], " ".join(sorted(workers))

    def _may_refuse(self, now: float) -> bool:
        if now - self._membership.fresh_at > MAX_REGISTRY_AGE_SECONDS:
            return False
        if self._config.admission is None:
            return not self._roster.has_cpu_workers
        return self._config.admission

    def _note(self, snapshot: Snapshot, query: PolicyQuery, decision: Decision) -> None:
        self._num_placed += 1
        self._ledger.dispatched(snapshot.now_seconds, query, decision, snapshot.answer_tokens)
        if decision.prefill is not None:
            self._beliefs.placed.record(decision.prefill, query.keys)
        self._beliefs.handed_over.record(decision.decode, query.keys)

    def _placement(self, decision: Decision, keys: tuple[BlockKey, ...]) -> Placement:
        roster, ledger = self._roster, self._ledger
        reader = decision.prefill or decision.decode
        reads = reader in ledger.prefills and ledger.prefills[reader].measured
        writer = decision.decode
        writes = writer in ledger.decodes and ledger.decodes[writer].measured
        return Placement(
            roster.ref(decision.prefill) if decision.prefill is not None else None,
            roster.ref(decision.decode),
            decision.reason,
            self._beliefs.hint(roster.node_of(reader), keys),
            policy=self._config.policy,
            ttft_seconds=decision.ttft_seconds if reads else None,
            tbt_seconds=decision.tbt_seconds if writes else None,
            prefill_alternatives=_alternatives(decision.prefill_scores),
            decode_alternatives=_alternatives(decision.decode_scores),
        )


def _alternatives(scores: Sequence[ScoredWorker]) -> tuple[PlacementAlternative, ...]:
    return tuple(
        PlacementAlternative(
            scored.worker,
            scored.score,
            scored.queue_seconds,
            scored.service_seconds,
            scored.local_blocks,
            scored.fetched_blocks,
            scored.late_seconds,
        )
        for scored in scores[:MAX_ALTERNATIVES]
    )
