"""Pools of a simulated cluster that follow the load: the production planner and autoscaler decide,
workers take their time to start, and who leaves ends what it has first."""

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
    """``start_seconds`` is what a worker really takes to start, whatever the planner believes."""

    planner: PlannerConfig = field(default_factory=PlannerConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    start_seconds: float = 60.0


class Resizable(Protocol):
    @property
    def is_over(self) -> bool: ...

    def planning_snapshot(self) -> Snapshot: ...

    def add(self, role: Role) -> WorkerId: ...

    def retire(self, worker: WorkerId) -> None: ...

    def is_idle(self, worker: WorkerId) -> bool: ...

    def load_of(self, worker: WorkerId) -> float: ...


@dataclass(slots=True, eq=False)
class WorkerLifetime:
    """Of a worker, in seconds; -1 for what has not happened. It is paid for from the moment that it
    was asked for until it is gone. ``id`` is None while it starts."""

    role: Role
    asked_seconds: float
    id: WorkerId | None = None
    leaves_seconds: float = -1.0
    gone_seconds: float = -1.0

    @property
    def state(self) -> str:
        if self.gone_seconds >= 0:
            return "stopped"
        if self.leaves_seconds >= 0:
            return "draining"
        return "serving" if self.id else "starting"


class SimulatedAutoscaler:
    """``steps`` are those that were taken, and when."""

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
        self._past = ScalingHistory()
        self._lives = [
            WorkerLifetime(role, 0.0, WorkerId(f"{role.value[0]}{number}"))
            for role, size in sizes.items()
            for number in range(size)
        ]

    def begin(self) -> None:
        self._events.at(PLAN_SECONDS, self._look)

    def arrived(self, snapshot: Snapshot, num_tokens: int, decision: Decision | None) -> None:
        """At the conductor that plans; None: it was refused."""
        if decision is None:
            self._planner.refused(num_tokens)
        else:
            self._planner.placed(snapshot, num_tokens, decision)

    def worker_seconds(self, until_seconds: float) -> Counter[Role]:
        """Paid for until then, by pool."""
        paid: Counter[Role] = Counter()
        for life in self._lives:
            end = life.gone_seconds if life.gone_seconds >= 0 else until_seconds
            seconds = min(end, until_seconds) - life.asked_seconds
            paid[life.role] += max(seconds, 0.0)  # type: ignore[assignment]
        return paid

    def _look(self) -> None:
        if self._cluster.is_over:
            return
        now = self._events.now_seconds
        for life in self._lives:
            if life.state == "draining" and life.id and self._cluster.is_idle(life.id):
                life.gone_seconds = now
        plan = self._planner.plan(self._cluster.planning_snapshot())
        workers = [
            PoolWorker(WorkerId(str(number)), life.role, life.state)
            for number, life in enumerate(self._lives)
            if life.gone_seconds < 0
        ]
        step, self._past = decide_scaling(
            PoolObservation(now, plan, self._sizes, workers), self._past, self._config.scaling
        )
        if step is not None:
            self.steps.append((now, step))
            self._take(step)
        self._events.at(now + PLAN_SECONDS, self._look)

    def _take(self, step: ScalingStep) -> None:
        now = self._events.now_seconds
        self._sizes[step.role] = step.new
        for _ in range(step.new - step.old):
            life = WorkerLifetime(step.role, now)
            self._lives.append(life)
            self._events.at(now + self._config.start_seconds, partial(self._serve, life))
        staying = [life for life in self._lives if life.role is step.role and life.state in STAYING]
        staying.sort(key=self._missed)
        for life in staying[: max(step.old - step.new, 0)]:
            self._leave(life)

    def _missed(self, life: WorkerLifetime) -> tuple[bool, float, float]:
        """Who does not serve yet goes first, then who has least to do, then the newest."""
        load = 0.0 if life.id is None else self._cluster.load_of(life.id)
        return life.id is not None, load, -life.asked_seconds

    def _serve(self, life: WorkerLifetime) -> None:
        if life.gone_seconds < 0:
            life.id = self._cluster.add(life.role)

    def _leave(self, life: WorkerLifetime) -> None:
        life.leaves_seconds = self._events.now_seconds
        if life.id is None:
            life.gone_seconds = life.leaves_seconds
        else:
            self._cluster.retire(life.id)


STAYING = ("starting", "serving")
