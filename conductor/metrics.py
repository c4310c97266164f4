"""What a conductor tells Prometheus: what it decided, and what it knew."""

from collections import Counter as Tally
from collections.abc import Callable, Iterator
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.clock import Clock
from baton.core.placement import Placement
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role, WorkerState
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

ROLES = (Role.ROUTER, Role.CONDUCTOR, Role.PREFILL, Role.DECODE, Role.KVSTORE)
STATES = (WorkerState.JOINING, WorkerState.READY, WorkerState.DRAINING)
"""None is told as 0: who waits for it to be gone need not ask whether it is absent."""

DISAGGREGATED, LOCAL_PREFILL, SINGLE_POOL = "pair", "alone", "one_pool"
REFUSALS: dict[type[BatonError], str] = {
    Overloaded: "overloaded",
    Invalid: "impossible",
    Unavailable: "nobody",
}


class ConductorMetrics:
    """Counted as decisions are made."""

    def __init__(self, registry: CollectorRegistry) -> None:
        decisions = Counter(
            "baton_conductor_decisions_total",
            "Requests that were placed, by policy and how: on a pair of workers, on a decode "
            "worker alone because that is cheaper, or on the one pool that there is.",
            ["policy", "kind"],
            registry=registry,
        )
        self._decisions = decisions
        refusals = Counter(
            "baton_conductor_refusals_total",
            "Requests that were not placed: no pair meets what is promised, none could ever hold "
            "it, or nobody is there.",
            ["reason"],
            registry=registry,
        )
        self._refusals = {reason: refusals.labels(reason) for reason in (*REFUSALS.values(), "bug")}
        self._again = Counter(
            "baton_conductor_replacements_total",
            "Of those that were placed, requests that had been placed before.",
            registry=registry,
        )
        self._seconds = Histogram(
            "baton_conductor_decision_seconds",
            "What a decision takes.",
            buckets=DECISION_SECONDS_BUCKETS,
            registry=registry,
        )

    def note_placed(self, placement: Placement, epoch: int, seconds: float) -> None:
        self._decisions.labels(placement.policy, placement_kind(placement)).inc()
        self._seconds.observe(seconds)
        if epoch > 1:
            self._again.inc()

    def note_refused(self, error: BaseException, seconds: float) -> None:
        self._refusals[REFUSALS.get(type(error), "bug")].inc()  # type: ignore[arg-type]
        self._seconds.observe(seconds)


class ClusterGauges(Collector):
    """What the conductor knows of the cluster, looked up when somebody asks, from their thread:
    what is read here is replaced as a whole."""

    def __init__(
        self,
        membership: Membership,
        mirror: StoreMirror,
        plan: Callable[[], PoolPlan | None],
        clock: Clock,
        leads: Callable[[], bool] = lambda: False,
    ) -> None:
        self._membership = membership
        self._mirror = mirror
        self._plan = plan
        self._clock = clock
        self._leads = leads

    def collect(self) -> Iterator[Metric]:
        yield self._members()
        yield GaugeMetricFamily(
            "baton_conductor_registry_age_seconds",
            "Since the registry last answered.",
            max(self._clock.monotonic() - self._membership.fresh_at, 0.0),
        )
        yield GaugeMetricFamily(
            "baton_conductor_mirror_blocks",
            "Blocks that the store nodes are known to hold.",
            self._mirror.num_blocks,
        )
        yield GaugeMetricFamily(
            "baton_conductor_mirror_nodes",
            "Store nodes whose changes are followed.",
            self._mirror.num_nodes,
        )
        yield GaugeMetricFamily(
            "baton_conductor_leads",
            "1 for the conductor that resizes the pools in Kubernetes.",
            int(self._leads()),
        )
        yield from self._planned()

    def _members(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "baton_conductor_members",
            "Processes of the cluster, as this conductor knows them.",
            labels=["role", "state"],
        )
        members = Tally((m.role, m.state) for m in self._membership.members)
        for role, state in product(ROLES, STATES):
            family.add_metric([role.value, state.value], members[role, state])
        return family

    def _planned(self) -> Iterator[Metric]:
        wished = GaugeMetricFamily(
            "baton_conductor_wished_workers",
            "How many workers of a pool there should be, by the last plan.",
            labels=["pool"],
        )
        rate = GaugeMetricFamily(
            "baton_conductor_forecast_requests_per_second",
            "The load that the last plan is made for.",
        )
        plan = self._plan()
        if plan is not None:
            wished.add_metric(["prefill"], plan.prefill)
            wished.add_metric(["decode"], plan.decode)
            rate.add_metric([], plan.requests_per_second)
        yield wished
        yield rate


def placement_kind(placement: Placement) -> str:
    """Whoever had a choice of both pools and took one worker did so by choice."""
    if placement.prefill is not None:
        return DISAGGREGATED
    had_both = placement.prefill_alternatives and placement.decode_alternatives
    return LOCAL_PREFILL if had_both else SINGLE_POOL
