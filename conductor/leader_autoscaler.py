"""Resizes the cluster's pools in Kubernetes to this conductor's plan, while this conductor is the
leader."""

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
"""Delay before a failed repair of the pools is retried."""

log = structlog.get_logger(__name__)


class LeaderAutoscaler:
    """Resizes the pools while this conductor is the leader, which is the holder of a Kubernetes
    lease. Every conductor has an instance if the settings enable autoscaling in Kubernetes."""

    def __init__(
        self, settings: Settings, own_id: WorkerId, fetch_plan: autoscaler.FetchPlan, clock: Clock
    ) -> None:
        self._settings = settings
        self._own_id = own_id
        self._fetch_plan = fetch_plan
        self._clock = clock
        self._became_leader = asyncio.Event()
        self._election: LeaderElection | None = None

    @classmethod
    def from_settings(
        cls, settings: Settings, own_id: WorkerId, fetch_plan: autoscaler.FetchPlan, clock: Clock
    ) -> "LeaderAutoscaler | None":
        """Create the autoscaler from the settings; None if they don't enable autoscaling in
        Kubernetes."""
        if settings.autoscale == "off" or settings.autoscale_pools != "kubernetes":
            return None
        return cls(settings, own_id, fetch_plan, clock)

    @property
    def is_leader(self) -> bool:
        """Whether this instance is the leader."""
        return self._election is not None and self._election.is_leader

    def check(self) -> None:
        """Raise Invalid if no API server is configured, or if a role has several pools and the
        settings do not name the pool to scale."""
        settings = self._settings
        kubernetes_client_for(settings).close()
        chosen = (
            ("prefill", settings.autoscale_prefill_pool),
            ("decode", settings.autoscale_decode_pool),
        )
        for role, name in chosen:
            targets = settings.kubernetes_pools.items()
            pools = [pool for pool, target in targets if target.startswith(f"{role}/")]
            if len(pools) > 1 and (name or role) not in pools:
                raise Invalid(
                    f"autoscale_{role}_pool is {name}: it must name the {role} pool to scale, one "
                    f"of {', '.join(sorted(pools))}"
                )

    async def run(self) -> None:
        """Take part in the leader election, and resize the pools while this instance is the leader.
        When cancelled, release the lease."""
        settings, clock = self._settings, self._clock
        async with (
            open_kubernetes_pools(settings, clock, autoscaler.log_decision) as pools,
            open_kubernetes_lease(settings, clock) as lease,
        ):
            election = self._election = LeaderElection(
                lease, self._own_id, clock, self._became_leader.set
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(election.run())
                    tasks.create_task(self._repair_pools(pools, election))
                    await autoscaler.run_autoscaler(
                        settings,
                        pools,
                        self._fetch_plan,
                        clock,
                        is_leader=lambda: election.is_leader,
                    )
            finally:
                await election.resign()

    async def _repair_pools(self, pools: "KubernetesPools", election: LeaderElection) -> None:
        """Each time this instance becomes the leader, put workers back into service that the
        previous leader may have left drained."""
        while self._settings.autoscale == "on":
            await self._became_leader.wait()
            try:
                if election.is_leader:
                    await pools.end_leftover_drains()
                self._became_leader.clear()
            except BatonError as error:
                log.warning("pools_not_repaired", error=str(error))
                await self._clock.sleep(REPAIR_RETRY_SECONDS)
