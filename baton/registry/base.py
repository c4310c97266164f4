"""Who is in the cluster: each member announces itself under a lease, and is gone with it."""

from typing import Protocol

from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member

MAX_MEMBERS = 4096


class Registry(Protocol):
    """Methods raise Unavailable when the registry can't be reached in time. ``incarnation`` names
    the memory that the last answer of :meth:`members` came from: another one knows nobody at
    first."""

    incarnation: str

    async def announce(self, member: Member, ttl_seconds: float) -> bool:
        """Writes or renews. False: a newer generation of that id is there; give up."""
        ...

    async def withdraw(self, member_id: WorkerId, generation: Incarnation) -> None:
        """Removes it at once, unless a newer generation is there. Idempotent."""
        ...

    async def members(self) -> list[Member]:
        """All whose lease holds, by id."""
        ...

    async def ping(self) -> None: ...

    async def close(self) -> None: ...
