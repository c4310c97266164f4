"""Simulates the registry, and each process's connection to it."""

import asyncio

from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.errors import Unavailable
from testkit.fakes.registry import MemoryRegistry
from tests.sim.whole.loop import SimClock
from tests.sim.whole.process import Process

TIMEOUT_SECONDS = 1.0


class SimRegistryServer:
    """The registry server. It is empty after a restart."""

    def __init__(self, clock: SimClock) -> None:
        self._clock = clock
        self.registry = MemoryRegistry(clock)
        self.cut_off: dict[str, float] = {}
        """The time until which a process can't reach the registry, by the process's name."""

    def restart(self) -> None:
        self.registry = MemoryRegistry(self._clock)

    def is_cut_off(self, process: Process) -> bool:
        return self.cut_off.get(process.name, 0.0) > self._clock.monotonic()


class SimRegistryClient:
    """Implements :class:`baton.registry.base.Registry`."""

    def __init__(self, server: SimRegistryServer, process: Process) -> None:
        self._server = server
        self._process = process
        self.database_id = ""

    async def announce(self, member: Member, ttl_seconds: float) -> bool:
        return await (await self._reach()).announce(member, ttl_seconds)

    async def withdraw(self, member_id: WorkerId, generation: Incarnation) -> None:
        await (await self._reach()).withdraw(member_id, generation)

    async def members(self) -> list[Member]:
        registry = await self._reach()
        members = await registry.members()
        self.database_id = registry.database_id
        return members

    async def ping(self) -> None:
        await (await self._reach()).ping()

    async def close(self) -> None:
        """Do nothing, because there is nothing to close."""

    async def _reach(self) -> MemoryRegistry:
        if not self._process.alive:
            raise Unavailable("the calling process is dead")
        await asyncio.sleep(0.0005)
        if self._server.is_cut_off(self._process):
            await asyncio.sleep(TIMEOUT_SECONDS)
            raise Unavailable("the registry does not respond")
        return self._server.registry
