"""A local copy of the registry that survives the registry's outages."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import structlog

from baton.clock import Clock
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.errors import BatonError
from baton.registry.member_list import MemberList

REJOIN_SECONDS = 10.0
"""Time for members to announce themselves again to a registry that has lost its data. After a
failover, a member may need 5 seconds for the name's new address, 2 for a connection that hangs, and
one heartbeat."""

log = structlog.get_logger(__name__)


class MemberSource(Protocol):
    """The read-only part of a registry."""

    database_id: str

    async def members(self) -> list[Member]: ...


class MemberView(Protocol):
    """The members that a program knows: of the whole cluster (:class:`Membership`), or those that
    matter for one model (:class:`ModelMembership`)."""

    @property
    def current(self) -> MemberList: ...

    @property
    def last_answer_seconds(self) -> float:
        """The monotonic time when the registry last answered."""
        ...


class Membership:
    """Polls the registry. While the registry can't be reached, or refuses announcements, the last
    known members stay: an outage of Redis makes the data stale, but doesn't interrupt service.
    Missing members stay for ``REJOIN_SECONDS``, so that they can announce themselves again, in
    three cases: the registry was unavailable and is back; its ``database_id`` has changed, so its
    data was lost; or most members vanished at once, because their leases expired while they could
    not be renewed."""

    def __init__(
        self,
        registry: MemberSource,
        clock: Clock,
        interval_seconds: float = 0.5,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._current = MemberList()
        self._mixed_models: Mapping[str, Sequence[str]] = {}
        self._last_found: list[Member] = []
        self._last_answer_seconds = float("-inf")
        self._rejoin_until = float("-inf")
        self._database_id = ""
        self._had_outage = False

    async def run(self) -> None:
        """Poll the registry until cancelled."""
        while True:
            await self.refresh()
            await self._clock.sleep(self._interval_seconds)

    async def refresh(self) -> None:
        now = self._clock.monotonic()
        try:
            found = await self._registry.members()
        except BatonError as error:
            log.warning("membership_stale", error=str(error))
            self._had_outage = True
            return
        self._last_answer_seconds = now
        known, self._current = self._current, MemberList(self._with_missing(found, now))
        if self._current.incompatible_ids - known.incompatible_ids:
            log.warning("numerics_differ", excluded=sorted(self._current.incompatible_ids))
        variants = self._current.mixed_models()
        if variants != self._mixed_models:
            log.info("model_variants", variants=variants)
        self._mixed_models = variants

    def _with_missing(self, found: list[Member], now: float) -> list[Member]:
        """Return ``found`` and, during the rejoin period, also the known members that it lacks."""
        present = {member.id for member in found}
        before, self._last_found = self._last_found, found
        staying = [member for member in before if member.state is not WorkerState.DRAINING]
        incarnation, self._database_id = self._database_id, self._registry.database_id
        has_changed = incarnation not in ("", self._database_id)
        has_lost_most = 2 * sum(member.id not in present for member in staying) > len(staying)
        if self._had_outage or has_changed or has_lost_most:
            self._rejoin_until = now + REJOIN_SECONDS
            log.warning("rejoin_period_started", missing=sorted({m.id for m in before} - present))
        self._had_outage = False
        if now >= self._rejoin_until:
            return found
        return [*found, *(member for member in self.members if member.id not in present)]

    @property
    def last_answer_seconds(self) -> float:
        """The monotonic time when the registry last answered."""
        return self._last_answer_seconds

    @property
    def current(self) -> MemberList:
        """The members as of the last refresh. A refresh replaces the list by a new one."""
        return self._current

    @property
    def members(self) -> list[Member]:
        """All members, ordered by id."""
        return self._current.members

    def ready(self, role: Role) -> Sequence[Member]:
        """Return the members of ``role`` in state READY, ordered by id, without incompatible
        workers."""
        return self._current.ready(role)


class ModelMembership:
    """The workers of one model, and all members that are not workers, as another
    :class:`Membership` knows them."""

    def __init__(self, membership: Membership, model: str) -> None:
        self._membership = membership
        self._model = model

    @property
    def current(self) -> MemberList:
        return self._membership.current.of_model(self._model)

    @property
    def last_answer_seconds(self) -> float:
        """The monotonic time when the registry last answered."""
        return self._membership.last_answer_seconds
