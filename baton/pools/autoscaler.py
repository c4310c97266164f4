"""Resizes the pools to the sizes that a conductor plans. In a dry run, only logs what it would
do."""

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


def log_decision(text: str) -> None:
    log.warning("autoscaler", message=text)


class Autoscaler:
    """Checks the pools every ``check_seconds`` while its process is the leader (``is_leader``), and
    resizes them if necessary. A check that fails changes nothing. A restart of the process loses
    only the history: how long a change has been wanted, when the last change was, and which growth
    is not complete yet."""

    def __init__(
        self,
        pools: Pools,
        fetch_plan: FetchPlan,
        clock: Clock,
        config: ScalingConfig,
        *,
        dry_run: bool = False,
        check_seconds: float = 5.0,
        log_message: Callable[[str], None] = log_decision,
        is_leader: Callable[[], bool] = lambda: True,
    ) -> None:
        self._pools = pools
        self._fetch_plan = fetch_plan
        self._clock = clock
        self._config = config
        self._dry_run = dry_run
        self._check_seconds = check_seconds
        self._log_message = log_message
        self._is_leader = is_leader
        self._history = ScalingHistory()
        self._last_failure = ""

    async def run(self) -> None:
        """Check the pools until cancelled."""
        while True:
            await self._clock.sleep(self._check_seconds)
            await self.check_pools()

    async def check_pools(self) -> ScalingStep | None:
        """Check the pools once, and return the step that was taken (in a dry run, the step that
        would have been). A process that is not the leader drops its history, so that it does not
        undo another leader's changes later."""
        if not self._is_leader():
            self._history = ScalingHistory()
            return None
        try:
            observation = await self._observe()
        except BatonError as error:
            self._log_failure(f"can't read the state of the pools: {error}")
            return None
        step, history = decide_scaling(observation, self._history, self._config)
        if step is None:
            self._history = history
            return None
        if self._dry_run:
            self._log_message(f"would change {step}")
            # The pools don't change, so no growth is pending that might be taken back.
            self._history = ScalingHistory(history.last_change_seconds)
            return step
        await self._apply(step)
        self._history = history
        return step

    async def _apply(self, step: ScalingStep) -> None:
        """Resize the pools. A step that fails is tried again after the cool-down, if the change is
        still wanted."""
        self._log_message(f"changes {step}")
        try:
            await self._pools.scale(step.sizes)
        except BatonError as error:
            roles = " and ".join(role.value for role in step.sizes)
            self._log_failure(f"could not change {roles}: {error}")

    async def _observe(self) -> PoolObservation:
        sizes, workers = await self._pools.sizes(), await self._pools.workers()
        return PoolObservation(self._clock.monotonic(), await self._plan(), sizes, workers)

    async def _plan(self) -> PoolPlan | None:
        try:
            plan = await self._fetch_plan()
        except BatonError as error:
            self._log_failure(f"can't get a plan from a conductor: {error}")
            return None
        self._last_failure = ""
        return plan

    def _log_failure(self, text: str) -> None:
        """Log a failure, unless it is the same as at the last check."""
        if text != self._last_failure:
            self._last_failure = text
            self._log_message(text)


def scaling_config(settings: Settings, can_convert: bool = False) -> ScalingConfig:
    return ScalingConfig(
        prefill=PoolBounds(settings.min_prefill, settings.max_prefill),
        decode=PoolBounds(settings.min_decode, settings.max_decode),
        max_workers=settings.max_workers,
        max_step_workers=settings.autoscale_step,
        stable_seconds=settings.autoscale_stable_seconds,
        cooldown_seconds=settings.autoscale_cooldown_seconds,
        shrink_seconds=settings.autoscale_shrink_seconds,
        pending_seconds=settings.autoscale_pending_timeout_seconds,
        can_convert=can_convert,
    )


async def run_autoscaler(
    settings: Settings,
    pools: Pools,
    fetch_plan: FetchPlan,
    clock: Clock,
    can_convert: bool = False,
    is_leader: Callable[[], bool] = lambda: True,
) -> None:
    """Run an autoscaler according to the settings, until cancelled; return at once if autoscaling
    is off. ``can_convert`` says whether a worker can move from one of ``pools`` to another by
    changing its role, and ``is_leader`` whether this process is the leader."""
    if settings.autoscale == "off":
        return
    scaler = Autoscaler(
        pools,
        fetch_plan,
        clock,
        scaling_config(settings, can_convert),
        dry_run=settings.autoscale == "dry_run",
        check_seconds=settings.autoscale_interval_seconds,
        is_leader=is_leader,
    )
    await scaler.run()
