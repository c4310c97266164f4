"""Simulates autoscaling. The production planner and autoscaler decide, workers take time to start,
and a removed worker finishes its requests before it stops."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.pools.base import PoolWorker
from baton.pools.scaling_policy import (
    PoolObservation,
    ScalingConfig,
    ScalingHistory,
    ScalingStep,
    decide_scaling,
)
from conductor.planner import PLAN_SECONDS, Planner, PlannerConfig
from conductor.policy.decision import Decision
from conductor.policy.snapshot import Snapshot
from simulator.event_queue import EventQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedAutoscalingConfig:
    """``start_seconds`` is the time that a simulated worker takes to start. The planner may assume
    a different time (``planner.start_seconds``). The autoscaler checks the pools, against the
    latest plan, every ``check_seconds``."""

    planner: PlannerConfig = field(default_factory=PlannerConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    start_seconds: float = 60.0
    check_seconds: float = 5.0


class Resizable(Protocol):
    """A cluster whose pools can be resized."""

    @property
    def is_finished(self) -> bool: ...

    def planning_snapshot(self) -> Snapshot: ...

    def add_worker(self, role: Role) -> WorkerId: ...

    def retire_worker(self, worker: WorkerId) -> None: ...

    def is_idle(self, worker: WorkerId) -> bool: ...

    def load_of(self, worker: WorkerId) -> float: ...


@dataclass(slots=True, eq=False)
class WorkerLifetime:
    """The events in a worker's life, as seconds of virtual time; -1 means that the event has not
    happened. A worker costs money from the time at which it is requested until it has stopped.
    ``id`` is None while the worker starts."""

    role: Role
    requested_at_seconds: float
    id: WorkerId | None = None
    draining_since_seconds: float = -1.0
    stopped_at_seconds: float = -1.0

    @property
    def state(self) -> str:
        if self.stopped_at_seconds >= 0:
            return "stopped"
        if self.draining_since_seconds >= 0:
            return "draining"
        return "serving" if self.id else "starting"


class SimulatedAutoscaler:
    """Resizes a simulated cluster. ``steps`` are the scaling steps taken so far, as pairs (virtual
    time in seconds, step)."""

    def __init__(
        self,
        config: SimulatedAutoscalingConfig,
        cluster: Resizable,
        events: EventQueue,
        sizes: Mapping[Role, int],
    ) -> None:
        self.steps: list[tuple[float, ScalingStep]] = []
        self._config = config
        self._cluster = cluster
        self._events = events
        self._sizes = dict(sizes)
        self._planner = Planner(config.planner, 0.0)
        self._history = ScalingHistory()
        self._lifetimes = [
            WorkerLifetime(role, 0.0, WorkerId(f"{role.value[0]}{number}"))
            for role, size in sizes.items()
            for number in range(size)
        ]

    def start(self) -> None:
        self._events.schedule(PLAN_SECONDS, self._plan)
        self._events.schedule(self._config.check_seconds, self._check)

    def record_request(
        self, snapshot: Snapshot, num_tokens: int, decision: Decision | None
    ) -> None:
        """Tell the planner about a request that the cluster's first conductor, which does the
        planning, has received. ``decision`` is None if the request was rejected."""
        if decision is None:
            self._planner.record_rejected(num_tokens)
        else:
            self._planner.record_placed(snapshot, num_tokens, decision)

    def worker_seconds(self, until_seconds: float) -> Counter[Role]:
        """Return, for each pool, the worker time in seconds that has to be paid for until the
        virtual time ``until_seconds``."""
        paid: Counter[Role] = Counter()
        for lifetime in self._lifetimes:
            end = lifetime.stopped_at_seconds if lifetime.stopped_at_seconds >= 0 else until_seconds
            seconds = min(end, until_seconds) - lifetime.requested_at_seconds
            paid[lifetime.role] += max(seconds, 0.0)  # type: ignore[assignment]
        return paid

    def _plan(self) -> None:
        if not self._cluster.is_finished:
            self._planner.plan(self._cluster.planning_snapshot())
            self._events.schedule(self._events.now_seconds + PLAN_SECONDS, self._plan)

    def _check(self) -> None:
        if self._cluster.is_finished:
            return
        now = self._events.now_seconds
        for lifetime in self._lifetimes:
            if lifetime.state == "draining" and lifetime.id and self._cluster.is_idle(lifetime.id):
                lifetime.stopped_at_seconds = now
        workers = [
            PoolWorker(WorkerId(str(number)), lifetime.role, lifetime.state)
            for number, lifetime in enumerate(self._lifetimes)
            if lifetime.stopped_at_seconds < 0
        ]
        step, self._history = decide_scaling(
            PoolObservation(now, self._planner.last_plan, self._sizes, workers),
            self._history,
            self._config.scaling,
        )
        if step is not None:
            self.steps.append((now, step))
            self._apply_step(step)
        self._events.schedule(now + self._config.check_seconds, self._check)

    def _apply_step(self, step: ScalingStep) -> None:
        now = self._events.now_seconds
        self._sizes[step.role] = step.new_size
        for _ in range(step.new_size - step.old_size):
            lifetime = WorkerLifetime(step.role, now)
            self._lifetimes.append(lifetime)
            self._events.schedule(
                now + self._config.start_seconds, partial(self._start_serving, lifetime)
            )
        pool = [lifetime for lifetime in self._lifetimes if lifetime.role is step.role]
        staying = [lifetime for lifetime in pool if lifetime.state in REMOVABLE_STATES]
        staying.sort(key=self._removal_order)
        for lifetime in staying[: max(step.old_size - step.new_size, 0)]:
            self._retire(lifetime)

    def _removal_order(self, lifetime: WorkerLifetime) -> tuple[bool, float, float]:
        """Return the sort key for removals: workers that are still starting come first, then the
        other workers by ascending load. Among workers with equal load, the newest comes first."""
        load = 0.0 if lifetime.id is None else self._cluster.load_of(lifetime.id)
        return lifetime.id is not None, load, -lifetime.requested_at_seconds

    def _start_serving(self, lifetime: WorkerLifetime) -> None:
        if lifetime.stopped_at_seconds < 0:
            lifetime.id = self._cluster.add_worker(lifetime.role)

    def _retire(self, lifetime: WorkerLifetime) -> None:
        lifetime.draining_since_seconds = self._events.now_seconds
        if lifetime.id is None:
            lifetime.stopped_at_seconds = lifetime.draining_since_seconds
        else:
            self._cluster.retire_worker(lifetime.id)


REMOVABLE_STATES = ("starting", "serving")
