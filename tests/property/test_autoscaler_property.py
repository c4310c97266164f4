"""Tests invariants of the autoscaler with random sequences of pool plans and of worker state
changes."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import WorkerId
from baton.core.pool_plan import PLANNED_ROLES, PoolPlan
from baton.core.states import Role
from baton.pools.base import PoolWorker
from baton.pools.scaling_policy import (
    PoolBounds,
    PoolObservation,
    ScalingConfig,
    ScalingHistory,
    ScalingStep,
    decide_scaling,
)

BUDGET = 8
CONFIG = ScalingConfig(
    prefill=PoolBounds(1, 6),
    decode=PoolBounds(2, 7),
    max_workers=BUDGET,
    max_step_workers=2,
    stable_seconds=5.0,
    cooldown_seconds=10.0,
    pending_seconds=40.0,
)


class PoolsModel:
    """A model of both pools. It applies the autoscaler's steps, and checks each of them."""

    def __init__(self, can_convert: bool) -> None:
        self.config = replace(CONFIG, can_convert=can_convert)
        self.now = 0.0
        self.past = ScalingHistory()
        self.sizes = {Role.PREFILL: 2, Role.DECODE: 3}
        self.states = {role: ["serving"] * size for role, size in self.sizes.items()}
        self.changes: list[tuple[float, ScalingStep]] = []

    @property
    def occupied(self) -> int:
        return sum(len(states) for states in self.states.values())

    def observe(self, plan: PoolPlan | None) -> None:
        self.now += 5.0
        workers = [
            PoolWorker(WorkerId(f"{role.value}-{number}"), role, state)
            for role, states in self.states.items()
            for number, state in enumerate(states)
        ]
        observation = PoolObservation(self.now, plan, dict(self.sizes), workers)
        step, self.past = decide_scaling(observation, self.past, self.config)
        if step is not None:
            self.check_cooldown(step)
            if step.simultaneous_step is None:
                self.check_resize(observation, step)
                self.resize(step)
            else:
                self.check_conversion(observation, step, step.simultaneous_step)
                self.convert(step, step.simultaneous_step)

    def check_cooldown(self, step: ScalingStep) -> None:
        is_rollback = step.reason.startswith("taken back")
        if self.changes and not is_rollback:
            assert self.now - self.changes[-1][0] >= CONFIG.cooldown_seconds
        self.changes.append((self.now, step))

    def check_conversion(
        self, observation: PoolObservation, shrunk: ScalingStep, grown: ScalingStep
    ) -> None:
        assert self.config.can_convert and shrunk.role is not grown.role
        assert (
            0
            < shrunk.old_size - shrunk.new_size
            == grown.new_size - grown.old_size
            <= CONFIG.max_step_workers
        )
        assert shrunk.new_size >= CONFIG.bounds(shrunk.role).minimum
        assert grown.new_size <= CONFIG.bounds(grown.role).maximum
        assert not any(observation.num_not_serving_yet(role) for role in PLANNED_ROLES), (
            "no pool may shrink while workers are starting"
        )

    def check_resize(self, observation: PoolObservation, step: ScalingStep) -> None:
        bounds = CONFIG.bounds(step.role)
        is_rollback = step.reason.startswith("taken back")
        assert step.old_size == self.sizes[step.role] != step.new_size
        assert bounds.minimum <= step.new_size <= bounds.maximum
        if step.new_size > step.old_size:
            assert self.occupied + step.new_size - step.old_size <= BUDGET, (
                "the pools grew beyond the budget"
            )
            assert step.new_size - step.old_size <= CONFIG.max_step_workers
        elif not is_rollback:
            assert step.old_size - step.new_size <= CONFIG.max_step_workers
            assert not any(observation.num_not_serving_yet(role) for role in PLANNED_ROLES), (
                "no pool may shrink while workers are starting"
            )

    def resize(self, step: ScalingStep) -> None:
        """Apply a step. When a pool shrinks, workers in the state ``starting`` are removed at once,
        and only if there are none left, serving workers drain."""
        self.sizes[step.role] = step.new_size
        states = self.states[step.role]
        states += ["starting"] * (step.new_size - step.old_size)
        for _ in range(step.old_size - step.new_size):
            if "starting" in states:
                states.remove("starting")
            else:
                states[states.index("serving")] = "draining"

    def convert(self, shrunk: ScalingStep, grown: ScalingStep) -> None:
        self.sizes |= shrunk.sizes
        for _ in range(shrunk.old_size - shrunk.new_size):
            self.states[shrunk.role].remove("serving")
            self.states[grown.role].append("converting")

    def change_state(self, role: Role, before: str, after: str) -> None:
        """Move one worker of the pool from the state ``before`` to the state ``after``, or remove
        the worker if ``after`` is empty. Do nothing if no worker is in the state ``before``."""
        states = self.states[role]
        if before in states:
            states.remove(before)
            states += [after] if after else []


plans = st.builds(
    lambda prefill, decode: PoolPlan(prefill, decode, "why", BUDGET, BUDGET, 1.0, 1.0, 1.0, 0.0),
    st.integers(1, 12),
    st.integers(1, 12),
)
state_changes = st.tuples(
    st.sampled_from(PLANNED_ROLES),
    st.sampled_from([("starting", "serving"), ("converting", "serving"), ("draining", "")]),
)


@given(
    st.lists(st.tuples(st.none() | plans, st.lists(state_changes, max_size=3)), max_size=80),
    st.booleans(),
)
def test_every_step_respects_bounds_budget_and_cooldown(
    events: list[tuple[PoolPlan | None, list[object]]], can_convert: bool
) -> None:
    pools = PoolsModel(can_convert)
    for plan, changes in events:
        for role, (before, after) in changes:  # type: ignore[misc]
            pools.change_state(role, before, after)
        pools.observe(plan)


@given(plans, st.integers(1, 4), st.booleans())
def test_a_constant_plan_is_reached_and_then_nothing_changes(
    plan: PoolPlan, ahead: int, can_convert: bool
) -> None:
    """If workers start and stop when the autoscaler requests it, the pools reach the planned sizes,
    limited to each pool's bounds. If these sizes together exceed the budget, the pools' total size
    reaches the budget."""
    pools = PoolsModel(can_convert)
    for _ in range(100):
        pools.observe(plan)
        for role in PLANNED_ROLES:
            pools.change_state(role, "converting", "serving")
            pools.change_state(role, "converting", "serving")
            pools.change_state(role, "starting", "serving")
            pools.change_state(role, "draining", "")
            pools.change_state(role, "starting", "serving")
            pools.change_state(role, "draining", "")
    settled = dict(pools.sizes)
    num_changes = len(pools.changes)
    for _ in range(10 * ahead):
        pools.observe(plan)
    assert pools.sizes == settled
    assert len(pools.changes) == num_changes
    total = sum(pools.sizes.values())
    wanted = {role: CONFIG.bounds(role).clamp(getattr(plan, role.value)) for role in PLANNED_ROLES}
    assert pools.sizes == wanted if sum(wanted.values()) <= BUDGET else total == BUDGET
