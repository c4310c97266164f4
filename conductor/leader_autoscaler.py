"""Keeps a cluster's pools in Kubernetes as large as this conductor plans them, while it leads."""

import asyncio
from typing import TYPE_CHECKING

import structlog

from baton.clock import Clock
from baton.config import Settings
from baton.core.ids import WorkerId
from baton.errors import BatonError, Invalid
from baton.pools import autoscaler
from baton.pools.kubernetes.open import (
    kubernetes_client_for,
    open_kubernetes_lease,
    open_kubernetes_pools,
)
from baton.pools.leader_election import LeaderElection

if TYPE_CHECKING:
    from baton.pools.kubernetes.pools import KubernetesPools

REPAIR_RETRY_SECONDS = 30.0
"""Between two attempts."""

log = structlog.get_logger(__name__)


class LeaderAutoscaler:
    """Each conductor has one; they agree by a lease on the one that acts."""

    def __init__(
        self, settings: Settings, me: WorkerId, ask_plan: autoscaler.FetchPlan, clock: Clock
    ) -> None:
        self._settings = settings
        self._me = me
        self._ask_plan = ask_plan
        self._clock = clock
        self._began = asyncio.Event()
        self._election: LeaderElection | None = None

    @classmethod
    def of(
        cls, settings: Settings, me: WorkerId, ask_plan: autoscaler.FetchPlan, clock: Clock
    ) -> "LeaderAutoscaler | None":
        """None where nobody is to resize pools in Kubernetes."""
        if settings.autoscale == "off" or settings.autoscale_pools != "kubernetes":
            return None
        return cls(settings, me, ask_plan, clock)

    @property
    def leads(self) -> bool:
        """Whether it is this one that acts now."""
        return self._election is not None and self._election.leads

    def check(self) -> None:
        """Raises Invalid where there is no way to an API server, and for a role with several pools
        of which nobody says which one follows the load."""
        settings = self._settings
        kubernetes_client_for(settings).close()
        chosen = (
            ("prefill", settings.autoscale_prefill_pool),
            ("decode", settings.autoscale_decode_pool),
        )
        for role, name in chosen:
            places = settings.kubernetes_pools.items()
            pools = [pool for pool, place in places if place.startswith(f"{role}/")]
            if len(pools) > 1 and (name or role) not in pools:
                raise Invalid(
                    f"autoscale_{role}_pool is {name}: of the {role} pools it must name the one "
                    f"that follows the load: {', '.join(sorted(pools))}"
                )

    async def run(self) -> None:
        """Until cancelled; then it gives the lease back."""
        settings, clock = self._settings, self._clock
        async with (
            open_kubernetes_pools(settings, clock, autoscaler.log_decision) as pools,
            open_kubernetes_lease(settings, clock) as lease,
        ):
            election = self._election = LeaderElection(lease, self._me, clock, self._began.set)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(election.run())
                    tasks.create_task(self._mend(pools, election))
                    await autoscaler.run_autoscaler(
                        settings, pools, self._ask_plan, clock, leads=lambda: election.leads
                    )
            finally:
                await election.resign()

    async def _mend(self, pools: "KubernetesPools", election: LeaderElection) -> None:
        """What whoever led before may have left half done, each time that this one begins."""
        while self._settings.autoscale == "on":
            await self._began.wait()
            try:
                if election.leads:
                    await pools.mend()
                self._began.clear()
            except BatonError as error:
                log.warning("pools_not_mended", error=str(error))
                await self._clock.sleep(REPAIR_RETRY_SECONDS)
