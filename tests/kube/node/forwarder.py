"""Runs a TCP proxy and a DNS server for the services of a cluster, in a process of its own.

    python -m tests.kube.node.forwarder ADDRESS

Each line of JSON on standard input replaces the whole routing table (see :mod:`routes`). New
connections to a service go to its ready pods in turn; a new table does not affect existing
connections. All traffic passes through this process, so other work in it would slow down the
cluster's network. The process exits when its standard input ends.
"""

import asyncio
import json
import socket
import sys
from contextlib import suppress
from functools import partial
from itertools import count

from tests.kube.node.dns import NameServer

PIECE = 64 * 1024
CONNECT_SECONDS = 5.0
DNS_PORT = 53


class Forwarder:
    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}
        self._ports: dict[str, list[str]] = {}
        self._servers: dict[str, asyncio.Server] = {}
        self._turn = count()
        self._serving: set[asyncio.Task[None] | None] = set()
        """References to the running tasks, so that they are not garbage-collected."""

    def resolve(self, name: str) -> list[str] | None:
        return self._names.get(name.lower().rstrip("."))

    async def set_table(self, table: dict[str, dict[str, list[str]]]) -> None:
        """Apply a new routing table: listen at new addresses, and stop listening at old ones."""
        self._names, self._ports = table["names"], table["ports"]
        for place in set(self._servers) - set(self._ports):
            self._servers.pop(place).close()
        for place in set(self._ports) - set(self._servers):
            address, _, port = place.rpartition(":")
            serve = partial(self._serve, place)
            self._servers[place] = await asyncio.start_server(serve, address, int(port))

    async def _serve(
        self, place: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        self._serving.add(task)
        try:
            await self._forward(place, reader, writer)
        finally:
            self._serving.discard(task)

    async def _forward(
        self, place: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            back_reader, back_writer = await self._connect(place)
        except (OSError, TimeoutError):
            writer.transport.abort()  # the kernel has already accepted the connection
            return
        for each in (writer, back_writer):
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(_pump(reader, back_writer), _pump(back_reader, writer))
        for each in (writer, back_writer):
            each.close()

    async def _connect(self, place: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the next ready pod of a service. Raises OSError if there is none."""
        targets = self._ports.get(place)
        if not targets:
            raise ConnectionRefusedError(f"the service at {place} has no ready pod")
        address, _, port = targets[next(self._turn) % len(targets)].rpartition(":")
        async with asyncio.timeout(CONNECT_SECONDS):
            return await asyncio.open_connection(address, int(port))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy data until the reader's end of file. If either connection breaks, break the other one,
    too."""
    try:
        while data := await reader.read(PIECE):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.transport.abort()


async def run(address: str) -> None:
    loop, forwarder = asyncio.get_running_loop(), Forwarder()
    transport, _ = await loop.create_datagram_endpoint(
        lambda: NameServer(forwarder.resolve), local_addr=(address, DNS_PORT)
    )
    lines = asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    with suppress(asyncio.IncompleteReadError):
        while line := await lines.readline():
            await forwarder.set_table(json.loads(line))
            print("done", flush=True)
    transport.close()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
