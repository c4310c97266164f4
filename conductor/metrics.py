"""Prometheus metrics of a conductor's decisions and of its view of the cluster."""

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.clock import Clock
from baton.core.placement import Placement
from baton.core.pool_name import pool_name
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role, WorkerState
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import BatonError, Invalid, Overloaded, Unavailable
from baton.registry.membership import Membership
from conductor.store_mirror import StoreMirror

DECISION_SECONDS_BUCKETS = (
    0.00005,
    0.0001,
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.05,
    0.1,
    1,
)

STATES = (WorkerState.JOINING, WorkerState.READY, WorkerState.DRAINING)
"""Every combination of role and of these states is exported, also with 0 members, so that alerts
need no check for absence."""

KINDS = DISAGGREGATED, LOCAL_PREFILL, SINGLE_POOL, MIXED = "pair", "alone", "one_pool", "mixed"
REJECTION_REASONS: dict[type[BatonError], str] = {
    Overloaded: "overloaded",
    Invalid: "impossible",
    Unavailable: "nobody",
}


class ConductorMetrics:
    """Metrics that are updated with each decision."""

    def __init__(self, registry: CollectorRegistry, policy: str) -> None:
        """``policy`` is the name of the placement policy, whose series exist from the start, at
        0."""
        decisions = Counter(
            "baton_conductor_decisions_total",
            "Requests that were placed, by policy and kind: on a prefill and a decode worker "
            "(pair), on a mixed worker (mixed), on a decode worker alone because that is cheaper "
            "(alone), or on the only pool with ready workers (one_pool).",
            ["policy", "kind"],
            registry=registry,
        )
        self._decisions = decisions
        for kind in KINDS:
            decisions.labels(policy, kind)
        refusals = Counter(
            "baton_conductor_refusals_total",
            "Requests that were not placed: they would miss the SLO, make others miss it, or lack "
            "memory (overloaded), they fit no worker (impossible), no worker is ready (nobody), or "
            "the decision crashed (bug).",
            ["reason"],
            registry=registry,
        )
        self._refusals = {
            reason: refusals.labels(reason) for reason in (*REJECTION_REASONS.values(), "bug")
        }
        self._replacements = Counter(
            "baton_conductor_replacements_total",
            "Placements of requests that had been placed before.",
            registry=registry,
        )
        self._seconds = Histogram(
            "baton_conductor_decision_seconds",
            "Duration of a placement decision.",
            buckets=DECISION_SECONDS_BUCKETS,
            registry=registry,
        )

    def record_placed(self, placement: Placement, epoch: int, seconds: float) -> None:
        self._decisions.labels(placement.policy, placement_kind(placement)).inc()
        self._seconds.observe(seconds)
        if epoch > 1:
            self._replacements.inc()

    def record_rejected(self, error: BaseException, seconds: float) -> None:
        self._refusals[REJECTION_REASONS.get(type(error), "bug")].inc()  # type: ignore[arg-type]
        self._seconds.observe(seconds)


class ClusterGauges(Collector):
    """Gauges of the conductor's view of the cluster. A scrape reads the view in another thread, so
    every value read here is replaced as a whole, never modified."""

    def __init__(
        self,
        membership: Membership,
        mirror: StoreMirror,
        plans: Callable[[], Mapping[str, PoolPlan]],
        clock: Clock,
        is_leader: Callable[[], bool] = lambda: False,
    ) -> None:
        self._membership = membership
        self._mirror = mirror
        self._plans = plans
        self._clock = clock
        self._is_leader = is_leader

    def collect(self) -> Iterator[Metric]:
        yield self._members()
        yield GaugeMetricFamily(
            "baton_conductor_registry_age_seconds",
            "Time since the registry last responded.",
            max(self._clock.monotonic() - self._membership.last_answer_seconds, 0.0),
        )
        yield GaugeMetricFamily(
            "baton_conductor_mirror_blocks",
            "Blocks in the store nodes, as known to this conductor.",
            self._mirror.num_blocks,
        )
        yield GaugeMetricFamily(
            "baton_conductor_mirror_nodes",
            "Store nodes that are being watched.",
            self._mirror.num_nodes,
        )
        yield GaugeMetricFamily(
            "baton_conductor_is_leader",
            "1 for the conductor that resizes the pools in Kubernetes.",
            int(self._is_leader()),
        )
        yield from self._plan_metrics()

    def _members(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "baton_conductor_members",
            "Processes of the cluster, as this conductor knows them.",
            labels=["role", "state"],
        )
        members = Tally((m.role, m.state) for m in self._membership.members)
        roles = (Role.ROUTER, Role.CONDUCTOR, *WORKER_KINDS, Role.KVSTORE)
        for role, state in product(roles, STATES):
            family.add_metric([role.value, state.value], members[role, state])
        return family

    def _plan_metrics(self) -> Iterator[Metric]:
        wanted = GaugeMetricFamily(
            "baton_conductor_planned_workers",
            "Number of workers that a pool should have according to the last plan. Pools are named "
            "prefill and decode, or MODEL/prefill and MODEL/decode if there are several models.",
            labels=["pool"],
        )
        rate = GaugeMetricFamily(
            "baton_conductor_forecast_requests_per_second",
            "Request rate that was forecast for the last plan.",
        )
        plans, models = self._plans(), self._membership.current.models
        for model, plan in plans.items():
            for role, count in plan.sizes.items():
                wanted.add_metric([pool_name(model, role, models)], count)
        if plans:
            rate.add_metric([], sum(plan.requests_per_second for plan in plans.values()))
        yield wanted
        yield rate


def placement_kind(placement: Placement) -> str:
    """Classify a placement. It is disaggregated if a prefill and a decode worker were chosen. If
    one worker was chosen for the whole request, and it is not a mixed worker, the placement is a
    local prefill if a decode worker was chosen although both pools had candidates; otherwise it is
    a placement in a single pool."""
    if placement.prefill is not None:
        return DISAGGREGATED if len(placement.workers) > 1 else SINGLE_POOL
    if placement.is_mixed:
        return MIXED
    had_both = placement.prefill_alternatives and placement.decode_alternatives
    return LOCAL_PREFILL if had_both else SINGLE_POOL
