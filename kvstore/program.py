"""The store node as a program."""

import asyncio
import os

import grpc.aio

from baton.clock import Clock, SystemClock
from baton.config import Settings
from baton.core.ids import Generation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.errors import Unavailable
from baton.kv.index import Holder
from baton.kv.redis_index import RedisKvIndex
from baton.registry.heartbeat import Heartbeat
from baton.registry.redis import RedisRegistry
from baton.rpc.kvstore_service import add_kvstore_service
from baton.rpc.server import build_server, listen
from baton.runtime.serve import Program
from baton.transport.region import HostMemory
from baton.transport.select import host_id, open_transports
from kvstore.node import StoreNode


class KvStoreProgram:
    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._generation = Generation(self._clock.wall_nanoseconds())
        self._id = WorkerId(settings.id or f"kvstore-{os.getpid()}")
        url = settings.needs_redis_url
        self._registry = RedisRegistry(url, settings.cluster)
        self._index = RedisKvIndex(url, settings.cluster)
        self._server: grpc.aio.Server | None = None
        self._state = WorkerState.READY
        self._address = ""

    @property
    def address(self) -> str:
        return self._address

    async def start(self) -> None:
        """Raises Invalid, Unavailable."""
        settings = self._settings
        await self._registry.ping()
        self._memory = _arena(settings.store_bytes)
        self._transports = open_transports(
            settings.transports,
            owner=self._id,
            generation=self._generation,
            region=self._memory.region,
            clock=self._clock,
            listen_host=settings.grpc_host,
            advertise_host=settings.advertise_address,
            secret=settings.cluster_secret,
        )
        self._node = StoreNode(
            Holder(self._id, self._generation),
            self._memory,
            self._transports,
            self._index,
            host_id(),
            self._clock,
        )
        self._server = build_server(settings.cluster_secret)
        add_kvstore_service(self._server, self._node)
        port = await listen(self._server, settings.grpc_host, settings.grpc_port)
        self._address = f"{settings.advertise_address or settings.grpc_host}:{port}"
        self._heartbeat = Heartbeat(
            self._registry, self._member, self._clock, settings.heartbeat_seconds
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeat.run())
            tasks.create_task(self._node.publish())

    async def drain(self) -> None:
        """A reader that loses the store recomputes; there is nothing to wait for."""
        self._state = WorkerState.DRAINING
        self._heartbeat.hurry()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=1.0)
            for transport in self._transports.values():
                await asyncio.to_thread(transport.close)
        await self._index.close()
        await self._registry.close()

    def _member(self) -> Member:
        return Member(
            id=self._id,
            role=Role.KVSTORE,
            address=self._address,
            generation=self._generation,
            state=self._state,
            host=host_id(),
            pid=os.getpid(),
            transports=tuple(self._transports),
        )


def build(settings: Settings) -> Program:
    return KvStoreProgram(settings)


def _arena(size_bytes: int) -> HostMemory:
    try:
        return HostMemory("baton-store", size_bytes)
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"store_bytes is {size_bytes}: no memory for the arena: {error}"
        ) from error
