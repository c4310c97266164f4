"""The autoscaler under any plans and any fortune of its workers: what it must never do."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import WorkerId
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role
from baton.pools.base import WORKER_ROLES, PoolWorker
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
    step=2,
    stable_seconds=5.0,
    cooldown_seconds=10.0,
    pending_seconds=40.0,
)


class House:
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

    def look(self, plan: PoolPlan | None) -> None:
        self.now += 5.0
        workers = [
            PoolWorker(WorkerId(f"{role.value}-{number}"), role, state)
            for role, states in self.states.items()
            for number, state in enumerate(states)
        ]
        sight = PoolObservation(self.now, plan, dict(self.sizes), workers)
        step, self.past = decide_scaling(sight, self.past, self.config)
        if step is not None:
            self.check_rest(step)
            if step.other is None:
                self.check(sight, step)
                self.take(step)
            else:
                self.check_exchange(sight, step, step.other)
                self.exchange(step, step.other)

    def check_rest(self, step: ScalingStep) -> None:
        taken_back = step.reason.startswith("taken back")
        if self.changes and not taken_back:
            assert self.now - self.changes[-1][0] >= CONFIG.cooldown_seconds
        self.changes.append((self.now, step))

    def check_exchange(
        self, sight: PoolObservation, given: ScalingStep, taken: ScalingStep
    ) -> None:
        assert self.config.can_convert and given.role is not taken.role
        assert 0 < given.old - given.new == taken.new - taken.old <= CONFIG.step
        assert given.new >= CONFIG.bounds(given.role).least
        assert taken.new <= CONFIG.bounds(taken.role).most
        assert not any(sight.coming(role) for role in WORKER_ROLES), "somebody is to come"

    def check(self, sight: PoolObservation, step: ScalingStep) -> None:
        bounds = CONFIG.bounds(step.role)
        taken_back = step.reason.startswith("taken back")
        assert step.old == self.sizes[step.role] != step.new
        assert bounds.least <= step.new <= bounds.most
        if step.new > step.old:
            assert self.occupied + step.new - step.old <= BUDGET, "beyond the budget"
            assert step.new - step.old <= CONFIG.step
        elif not taken_back:
            assert step.old - step.new <= CONFIG.step
            assert not any(sight.coming(role) for role in WORKER_ROLES), "somebody is to come"

    def take(self, step: ScalingStep) -> None:
        """Those that do not serve leave first; who never started is gone at once."""
        self.sizes[step.role] = step.new
        states = self.states[step.role]
        states += ["starting"] * (step.new - step.old)
        for _ in range(step.old - step.new):
            if "starting" in states:
                states.remove("starting")
            else:
                states[states.index("serving")] = "draining"

    def exchange(self, given: ScalingStep, taken: ScalingStep) -> None:
        self.sizes |= given.sizes
        for _ in range(given.old - given.new):
            self.states[given.role].remove("serving")
            self.states[taken.role].append("converting")

    def fate(self, role: Role, before: str, after: str) -> None:
        states = self.states[role]
        if before in states:
            states.remove(before)
            states += [after] if after else []


plans = st.builds(
    lambda prefill, decode: PoolPlan(prefill, decode, "why", 0, 0, 1.0, 1.0, 1.0, 0.0),
    st.integers(1, 12),
    st.integers(1, 12),
)
fates = st.tuples(
    st.sampled_from(WORKER_ROLES),
    st.sampled_from([("starting", "serving"), ("converting", "serving"), ("draining", "")]),
)


@given(
    st.lists(st.tuples(st.none() | plans, st.lists(fates, max_size=3)), max_size=80), st.booleans()
)
def test_never_beyond_its_bounds(
    events: list[tuple[PoolPlan | None, list[object]]], can_convert: bool
) -> None:
    house = House(can_convert)
    for plan, fortunes in events:
        for role, (before, after) in fortunes:  # type: ignore[misc]
            house.fate(role, before, after)
        house.look(plan)


@given(plans, st.integers(1, 4), st.booleans())
def test_a_plan_that_stays_is_reached_and_then_nothing_changes(
    plan: PoolPlan, ahead: int, can_convert: bool
) -> None:
    """Whatever is asked for, as soon as workers come and go as they are told."""
    house = House(can_convert)
    for _ in range(100):
        house.look(plan)
        for role in WORKER_ROLES:
            house.fate(role, "converting", "serving")
            house.fate(role, "converting", "serving")
            house.fate(role, "starting", "serving")
            house.fate(role, "draining", "")
            house.fate(role, "starting", "serving")
            house.fate(role, "draining", "")
    settled = dict(house.sizes)
    num_changes = len(house.changes)
    for _ in range(10 * ahead):
        house.look(plan)
    assert house.sizes == settled
    assert len(house.changes) == num_changes
    total = sum(house.sizes.values())
    wanted = {role: CONFIG.bounds(role).clamp(getattr(plan, role.value)) for role in WORKER_ROLES}
    assert house.sizes == wanted if sum(wanted.values()) <= BUDGET else total == BUDGET
