"""The autoscaler: what it does next, exactly, and what it does about pools that fail."""

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
    max_workers=8, step=1, stable_seconds=10.0, cooldown_seconds=30.0, pending_seconds=100.0
)


def plan(prefill: int, decode: int) -> PoolPlan:
    return PoolPlan(prefill, decode, "why", prefill, decode, 1.0, 1000.0, 100.0, 0.0)


class House:
    """Pools whose workers serve, drain and go as the test says; looked at by hand."""

    def __init__(self, prefill: int, decode: int, config: ScalingConfig = CONFIG) -> None:
        self.config = config
        self.now = 0.0
        self.past = ScalingHistory()
        self.plan: PoolPlan | None = plan(prefill, decode)
        self.sizes = {PREFILL: prefill, DECODE: decode}
        self.states = {PREFILL: ["serving"] * prefill, DECODE: ["serving"] * decode}

    def sight(self) -> PoolObservation:
        workers = [
            PoolWorker(WorkerId(f"{role.value}-{number}"), role, state)
            for role, states in self.states.items()
            for number, state in enumerate(states)
        ]
        return PoolObservation(self.now, self.plan, dict(self.sizes), workers)

    def look(self, seconds: float = 5.0) -> ScalingStep | None:
        """So much later; the step is taken."""
        self.now += seconds
        step, self.past = decide_scaling(self.sight(), self.past, self.config)
        if step is not None and step.other is not None:
            self.sizes |= step.sizes
            del self.states[step.role][step.new :]
            self.states[step.other.role] += ["converting"] * (step.other.new - step.other.old)
        elif step is not None:
            self.sizes[step.role] = step.new
            states = self.states[step.role]
            states += ["starting"] * (step.new - step.old)
            for index in range(step.old - step.new):
                states[-1 - index] = "draining"
        return step

    def looks(self, count: int) -> list[tuple[float, Role, int]]:
        found = []
        for _ in range(count):
            step = self.look()
            if step is not None:
                found.append((self.now, step.role, step.new))
        return found

    def settle(self, role: Role) -> None:
        """Who starts serves; who drains is gone."""
        staying = [state for state in self.states[role] if state != "draining"]
        self.states[role] = ["serving"] * len(staying)


def test_what_is_as_planned_stays() -> None:
    assert House(2, 3).looks(100) == []


def test_a_change_must_be_wanted_for_a_while() -> None:
    house = House(2, 2)
    house.plan = plan(3, 2)
    assert house.looks(2) == []  # at 5 and 10: wanted since 5
    house.plan = plan(2, 2)
    assert house.looks(1) == []
    house.plan = plan(3, 2)
    assert house.looks(3) == [(30.0, PREFILL, 3)]


def test_one_step_at_a_time_with_a_rest_between() -> None:
    """Growth does not wait for growth."""
    house = House(2, 2)
    house.plan = plan(4, 2)
    assert house.looks(20) == [(15.0, PREFILL, 3), (45.0, PREFILL, 4)]


def test_a_step_says_what_the_plan_says_of_its_pool() -> None:
    house = House(2, 2)
    said = "prefill 2 stay: 1.2 would be busy; decode 2 to 3: 2.1 would be busy, at 80% at most"
    house.plan = replace(plan(2, 3), reason=said)
    house.looks(2)
    assert str(house.look()) == "decode 2 to 3: 2.1 would be busy, at 80% at most"


def test_larger_steps() -> None:
    house = House(2, 2, replace(CONFIG, step=3))
    house.plan = plan(4, 2)
    assert house.looks(20) == [(15.0, PREFILL, 4)]


def test_a_step_goes_no_further_than_was_wanted_all_the_while() -> None:
    house = House(2, 2, replace(CONFIG, step=9))
    house.plan = plan(6, 2)
    house.look()
    house.plan = plan(4, 2)
    house.look()
    house.plan = plan(6, 2)
    assert house.look() == ScalingStep(PREFILL, 2, 4, "why")


def test_who_lacks_most_grows_first() -> None:
    house = House(4, 2)
    house.plan = plan(5, 3)
    assert house.looks(20) == [(15.0, DECODE, 3), (45.0, PREFILL, 5)]


def test_nobody_goes_while_somebody_comes() -> None:
    house = House(3, 2)
    house.plan = plan(1, 3)
    assert house.looks(20) == [(15.0, DECODE, 3)]
    house.settle(DECODE)
    assert house.looks(20) == [(105.0, PREFILL, 2), (135.0, PREFILL, 1)]


def test_who_restarts_does_not_keep_others() -> None:
    house = House(3, 2)
    house.states[DECODE][0] = "restarting"
    house.plan = plan(2, 2)
    assert house.looks(3) == [(15.0, PREFILL, 2)]


