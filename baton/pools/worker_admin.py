"""How a backend that does not own its workers' processes reaches them: by the registry."""

from collections.abc import Mapping
from typing import Protocol

from baton.core.credentials import ClusterCredentials
from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.states import Role
from baton.errors import NotFound, Unavailable
from baton.registry.base import Registry
from baton.rpc.worker_client import convert_worker, drain_worker, inspect_worker


class WorkerAdmin(Protocol):
    async def loads(self) -> Mapping[WorkerId, float]:
        """How much each has to do; to be compared within one pool. Raises Unavailable."""
        ...

    async def drain(self, worker_id: WorkerId) -> None:
        """Tells it to take nothing new. Raises NotFound when nobody knows it, Unavailable when it
        does not answer. So do the others."""
        ...

    async def is_drained(self, worker_id: WorkerId) -> bool:
        """Whether nothing is left there, neither to do nor to hand over."""
        ...

    async def stay(self, worker_id: WorkerId) -> None:
        """Ends its drain: it serves again. Raises Unavailable when its process is to end, too."""
        ...


class RegistryWorkerAdmin:
    def __init__(self, registry: Registry, trust: ClusterCredentials | str | None = None) -> None:
        self._registry = registry
        self._trust = trust

    async def loads(self) -> Mapping[WorkerId, float]:
        return {member.id: scalar_load(member) for member in await self._registry.members()}

    async def drain(self, worker_id: WorkerId) -> None:
        await drain_worker((await self._member(worker_id)).address, self._trust)

    async def is_drained(self, worker_id: WorkerId) -> bool:
        member = await self._member(worker_id)
        return (await inspect_worker(member.address, self._trust)).drained

    async def stay(self, worker_id: WorkerId) -> None:
        member = await self._member(worker_id)
        await convert_worker(member.address, member.role, self._trust)

    async def _member(self, worker_id: WorkerId) -> Member:
        for member in await self._registry.members():
            if member.id == worker_id:
                return member
        raise NotFound(f"the registry does not know {worker_id}")


def scalar_load(member: Member) -> float:
    """Tokens that wait to be read, or tokens of KV that were promised."""
    load = member.load
    return load.queued_tokens if member.role is Role.PREFILL else load.promised_tokens


class UnavailableWorkerAdmin:
    """Nobody knows where the registry is: workers drain when their process is told to end."""

    async def loads(self) -> Mapping[WorkerId, float]:
        raise Unavailable("redis_url is not set")

    async def drain(self, worker_id: WorkerId) -> None:
        raise Unavailable("redis_url is not set")

    async def is_drained(self, worker_id: WorkerId) -> bool:
        raise Unavailable("redis_url is not set")

    async def stay(self, worker_id: WorkerId) -> None:
        raise Unavailable("redis_url is not set")
