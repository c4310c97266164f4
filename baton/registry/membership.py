"""A mirror of the registry that outlives its outages."""

from collections.abc import Sequence
from typing import Protocol

import structlog

from baton.clock import Clock
from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.numerics import incompatible_workers
from baton.core.states import Role, WorkerState
from baton.errors import BatonError

REJOIN_SECONDS = 6.0
"""What members may take to announce themselves to a registry that forgot them."""

log = structlog.get_logger(__name__)


class MemberSource(Protocol):
    """The part of a registry that is read."""

    incarnation: str

    async def members(self) -> list[Member]: ...


class Membership:
    """Polls the registry. While it can't be reached, the last known members stay for
    ``grace_seconds``. After it could not be reached, when it has another memory than before, or has
    lost most of them at once (leases that ended while nobody could renew them), they stay for
    ``REJOIN_SECONDS`` in which it answers, to announce themselves again. Losing Redis costs
    freshness, not service."""

    def __init__(
        self,
        registry: MemberSource,
        clock: Clock,
        interval_seconds: float = 0.5,
        grace_seconds: float = 3600.0,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._grace_seconds = grace_seconds
        self._members: list[Member] = []
        self._ready_of: list[Member] = self._members
        self._ready: dict[Role, list[Member]] = {}
        self._found: list[Member] = []
        self._odd: frozenset[WorkerId] = frozenset()
        self._fresh_at = float("-inf")
        self._doubt_until = float("-inf")
        self._incarnation = ""
        self._lost = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.refresh()
            await self._clock.sleep(self._interval_seconds)

    async def refresh(self) -> None:
        now = self._clock.monotonic()
        try:
            found = sorted(await self._registry.members(), key=lambda member: member.id)
        except BatonError as error:
            log.warning("membership_stale", error=str(error))
            if now - self._fresh_at > self._grace_seconds:
                self._members = []
            self._lost = True
            return
        self._fresh_at = now
        self._members = self._believed(found, now)
        self._tell_odd(incompatible_workers(self._members))

    def _tell_odd(self, odd: frozenset[WorkerId]) -> None:
        if odd - self._odd:
            log.warning("workers_compute_otherwise", left_out=sorted(odd))
        self._odd = odd

    def _believed(self, found: list[Member], now: float) -> list[Member]:
        present = {member.id for member in found}
        before, self._found = self._found, found
        staying = [member for member in before if member.state is not WorkerState.DRAINING]
        incarnation, self._incarnation = self._incarnation, self._registry.incarnation
        is_another = incarnation not in ("", self._incarnation)
        has_lost_most = 2 * sum(member.id not in present for member in staying) > len(staying)
        if self._lost or is_another or has_lost_most:
            self._doubt_until = now + REJOIN_SECONDS
            log.warning("registry_doubted", missing=sorted({m.id for m in before} - present))
        self._lost = False
        if now >= self._doubt_until:
            return found
        missing = [member for member in self._members if member.id not in present]
        return sorted([*found, *missing], key=lambda member: member.id)

    @property
    def fresh_at(self) -> float:
        """When the registry last answered, by the clock's monotonic time."""
        return self._fresh_at

    @property
    def members(self) -> list[Member]:
        """In the order of their ids."""
        return self._members

    def ready(self, role: Role) -> Sequence[Member]:
        """Those of ``role`` that take requests, in the order of their ids."""
        if self._ready_of is not self._members:  # it is asked several times for each request
            self._ready_of, self._ready = self._members, {}
        known = self._ready.get(role)
        if known is None:
            odd = self.odd
            members = (m for m in self._members if m.role is role and m.id not in odd)
            known = self._ready[role] = [m for m in members if m.state is WorkerState.READY]
        return known

    @property
    def odd(self) -> frozenset[WorkerId]:
        """Workers that are not to be used, whatever they say: :mod:`baton.core.numerics`."""
        return self._odd
