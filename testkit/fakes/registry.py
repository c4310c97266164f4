"""An in-memory implementation of the registry, for a single process."""

from itertools import count

from baton.clock import Clock
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.errors import Unavailable


class MemoryRegistry:
    """A registry in this process. While ``is_reachable`` is False, every call raises Unavailable,
    as during an outage of Redis."""

    _database_ids = count(1)

    def __init__(self, clock: Clock) -> None:
        self.is_reachable = True
        self.database_id = str(next(self._database_ids))
        self._clock = clock
        self._leases: dict[WorkerId, tuple[Member, float]] = {}

    async def announce(self, member: Member, ttl_seconds: float) -> bool:
        self._check()
        present = self._current(member.id)
        if present is not None and present.generation > member.generation:
            return False
        self._leases[member.id] = (member, self._clock.monotonic() + ttl_seconds)
        return True

    async def withdraw(self, member_id: WorkerId, generation: Incarnation) -> None:
        self._check()
        present = self._current(member_id)
        if present is not None and present.generation <= generation:
            del self._leases[member_id]

    async def members(self) -> list[Member]:
        self._check()
        found = [self._current(member_id) for member_id in sorted(self._leases)]
        return [member for member in found if member is not None]

    async def ping(self) -> None:
        self._check()

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _current(self, member_id: WorkerId) -> Member | None:
        member, until = self._leases.get(member_id, (None, 0.0))
        return member if until > self._clock.monotonic() else None

    def _check(self) -> None:
        if not self.is_reachable:
            raise Unavailable("the registry can't be reached")
