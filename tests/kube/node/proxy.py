"""Addresses of services: connections go to the ready pods in turn, and stay where they are."""

import asyncio
import socket
from contextlib import suppress
from itertools import count

from tests.kube.api import Api
from tests.kube.controllers.endpoints import backends, is_open, port_at
from tests.kube.kinds import SERVICE, Object
from tests.kube.node.network import Network
from tests.kube.pods import is_leaving

PIECE = 64 * 1024
CONNECT_SECONDS = 5.0
Place = tuple[str, int]


class Proxy:
    """``look`` after any change: it opens and closes what services have come and gone."""

    def __init__(self, api: Api, network: Network) -> None:
        self._api = api
        self._network = network
        self._servers: dict[Place, asyncio.Server] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._turn = count()

    async def look(self) -> None:
        wanted = {
            (service["spec"]["clusterIP"], port["port"]): (service, port)
            for service in self._api.store.all(SERVICE)
            if service["spec"].get("clusterIP", "None") != "None" and not is_leaving(service)
            for port in service["spec"].get("ports") or []
            if port["protocol"] == "TCP"
        }
        for place in set(self._servers) - set(wanted):
            self._close(place)
        for place in set(wanted) - set(self._servers):
            service, port = wanted[place]
            await self._open(place, service["metadata"], port["port"])

    async def _open(self, place: Place, metadata: Object, port: int) -> None:
        if place[0] not in {address for address, _ in self._servers}:
            await asyncio.to_thread(self._network.add_address, place[0])
        namespace, name = metadata["namespace"], metadata["name"]

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            try:
                await self._serve(namespace, name, port, reader, writer)
            except asyncio.CancelledError:
                pass  # only the proxy's own end cancels it; asyncio would print it
            finally:
                self._connections.discard(task)

        self._servers[place] = await asyncio.start_server(serve, *place)

    def _close(self, place: Place) -> None:
        self._servers.pop(place).close()
        if place[0] not in {address for address, _ in self._servers}:
            with suppress(RuntimeError):
                self._network.drop_address(place[0])

    async def stop(self) -> None:
        for place in list(self._servers):
            self._servers.pop(place).close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _targets(self, namespace: str, name: str, number: int) -> list[Place]:
        service = self._api.store.find(SERVICE, namespace, name)
        if service is None:
            return []
        port = next(each for each in service["spec"]["ports"] if each["port"] == number)
        pods = [pod for pod in backends(self._api, service) if is_open(service, pod)]
        return [(pod["status"]["podIP"], port_at(pod, port)) for pod in pods]

    async def _serve(
        self,
        namespace: str,
        name: str,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        targets = self._targets(namespace, name, number)
        if not targets:
            writer.transport.abort()  # as refused as it gets once the kernel has accepted
            return
        target = targets[next(self._turn) % len(targets)]
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                back_reader, back_writer = await asyncio.open_connection(*target)
        except (OSError, TimeoutError):
            writer.transport.abort()
            return
        for each in (writer, back_writer):
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, back_writer))
                group.create_task(_pump(back_reader, writer))
        finally:
            writer.close()
            back_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """To its end; a connection that breaks breaks the other one, too."""
    try:
        while data := await reader.read(PIECE):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.transport.abort()