def test_a_pool_that_is_down_is_not_shrunk() -> None:
    """Its workers crash and come back; a conductor that sees none of them plans for one."""
    house = House(4, 2)
    house.states[PREFILL] = ["restarting"] * 4
    house.plan = plan(1, 2)
    assert house.looks(40) == []
    house.states[PREFILL] = ["restarting"] * 2 + ["serving"] * 2
    assert house.looks(1) == [(205.0, PREFILL, 3)]


def test_at_the_budget_one_goes_before_another_comes() -> None:
    """Growth waits until the place is free, not until it is given up."""
    house = House(5, 3)
    house.plan = plan(4, 4)
    assert house.looks(3) == [(15.0, PREFILL, 4)]
    assert house.looks(20) == []  # it drains
    house.settle(PREFILL)
    assert house.looks(1) == [(120.0, DECODE, 4)]


CONVERTING = replace(CONFIG, can_convert=True)


def test_what_one_pool_gives_up_the_other_gets() -> None:
    """In one step, also at the budget; the next one waits until that one serves."""
    house = House(5, 3, CONVERTING)
    house.plan = plan(3, 5)
    assert house.looks(2) == []
    step = house.look()
    assert step == ScalingStep(PREFILL, 5, 4, "why", ScalingStep(DECODE, 3, 4, "why"))
    assert str(step) == "prefill 5 to 4: why; decode 3 to 4: why"
    assert house.looks(10) == []
    house.settle(DECODE)
    step = house.look()
    assert step is not None and step.sizes == {PREFILL: 3, DECODE: 5}
    house.settle(DECODE)
    assert house.looks(20) == []


def test_no_more_change_than_both_pools_want() -> None:
    house = House(5, 2, replace(CONVERTING, step=3))
    house.plan = plan(2, 3)
    house.looks(2)
    step = house.look()
    assert step is not None and step.sizes == {PREFILL: 4, DECODE: 3}
    house.settle(DECODE)
    assert house.looks(10) == [(45.0, PREFILL, 2)]


def test_a_change_of_roles_is_of_wishes_that_are_both_old_enough() -> None:
    house = House(3, 2, CONVERTING)
    house.plan = plan(3, 3)
    house.looks(2)
    house.plan = plan(2, 3)
    assert house.looks(1) == [(15.0, DECODE, 3)]


def test_who_does_not_change_its_role_in_time_is_taken_back() -> None:
    house = House(3, 2, CONVERTING)
    house.plan = plan(2, 3)
    house.looks(3)
    assert house.looks(20) == [(115.0, DECODE, 2)]


def test_bounds() -> None:
    config = replace(CONFIG, prefill=PoolBounds(2, 3), decode=PoolBounds(1, 4))
    house = House(2, 2, config)
    house.plan = plan(9, 9)
    assert wanted_sizes(house.sight(), config) == {PREFILL: 3, DECODE: 4}
    house.plan = plan(1, 1)
    assert wanted_sizes(house.sight(), config) == {PREFILL: 2, DECODE: 1}


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ((8, 8), (4, 4)),
        ((12, 4), (6, 2)),
        ((60, 1), (7, 1)),
        ((1, 60), (1, 7)),
        ((5, 3), (5, 3)),
        ((4, 60), (1, 7)),
    ],
)
def test_the_budget_is_shared_out(asked: tuple[int, int], given: tuple[int, int]) -> None:
    house = House(1, 1)
    house.plan = plan(*asked)
    assert tuple(wanted_sizes(house.sight(), CONFIG).values()) == given


def test_growth_that_does_not_come_is_taken_back_and_rests() -> None:
    """Asked for at 15 s, given up 100 s later; wanted still, it is not tried for 100 s."""
    house = House(2, 2)
    house.plan = plan(3, 2)
    assert house.looks(24) == [(15.0, PREFILL, 3), (115.0, PREFILL, 2)]
    house.states[PREFILL] = ["serving"] * 2
    assert house.looks(20) == [(215.0, PREFILL, 3)]


def test_what_is_taken_back_says_why_it_did_not_come() -> None:
    house = House(1, 1)
    house.plan = plan(2, 1)
    house.looks(3)
    sight, why = house.sight(), "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
    pending = PoolWorker(WorkerId("x"), PREFILL, "pending", "", why)
    workers = [*(each for each in sight.workers if each.state == "serving"), pending]
    late = replace(sight, now_seconds=house.now + 100.0, workers=workers)
    step, _ = decide_scaling(late, house.past, CONFIG)
    assert str(step) == f"prefill 2 to 1: taken back, 1 do not serve after 100 s: {why}"


def test_what_has_come_of_a_growth_stays() -> None:
    """Of two, one serves."""
    house = House(2, 2, replace(CONFIG, step=2))
    house.plan = plan(4, 2)
    assert house.looks(3) == [(15.0, PREFILL, 4)]
    house.states[PREFILL][2] = "serving"
    assert house.looks(20) == [(115.0, PREFILL, 3)]


