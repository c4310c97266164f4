"""Drains workers through their RPCs, for backends that don't own the workers' processes. The
workers' addresses come from the registry."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from baton.core.credentials import ClusterCredentials
from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import NotFound, Unavailable
from baton.registry.base import Registry
from baton.rpc.worker_client import convert_worker, drain_worker, inspect_worker

NO_REGISTRY = "workers can't be reached without a registry: the setting redis_url is not set"


@dataclass(frozen=True, slots=True)
class DrainReport:
    """How far a worker has drained. ``is_drained`` means that it has no requests and no exported KV
    left, and has published its blocks to the store. ``num_requests`` counts the requests that are
    left."""

    is_drained: bool
    num_requests: int


class WorkerAdmin(Protocol):
    async def loads(self) -> Mapping[WorkerId, float]:
        """Return the load of each worker. Loads can be compared only within one pool. Raises
        Unavailable if the registry can't be reached."""
        ...

    async def drain(self, worker_id: WorkerId) -> None:
        """Make a worker drain. This and the methods below raise NotFound when the worker is not in
        the registry, and Unavailable when it does not answer."""
        ...

    async def drain_report(self, worker_id: WorkerId) -> DrainReport:
        """Return whether a worker has drained, and how many requests it has left."""
        ...

    async def end_drain(self, worker_id: WorkerId) -> None:
        """End the drain, so that the worker serves again. Raises Unavailable also when the worker's
        process is shutting down."""
        ...


class RegistryWorkerAdmin:
    def __init__(self, registry: Registry, trust: ClusterCredentials | str | None = None) -> None:
        self._registry = registry
        self._trust = trust

    async def loads(self) -> Mapping[WorkerId, float]:
        members = await self._registry.members()
        return {each.id: scalar_load(each) for each in members if each.role in WORKER_KINDS}

    async def drain(self, worker_id: WorkerId) -> None:
        await drain_worker((await self._member(worker_id)).address, self._trust)

    async def drain_report(self, worker_id: WorkerId) -> DrainReport:
        member = await self._member(worker_id)
        found = await inspect_worker(member.address, self._trust)
        return DrainReport(found.drained, found.total_requests)

    async def end_drain(self, worker_id: WorkerId) -> None:
        member = await self._member(worker_id)
        await convert_worker(member.address, member.role, self._trust)

    async def _member(self, worker_id: WorkerId) -> Member:
        for member in await self._registry.members():
            if member.id == worker_id:
                return member
        raise NotFound(f"worker {worker_id} is not in the registry")


def scalar_load(member: Member) -> float:
    """Return a worker's load: the KV tokens that its requests are expected to need or, if it only
    computes prompts, their queued tokens."""
    load, kind = member.load, WORKER_KINDS[member.role]
    return load.promised_tokens if kind.writes_answers else load.queued_tokens


class UnavailableWorkerAdmin:
    """Takes the place of RegistryWorkerAdmin when no registry is configured. Every call fails, so
    workers drain only when Kubernetes deletes their pods, on SIGTERM."""

    async def loads(self) -> Mapping[WorkerId, float]:
        raise Unavailable(NO_REGISTRY)

    async def drain(self, worker_id: WorkerId) -> None:
        raise Unavailable(NO_REGISTRY)

    async def drain_report(self, worker_id: WorkerId) -> DrainReport:
        raise Unavailable(NO_REGISTRY)

    async def end_drain(self, worker_id: WorkerId) -> None:
        raise Unavailable(NO_REGISTRY)
