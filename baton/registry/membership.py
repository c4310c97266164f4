"""A mirror of the registry that outlives its outages."""

import structlog

from baton.clock import Clock
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.errors import BatonError
from baton.registry.base import Registry

log = structlog.get_logger(__name__)


class Membership:
    """Polls the registry. While it can't be reached, or has come back empty-handed, the last
    known members stay for ``grace_seconds``: losing Redis costs freshness, not service."""

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        interval_seconds: float = 0.5,
        grace_seconds: float = 3600.0,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._grace_seconds = grace_seconds
        self._members: list[Member] = []
        self._fresh_at = float("-inf")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.refresh()
            await self._clock.sleep(self._interval_seconds)

    async def refresh(self) -> None:
        now = self._clock.monotonic()
        try:
            self._members = await self._registry.members()
        except BatonError as error:
            log.warning("membership_stale", error=str(error))
            if now - self._fresh_at > self._grace_seconds:
                self._members = []
            return
        self._fresh_at = now

    @property
    def fresh_at(self) -> float:
        """When the registry last answered, by the clock's monotonic time."""
        return self._fresh_at

    @property
    def members(self) -> list[Member]:
        return self._members

    def ready(self, role: Role) -> list[Member]:
        """Those of ``role`` that take requests."""
        return [m for m in self._members if m.role is role and m.state is WorkerState.READY]