def test_growth_that_served_is_not_taken_back_later() -> None:
    house = House(2, 2)
    house.plan = plan(3, 2)
    house.looks(4)
    house.settle(PREFILL)
    house.looks(1)
    house.states[PREFILL][2] = "restarting"
    assert house.looks(40) == []


def test_who_was_resized_by_somebody_else_is_left_alone() -> None:
    house = House(2, 2)
    house.plan = plan(3, 2)
    house.looks(4)
    house.sizes[PREFILL], house.states[PREFILL] = 2, ["serving"] * 2
    house.plan = plan(2, 2)
    assert house.looks(40) == []


def test_without_a_plan_nothing_changes_but_what_never_came() -> None:
    house = House(2, 2)
    house.plan = plan(3, 2)
    house.looks(3)
    house.plan = None
    assert house.looks(40) == [(115.0, PREFILL, 2)]


# -- the loop ------------------------------------------------------------------------------


class FakePools:
    def __init__(self) -> None:
        self.asked: list[Mapping[Role, int]] = []
        self.error: Exception | None = None

    async def sizes(self) -> Mapping[Role, int]:
        if isinstance(self.error, Unavailable):
            raise self.error
        return {PREFILL: 1, DECODE: 1}

    async def workers(self) -> list[PoolWorker]:
        return [PoolWorker(WorkerId(role.value), role, "serving") for role in (PREFILL, DECODE)]

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        self.asked.append(wanted)
        if self.error is not None:
            raise self.error

    async def remove(self, worker_id: WorkerId) -> None: ...


class Loop:
    def __init__(self, dry_run: bool = False) -> None:
        self.pools, self.clock, self.said = FakePools(), ManualClock(), list[str]()
        self.leads = True
        self.plan: PoolPlan | Exception = plan(2, 1)
        self.scaler = Autoscaler(
            self.pools, self.ask, self.clock, CONFIG, dry_run=dry_run, say=self.said.append,
            leads=lambda: self.leads,
        )  # fmt: skip

    async def ask(self) -> PoolPlan:
        if isinstance(self.plan, Exception):
            raise self.plan
        return self.plan

    async def looks(self, count: int) -> None:
        for _ in range(count):
            self.clock.advance(5.0)
            await self.scaler.look()


async def test_a_step_is_taken_and_told() -> None:
    loop = Loop()
    await loop.looks(3)
    assert loop.pools.asked == [{PREFILL: 2}]
    assert loop.said == ["changes prefill 1 to 2: why"]


async def test_who_does_not_lead_does_nothing_and_forgets() -> None:
    """A growth that it asked for before is the next one's to take back."""
    loop = Loop()
    await loop.looks(3)
    assert loop.pools.asked == [{PREFILL: 2}]
    loop.leads = False
    await loop.looks(100)
    assert loop.pools.asked == [{PREFILL: 2}]
    loop.leads, loop.plan = True, plan(1, 1)
    await loop.looks(100)
    assert loop.pools.asked == [{PREFILL: 2}]


async def test_a_dry_run_only_says_so() -> None:
    """As often as it would act."""
    loop = Loop(dry_run=True)
    await loop.looks(14)
    assert loop.pools.asked == []
    assert loop.said == ["would change prefill 1 to 2: why"] * 2


async def test_pools_that_fail_are_tried_again_after_a_rest() -> None:
    loop = Loop()
    loop.pools.error = Overloaded("somebody else")
    await loop.looks(10)
    assert loop.pools.asked == [{PREFILL: 2}] * 2
    assert loop.said[:2] == [
        "changes prefill 1 to 2: why", "could not change prefill: somebody else",
    ]  # fmt: skip


async def test_what_fails_at_every_look_is_said_once() -> None:
    loop = Loop()
    loop.plan = Unavailable("gone")
    await loop.looks(5)
    loop.pools.error = Unavailable("no server")
    await loop.looks(5)
    assert loop.said == ["no conductor tells a plan: gone", "can't see the pools: no server"]


async def test_off_is_off() -> None:
    await autoscaler.run_autoscaler(
        Settings(autoscale="off"), FakePools(), Loop().ask, ManualClock()
    )


async def test_it_looks_until_it_is_cancelled() -> None:
    loop = Loop()
    settings = Settings(autoscale="on", autoscale_seconds=5.0, autoscale_stable_seconds=0.0)
    running = asyncio.ensure_future(
        autoscaler.run_autoscaler(settings, loop.pools, loop.ask, loop.clock)
    )
    while not loop.pools.asked:
        await asyncio.sleep(0)
        loop.clock.advance(5.0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert loop.pools.asked[0] == {PREFILL: 2}


def test_settings() -> None:
    settings = Settings(min_prefill=2, max_decode=5, max_workers=7, autoscale_step=2)
    assert scaling_config(settings) == ScalingConfig(
        prefill=PoolBounds(2, 64), decode=PoolBounds(1, 5), max_workers=7, step=2
    )
