"""The autoscaler of a large fleet: the production forecast, sizing and scaling steps, from the
fleet's totals."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from baton.core.ids import WorkerId
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role
from baton.pools.base import PoolWorker
from baton.pools.scaling_policy import (
    PoolObservation,
    ScalingHistory,
    ScalingStep,
    decide_scaling,
)
from conductor.load_forecast import LoadForecast, LoadTrend
from conductor.planner import (
    PLAN_SECONDS,
    THROUGHPUT_MEMORY_SECONDS,
    decode_tokens_per_second,
)
from conductor.policy.sizing import PoolCapacity, PoolSizes, size_pools
from simulator.cluster_config import ClusterConfig
from simulator.large_fleet.arrays import Ints
from simulator.large_fleet.config import FleetAutoscaling
from simulator.large_fleet.pool_state import PoolState


@dataclass(slots=True)
class PlanWindow:
    """The requests since the last plan, as in :mod:`conductor.planner`."""

    num_requests: int = 0
    prompt_tokens: float = 0.0
    placed_tokens: float = 0.0
    cached_tokens: float = 0.0
    work_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetObservation:
    """What a plan is made from: the requests since the last plan, the tokens of queued prompts, the
    tokens of KV that all requests will take, and the number of requests on each worker."""

    window: PlanWindow
    queued_tokens: float
    projected_tokens: float
    requests: Mapping[Role, Ints]


class FleetAutoscaler:
    """Changes the pools' sizes every :data:`conductor.planner.PLAN_SECONDS`. ``steps`` are the
    steps taken, as pairs (time in seconds, step)."""

    def __init__(
        self,
        config: FleetAutoscaling,
        cluster: ClusterConfig,
        pools: Mapping[Role, PoolState],
        answer_tokens: float,
    ) -> None:
        self.steps: list[tuple[float, ScalingStep]] = []
        self._config = config
        self._cluster = cluster
        self._pools = pools
        self._answer_tokens = answer_tokens
        self._sizes = {role: len(pool.wanted) for role, pool in pools.items()}
        self._history = ScalingHistory()
        self._trend: LoadTrend | None = None
        self._sizing: PoolSizes | None = None
        self._tokens = self._seconds = 0.0
        self._next_seconds = PLAN_SECONDS
        self._starting: list[tuple[float, Role, Ints]] = []
        self._draining: dict[Role, Ints] = {role: np.zeros(0, dtype=np.int64) for role in pools}

    def advance(self, now_seconds: float, observe: Callable[[], FleetObservation]) -> None:
        """Start the workers that are ready by now, and plan if it is time."""
        while self._starting and self._starting[0][0] <= now_seconds:
            _, role, workers = self._starting.pop(0)
            self._pools[role].start(workers, now_seconds)
        if now_seconds < self._next_seconds:
            return
        self._next_seconds += PLAN_SECONDS
        seen = observe()
        for role, workers in self._draining.items():
            self._draining[role] = workers[seen.requests[role][workers] > 0]
        plan = self._plan(now_seconds, seen)
        step, self._history = decide_scaling(
            PoolObservation(now_seconds, plan, self._sizes, self._workers()),
            self._history,
            self._config.scaling,
        )
        if step is not None:
            self.steps.append((now_seconds, step))
            self._apply(now_seconds, step, seen.requests[step.role])

    # -- the plan --------------------------------------------------------------------------

    def _plan(self, now_seconds: float, seen: FleetObservation) -> PoolPlan | None:
        self._close_window(now_seconds, seen.window)
        if self._trend is None:
            return None
        planner = self._config.planner
        load = self._trend.forecast(planner.start_seconds)
        capacity = self._capacity(now_seconds, load, seen)
        self._sizing = sizing = size_pools(load, capacity, planner.sizing)
        return PoolPlan(
            sizing.prefill,
            sizing.decode,
            sizing.reason,
            capacity.num_prefill,
            capacity.num_decode,
            load.requests_per_second,
            load.prompt_tokens,
            load.answer_tokens,
            load.cached_share,
        )

    def _close_window(self, now_seconds: float, window: PlanWindow) -> None:
        kept = math.exp(-PLAN_SECONDS / THROUGHPUT_MEMORY_SECONDS)
        computed = window.placed_tokens - window.cached_tokens
        self._tokens = self._tokens * kept + computed
        self._seconds = self._seconds * kept + window.work_seconds
        if not window.num_requests:
            if self._trend is not None:
                fewer = self._trend.requests_per_second.updated(now_seconds, 0.0)
                self._trend = replace(self._trend, requests_per_second=fewer)
            return
        known = self._trend.cached_share.level if self._trend is not None else 0.0
        load = LoadForecast(
            window.num_requests / PLAN_SECONDS,
            window.prompt_tokens / window.num_requests,
            self._answer_tokens,
            window.cached_tokens / window.placed_tokens if window.placed_tokens else known,
        )
        trend = self._trend
        self._trend = (
            trend.updated(now_seconds, load) if trend else LoadTrend.start(now_seconds, load)
        )

    def _capacity(
        self, now_seconds: float, load: LoadForecast, seen: FleetObservation
    ) -> PoolCapacity:
        planner, sizing = self._config.planner, self._sizing
        context = load.prompt_tokens + load.answer_tokens / 2
        return PoolCapacity(
            now_seconds=now_seconds,
            num_prefill=len(self._pools[Role.PREFILL].known),
            num_decode=len(self._pools[Role.DECODE].known),
            prefill_tokens_per_second=self._tokens / self._seconds if self._seconds else 0.0,
            decode_tokens_per_second=decode_tokens_per_second(
                self._cluster.decode_cost,
                context,
                planner.sizing.itl_slo_seconds,
                planner.max_batch,
            ),
            decode_capacity_tokens=self._cluster.device_tokens,
            queued_prompt_tokens=int(seen.queued_tokens),
            projected_tokens=int(seen.projected_tokens),
            prefill_demand=sizing.prefill_demand if sizing is not None else None,
            decode_demand=sizing.decode_demand if sizing is not None else None,
        )

    # -- the workers -----------------------------------------------------------------------

    def _workers(self) -> list[PoolWorker]:
        """Return a list of all workers. Which one is in which state does not matter to the policy,
        so workers of equal role and state are one object, listed once for each of them."""
        workers: list[PoolWorker] = []
        for role, pool in self._pools.items():
            starting = sum(len(ids) for _, other, ids in self._starting if other is role)
            down = int(np.count_nonzero(pool.is_wanted & ~pool.is_known))
            states = {
                "serving": len(pool.known),
                "starting": starting,
                "pending": down,
                "draining": len(self._draining[role]),
            }
            for state, count in states.items():
                workers += [PoolWorker(WorkerId(state), role, state)] * count
        return workers

    def _apply(self, now_seconds: float, step: ScalingStep, requests: Ints) -> None:
        self._sizes[step.role] = step.new_size
        pool = self._pools[step.role]
        more = step.new_size - step.old_size
        if more > 0:
            reserved = [ids for _, role, ids in self._starting if role is step.role]
            taken = np.concatenate((pool.wanted, self._draining[step.role], *reserved))
            free = np.setdiff1d(np.arange(pool.num_workers), taken)[:more]
            self._starting.append((now_seconds + self._config.start_seconds, step.role, free))
        elif more < 0:
            self._retire(step.role, -more, requests)

    def _retire(self, role: Role, count: int, requests: Ints) -> None:
        """Retire workers: those that still start first, then those that are down, then those with
        the fewest requests."""
        for number, (at, other, ids) in enumerate(self._starting):
            if other is role:
                self._starting[number] = (at, role, ids[count:])
                count -= min(count, len(ids))
        pool = self._pools[role]
        down = np.flatnonzero(pool.is_wanted & ~pool.is_known)
        order = np.argsort(requests[pool.known], kind="stable")
        retired = np.concatenate((down, pool.known[order]))[:count]
        pool.retire(retired)
        self._draining[role] = np.concatenate((self._draining[role], retired))
