"""Keeps the pools as large as a conductor plans them, or only says what it would do."""

from collections.abc import Awaitable, Callable

import structlog

from baton.clock import Clock
from baton.config import Settings
from baton.core.pool_plan import PoolPlan
from baton.errors import BatonError
from baton.pools.base import Pools
from baton.pools.scaling_policy import (
    PoolBounds,
    PoolObservation,
    ScalingConfig,
    ScalingHistory,
    ScalingStep,
    decide_scaling,
)

log = structlog.get_logger(__name__)

FetchPlan = Callable[[], Awaitable[PoolPlan | None]]


def log_decision(told: str) -> None:
    log.warning("autoscaler", said=told)


class Autoscaler:
    """Looks every ``look_seconds``, while it ``leads``; a look that fails changes nothing.
    Restarting it loses nothing but the time for which a change was wanted already."""

    def __init__(
        self,
        pools: Pools,
        ask_plan: FetchPlan,
        clock: Clock,
        config: ScalingConfig,
        *,
        dry_run: bool = False,
        look_seconds: float = 5.0,
        say: Callable[[str], None] = log_decision,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._pools = pools
        self._ask_plan = ask_plan
        self._clock = clock
        self._config = config
        self._dry_run = dry_run
        self._look_seconds = look_seconds
        self._say = say
        self._leads = leads
        self._past = ScalingHistory()
        self._failing = ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(self._look_seconds)
            await self.look()

    async def look(self) -> ScalingStep | None:
        """The step that was taken, or would have been. What somebody else has done since is
        nothing to be taken back: who leads again begins anew."""
        if not self._leads():
            self._past = ScalingHistory()
            return None
        try:
            sight = await self._sight()
        except BatonError as error:
            self._fail(f"can't see the pools: {error}")
            return None
        step, past = decide_scaling(sight, self._past, self._config)
        if step is None:
            self._past = past
            return None
        if self._dry_run:
            self._say(f"would change {step}")
            # Nothing comes of it, so there is nothing to be taken back.
            self._past = ScalingHistory(past.changed_seconds)
            return step
        await self._take(step)
        self._past = past
        return step

    async def _take(self, step: ScalingStep) -> None:
        """One that fails is tried again after the cool-down, if it is wanted then."""
        self._say(f"changes {step}")
        try:
            await self._pools.scale(step.sizes)
        except BatonError as error:
            roles = " and ".join(role.value for role in step.sizes)
            self._fail(f"could not change {roles}: {error}")

    async def _sight(self) -> PoolObservation:
        sizes, workers = await self._pools.sizes(), await self._pools.workers()
        return PoolObservation(self._clock.monotonic(), await self._plan(), sizes, workers)

    async def _plan(self) -> PoolPlan | None:
        try:
            plan = await self._ask_plan()
        except BatonError as error:
            self._fail(f"no conductor tells a plan: {error}")
            return None
        self._failing = ""
        return plan

    def _fail(self, told: str) -> None:
        """Once, and not at every look."""
        if told != self._failing:
            self._failing = told
            self._say(told)


def scaling_config(settings: Settings, can_convert: bool = False) -> ScalingConfig:
    return ScalingConfig(
        prefill=PoolBounds(settings.min_prefill, settings.max_prefill),
        decode=PoolBounds(settings.min_decode, settings.max_decode),
        max_workers=settings.max_workers,
        step=settings.autoscale_step,
        stable_seconds=settings.autoscale_stable_seconds,
        cooldown_seconds=settings.autoscale_cooldown_seconds,
        pending_seconds=settings.autoscale_pending_seconds,
        can_convert=can_convert,
    )


async def run_autoscaler(
    settings: Settings,
    pools: Pools,
    ask_plan: FetchPlan,
    clock: Clock,
    can_convert: bool = False,
    leads: Callable[[], bool] = lambda: True,
) -> None:
    """As the settings say, until cancelled; returns at once when it is off. ``can_convert``:
    workers of these pools can change from one to the other. ``leads``: whether this one may act."""
    if settings.autoscale == "off":
        return
    scaler = Autoscaler(
        pools,
        ask_plan,
        clock,
        scaling_config(settings, can_convert),
        dry_run=settings.autoscale == "dry_run",
        look_seconds=settings.autoscale_seconds,
        leads=leads,
    )
    await scaler.run()
