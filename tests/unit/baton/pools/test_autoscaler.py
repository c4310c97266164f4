"""Tests the autoscaler's exact steps, and how it handles pools that fail."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from baton.clock import ManualClock
from baton.config import Settings
from baton.core.ids import WorkerId
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role
from baton.errors import Overloaded, Unavailable
from baton.pools import autoscaler
from baton.pools.autoscaler import Autoscaler, scaling_config
from baton.pools.base import PoolWorker
from baton.pools.scaling_policy import (
    PoolBounds,
    PoolObservation,
    ScalingConfig,
    ScalingHistory,
    ScalingStep,
    decide_scaling,
    wanted_sizes,
)

PREFILL, DECODE = Role.PREFILL, Role.DECODE
CONFIG = ScalingConfig(
    max_workers=8,
    max_step_workers=1,
    stable_seconds=10.0,
    cooldown_seconds=30.0,
    pending_seconds=100.0,
)


def plan(prefill: int, decode: int) -> PoolPlan:
    """Return a plan that was made with all workers in view, however many there are."""
    known = CONFIG.max_workers
    return PoolPlan(prefill, decode, "why", known, known, 1.0, 1000.0, 100.0, 0.0)


class SimulatedPools:
    """Pools whose workers finish starting and draining when the test says so. ``step_after``
    advances the clock, lets the autoscaler decide, and applies its decision to the pools."""

    def __init__(self, prefill: int, decode: int, config: ScalingConfig = CONFIG) -> None:
        self.config = config
        self.now = 0.0
        self.past = ScalingHistory()
        self.plan: PoolPlan | None = plan(prefill, decode)
        self.sizes = {PREFILL: prefill, DECODE: decode}
        self.states = {PREFILL: ["serving"] * prefill, DECODE: ["serving"] * decode}

    def observe(self) -> PoolObservation:
        workers = [
            PoolWorker(WorkerId(f"{role.value}-{number}"), role, state)
            for role, states in self.states.items()
            for number, state in enumerate(states)
        ]
        return PoolObservation(self.now, self.plan, dict(self.sizes), workers)

    def step_after(self, seconds: float = 5.0) -> ScalingStep | None:
        """Advance the clock, decide, and apply the step to the pools. Return the step, or None if
        there is none."""
        self.now += seconds
        step, self.past = decide_scaling(self.observe(), self.past, self.config)
        if step is not None and step.simultaneous_step is not None:
            self.sizes |= step.sizes
            del self.states[step.role][step.new_size :]
            self.states[step.simultaneous_step.role] += ["converting"] * (
                step.simultaneous_step.new_size - step.simultaneous_step.old_size
            )
        elif step is not None:
            self.sizes[step.role] = step.new_size
            states = self.states[step.role]
            states += ["starting"] * (step.new_size - step.old_size)
            for index in range(step.old_size - step.new_size):
                states[-1 - index] = "draining"
        return step

    def steps_of(self, count: int) -> list[tuple[float, Role, int]]:
        found = []
        for _ in range(count):
            step = self.step_after()
            if step is not None:
                found.append((self.now, step.role, step.new_size))
        return found

    def settle(self, role: Role) -> None:
        """Let all starting workers of ``role`` serve, and remove its draining workers."""
        staying = [state for state in self.states[role] if state != "draining"]
        self.states[role] = ["serving"] * len(staying)


def test_pools_of_the_planned_sizes_are_left_alone() -> None:
    assert SimulatedPools(2, 3).steps_of(100) == []


def test_change_is_made_only_after_the_plan_is_stable() -> None:
    pools = SimulatedPools(2, 2)
    pools.plan = plan(3, 2)
    assert pools.steps_of(2) == []  # at 5 s and 10 s: planned only since 5 s
    pools.plan = plan(2, 2)
    assert pools.steps_of(1) == []
    pools.plan = plan(3, 2)
    assert pools.steps_of(3) == [(30.0, PREFILL, 3)]


def test_steps_are_single_and_separated_by_the_cooldown() -> None:
    """The pool grows by one worker per step. The second step follows after the cooldown, even
    though the worker that the first step requested does not serve yet."""
    pools = SimulatedPools(2, 2)
    pools.plan = plan(4, 2)
    assert pools.steps_of(20) == [(15.0, PREFILL, 3), (45.0, PREFILL, 4)]


def test_step_gives_the_plans_reason_for_its_pool() -> None:
    pools = SimulatedPools(2, 2)
    reason = (
        "prefill 2 stay: load of 1.2 workers; "
        "decode 2 to 3: load of 2.1 workers, at most 80% utilised"
    )
    pools.plan = replace(plan(2, 3), reason=reason)
    pools.steps_of(2)
    assert str(pools.step_after()) == "decode 2 to 3: load of 2.1 workers, at most 80% utilised"


def test_configured_step_size_is_used() -> None:
    pools = SimulatedPools(2, 2, replace(CONFIG, max_step_workers=3))
    pools.plan = plan(4, 2)
    assert pools.steps_of(20) == [(15.0, PREFILL, 4)]


def test_step_goes_no_further_than_the_plan_wanted_throughout() -> None:
    pools = SimulatedPools(2, 2, replace(CONFIG, max_step_workers=9))
    pools.plan = plan(6, 2)
    pools.step_after()
    pools.plan = plan(4, 2)
    pools.step_after()
    pools.plan = plan(6, 2)
    assert pools.step_after() == ScalingStep(PREFILL, 2, 4, "why")


def test_pool_with_the_largest_relative_lack_grows_first() -> None:
    pools = SimulatedPools(4, 2)
    pools.plan = plan(5, 3)
    assert pools.steps_of(20) == [(15.0, DECODE, 3), (45.0, PREFILL, 5)]


def test_no_pool_shrinks_while_another_grows() -> None:
    pools = SimulatedPools(3, 2)
    pools.plan = plan(1, 3)
    assert pools.steps_of(20) == [(15.0, DECODE, 3)]
    pools.settle(DECODE)
    assert pools.steps_of(20) == [(105.0, PREFILL, 2), (135.0, PREFILL, 1)]


def test_restarting_worker_does_not_block_other_changes() -> None:
    pools = SimulatedPools(3, 2)
    pools.states[DECODE][0] = "restarting"
    pools.plan = plan(2, 2)
    assert pools.steps_of(3) == [(15.0, PREFILL, 2)]


def test_new_worker_stays_for_the_shrink_time_after_it_began_to_serve() -> None:
    """While the worker starts, the plan is that of the one that serves, and soon it is lower than
    when the worker was requested. Of the 50 s, none has passed before it serves."""
    pools = SimulatedPools(1, 1, replace(CONFIG, shrink_seconds=50.0))
    pools.plan = plan(1, 2)
    assert pools.steps_of(3) == [(15.0, DECODE, 2)]
    pools.plan = plan(1, 1)
    assert pools.steps_of(7) == []
    pools.settle(DECODE)
    assert pools.steps_of(20) == [(105.0, DECODE, 1)]  # it began to serve between 50 s and 55 s


def test_plan_that_does_not_count_every_serving_worker_shrinks_no_pool() -> None:
    """A worker was down when the plan was made: that one worker was enough then says nothing about
    the second. The next plan counts both."""
    pools = SimulatedPools(1, 2)
    pools.states[DECODE][1] = "restarting"
    pools.plan = replace(plan(1, 1), serving_decode=1)
    assert pools.steps_of(20) == []
    pools.settle(DECODE)
    assert pools.steps_of(5) == []
    pools.plan = replace(plan(1, 1), serving_decode=2)
    assert pools.steps_of(1) == [(130.0, DECODE, 1)]


def test_pool_that_is_down_is_not_shrunk() -> None:
    """The pool's workers crash and restart. Meanwhile the conductor sees none of them and plans a
    pool of one worker, which the autoscaler must not follow."""
    pools = SimulatedPools(4, 2)
    pools.states[PREFILL] = ["restarting"] * 4
    pools.plan = plan(1, 2)
    assert pools.steps_of(40) == []
    pools.states[PREFILL] = ["restarting"] * 2 + ["serving"] * 2
    assert pools.steps_of(1) == [(205.0, PREFILL, 3)]


def test_at_the_budget_a_pool_grows_only_after_the_other_has_drained() -> None:
    """Growth waits until the drained worker is gone, not just until its removal is decided."""
    pools = SimulatedPools(5, 3)
    pools.plan = plan(4, 4)
    assert pools.steps_of(3) == [(15.0, PREFILL, 4)]
    assert pools.steps_of(20) == []  # the removed worker still drains
    pools.settle(PREFILL)
    assert pools.steps_of(1) == [(120.0, DECODE, 4)]


CONVERTING = replace(CONFIG, can_convert=True)


def test_surplus_worker_of_a_pool_is_converted_for_the_other() -> None:
    """The sizes of both pools change in one step, even if the pools already use the whole budget of
    workers. The next step waits until the converted worker serves."""
    pools = SimulatedPools(5, 3, CONVERTING)
    pools.plan = plan(3, 5)
    assert pools.steps_of(2) == []
    step = pools.step_after()
    assert step == ScalingStep(PREFILL, 5, 4, "why", ScalingStep(DECODE, 3, 4, "why"))
    assert str(step) == "prefill 5 to 4: why; decode 3 to 4: why"
    assert pools.steps_of(10) == []
    pools.settle(DECODE)
    step = pools.step_after()
    assert step is not None and step.sizes == {PREFILL: 3, DECODE: 5}
    pools.settle(DECODE)
    assert pools.steps_of(20) == []


def test_no_more_workers_are_converted_than_both_pools_want() -> None:
    pools = SimulatedPools(5, 2, replace(CONVERTING, max_step_workers=3))
    pools.plan = plan(2, 3)
    pools.steps_of(2)
    step = pools.step_after()
    assert step is not None and step.sizes == {PREFILL: 4, DECODE: 3}
    pools.settle(DECODE)
    assert pools.steps_of(10) == [(45.0, PREFILL, 2)]


def test_conversion_needs_both_pools_changes_to_be_stable() -> None:
    pools = SimulatedPools(3, 2, CONVERTING)
    pools.plan = plan(3, 3)
    pools.steps_of(2)
    pools.plan = plan(2, 3)
    assert pools.steps_of(1) == [(15.0, DECODE, 3)]


def test_conversion_that_takes_too_long_is_taken_back() -> None:
    pools = SimulatedPools(3, 2, CONVERTING)
    pools.plan = plan(2, 3)
    pools.steps_of(3)
    assert pools.steps_of(20) == [(115.0, DECODE, 2)]


def test_wanted_sizes_stay_within_each_pools_bounds() -> None:
    config = replace(CONFIG, prefill=PoolBounds(2, 3), decode=PoolBounds(1, 4))
    pools = SimulatedPools(2, 2, config)
    pools.plan = plan(9, 9)
    assert wanted_sizes(pools.observe(), config) == {PREFILL: 3, DECODE: 4}
    pools.plan = plan(1, 1)
    assert wanted_sizes(pools.observe(), config) == {PREFILL: 2, DECODE: 1}


def test_mixed_workers_are_neither_resized_nor_counted_nor_replaced_by_empty_pools() -> None:
    pools = SimulatedPools(1, 1)
    pools.plan = plan(8, 8)
    hybrid = replace(pools.observe(), sizes={PREFILL: 1, DECODE: 1, Role.MIXED: 9})
    assert wanted_sizes(hybrid, CONFIG) == {PREFILL: 4, DECODE: 4}
    assert hybrid.num_budgeted_workers == 2
    only_mixed = replace(pools.observe(), sizes={PREFILL: 0, DECODE: 0, Role.MIXED: 2}, workers=())
    assert wanted_sizes(only_mixed, CONFIG) == {}


@pytest.mark.parametrize(
    ("planned", "allotted"),
    [
        ((8, 8), (4, 4)),
        ((12, 4), (6, 2)),
        ((60, 1), (7, 1)),
        ((1, 60), (1, 7)),
        ((5, 3), (5, 3)),
        ((4, 60), (1, 7)),
    ],
)
def test_budget_is_divided_in_proportion_to_the_plan(
    planned: tuple[int, int], allotted: tuple[int, int]
) -> None:
    pools = SimulatedPools(1, 1)
    pools.plan = plan(*planned)
    assert tuple(wanted_sizes(pools.observe(), CONFIG).values()) == allotted


def test_growth_that_never_serves_is_taken_back_and_retried_later() -> None:
    """The growth is requested at 15 s and taken back 100 s later. Although the plan still requires
    it, it is not retried for another 100 s."""
    pools = SimulatedPools(2, 2)
    pools.plan = plan(3, 2)
    assert pools.steps_of(24) == [(15.0, PREFILL, 3), (115.0, PREFILL, 2)]
    pools.states[PREFILL] = ["serving"] * 2
    assert pools.steps_of(20) == [(215.0, PREFILL, 3)]


def test_taken_back_growth_gives_the_reason_of_the_pending_worker() -> None:
    pools = SimulatedPools(1, 1)
    pools.plan = plan(2, 1)
    pools.steps_of(3)
    sight, why = pools.observe(), "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
    pending = PoolWorker(WorkerId("x"), PREFILL, "pending", "", why)
    workers = [*(each for each in sight.workers if each.state == "serving"), pending]
    late = replace(sight, now_seconds=pools.now + 100.0, workers=workers)
    step, _ = decide_scaling(late, pools.past, CONFIG)
    assert str(step) == f"prefill 2 to 1: taken back, 1 not serving after 100 s: {why}"


def test_workers_of_a_partial_growth_that_serve_are_kept() -> None:
    """One of the two requested workers serves; only the other one is taken back."""
    pools = SimulatedPools(2, 2, replace(CONFIG, max_step_workers=2))
    pools.plan = plan(4, 2)
    assert pools.steps_of(3) == [(15.0, PREFILL, 4)]
    pools.states[PREFILL][2] = "serving"
    assert pools.steps_of(20) == [(115.0, PREFILL, 3)]


def test_growth_that_has_served_is_not_taken_back_later() -> None:
    pools = SimulatedPools(2, 2)
    pools.plan = plan(3, 2)
    pools.steps_of(4)
    pools.settle(PREFILL)
    pools.steps_of(1)
    pools.states[PREFILL][2] = "restarting"
    assert pools.steps_of(40) == []


def test_pool_resized_by_somebody_else_is_left_alone() -> None:
    pools = SimulatedPools(2, 2)
    pools.plan = plan(3, 2)
    pools.steps_of(4)
    pools.sizes[PREFILL], pools.states[PREFILL] = 2, ["serving"] * 2
    pools.plan = plan(2, 2)
    assert pools.steps_of(40) == []


def test_without_a_plan_only_growth_that_never_served_is_taken_back() -> None:
    pools = SimulatedPools(2, 2)
    pools.plan = plan(3, 2)
    pools.steps_of(3)
    pools.plan = None
    assert pools.steps_of(40) == [(115.0, PREFILL, 2)]


# -- the loop ------------------------------------------------------------------------------


class FakePools:
    def __init__(self) -> None:
        self.resizes: list[Mapping[Role, int]] = []
        self.error: Exception | None = None

    async def sizes(self) -> Mapping[Role, int]:
        if isinstance(self.error, Unavailable):
            raise self.error
        return {PREFILL: 1, DECODE: 1}

    async def workers(self) -> list[PoolWorker]:
        return [PoolWorker(WorkerId(role.value), role, "serving") for role in (PREFILL, DECODE)]

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        self.resizes.append(wanted)
        if self.error is not None:
            raise self.error

    async def remove(self, worker_id: WorkerId) -> None: ...


class Loop:
    def __init__(self, dry_run: bool = False) -> None:
        self.pools, self.clock, self.messages = FakePools(), ManualClock(), list[str]()
        self.leads = True
        self.plan: PoolPlan | Exception = plan(2, 1)
        self.scaler = Autoscaler(
            self.pools, self.ask, self.clock, CONFIG, dry_run=dry_run,
            log_message=self.messages.append, is_leader=lambda: self.leads,
        )  # fmt: skip

    async def ask(self) -> PoolPlan:
        if isinstance(self.plan, Exception):
            raise self.plan
        return self.plan

    async def tick(self, count: int) -> None:
        for _ in range(count):
            self.clock.advance(5.0)
            await self.scaler.check_pools()


async def test_step_is_carried_out_and_logged() -> None:
    loop = Loop()
    await loop.tick(3)
    assert loop.pools.resizes == [{PREFILL: 2}]
    assert loop.messages == ["changes prefill 1 to 2: why"]


async def test_autoscaler_that_does_not_lead_does_nothing_and_forgets_its_history() -> None:
    """A conductor that has lost the leadership does not take back a growth that it requested as the
    leader: that is up to the new leader."""
    loop = Loop()
    await loop.tick(3)
    assert loop.pools.resizes == [{PREFILL: 2}]
    loop.leads = False
    await loop.tick(100)
    assert loop.pools.resizes == [{PREFILL: 2}]
    loop.leads, loop.plan = True, plan(1, 1)
    await loop.tick(100)
    assert loop.pools.resizes == [{PREFILL: 2}]


async def test_dry_run_only_logs_its_steps() -> None:
    """A step is logged each time that the autoscaler would carry it out without ``dry_run``."""
    loop = Loop(dry_run=True)
    await loop.tick(14)
    assert loop.pools.resizes == []
    assert loop.messages == ["would change prefill 1 to 2: why"] * 2


async def test_failed_resize_is_retried_after_the_cooldown() -> None:
    loop = Loop()
    loop.pools.error = Overloaded("somebody else")
    await loop.tick(10)
    assert loop.pools.resizes == [{PREFILL: 2}] * 2
    assert loop.messages[:2] == [
        "changes prefill 1 to 2: why", "could not change prefill: somebody else",
    ]  # fmt: skip


async def test_repeated_failure_is_logged_once() -> None:
    loop = Loop()
    loop.plan = Unavailable("gone")
    await loop.tick(5)
    loop.pools.error = Unavailable("no server")
    await loop.tick(5)
    assert loop.messages == [
        "can't get a plan from a conductor: gone",
        "can't read the state of the pools: no server",
    ]


async def test_autoscale_off_returns_at_once() -> None:
    await autoscaler.run_autoscaler(
        Settings(autoscale="off"), FakePools(), Loop().ask, ManualClock()
    )


async def test_autoscaler_runs_until_it_is_cancelled() -> None:
    loop = Loop()
    settings = Settings(
        autoscale="on", autoscale_interval_seconds=5.0, autoscale_stable_seconds=0.0
    )
    running = asyncio.ensure_future(
        autoscaler.run_autoscaler(settings, loop.pools, loop.ask, loop.clock)
    )
    while not loop.pools.resizes:
        await asyncio.sleep(0)
        loop.clock.advance(5.0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert loop.pools.resizes[0] == {PREFILL: 2}


def test_scaling_config_is_read_from_the_settings() -> None:
    settings = Settings(min_prefill=2, max_decode=5, max_workers=7, autoscale_step=2)
    assert scaling_config(settings) == ScalingConfig(
        prefill=PoolBounds(2, 64), decode=PoolBounds(1, 5), max_workers=7, max_step_workers=2
    )
