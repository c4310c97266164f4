"""The registry of the cluster's members. Each member announces itself under a lease, and is removed
when its lease expires."""

from typing import Protocol

from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member


class Registry(Protocol):
    """Announces and lists members. Methods raise Unavailable when the registry can't be reached in
    time, or refuses the call. ``database_id`` identifies the database that the last answer of
    :meth:`members` came from. It changes when the registry has lost its data: until the members
    have announced themselves again, the registry then knows none."""

    database_id: str

    async def announce(self, member: Member, ttl_seconds: float) -> bool:
        """Write the member, and start or renew its lease. Return False if a newer generation with
        the same id is registered; the caller must then stop."""
        ...

    async def withdraw(self, member_id: WorkerId, generation: Incarnation) -> None:
        """Remove the member at once, unless a newer generation is registered. Idempotent."""
        ...

    async def members(self) -> list[Member]:
        """Return all members with a valid lease, ordered by id."""
        ...

    async def ping(self) -> None:
        """Check that the registry accepts announcements."""
        ...

    async def close(self) -> None: ...
