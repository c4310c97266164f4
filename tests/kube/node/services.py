"""Keeps the forwarder's routing table up to date with the API server, like kube-proxy."""

import asyncio
import json
import sys
from contextlib import suppress

from tests.kube.api import Api
from tests.kube.node.images import REPOSITORY
from tests.kube.node.network import Network
from tests.kube.node.routes import Table, routes
from tests.kube.node.sandbox import DIE_WITH_US


class Services:
    """Runs the process :mod:`tests.kube.node.forwarder`, which forwards connections to services and
    answers DNS queries for them, and sends it the current routes. Call ``update`` after services or
    pods have changed, and ``stop`` at the end."""

    def __init__(self, api: Api, network: Network) -> None:
        self._api = api
        self._network = network
        self._table: Table = {}
        self._addresses: set[str] = set()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        module = ["-m", "tests.kube.node.forwarder", self._network.gateway]
        self._process = await asyncio.create_subprocess_exec(
            *DIE_WITH_US, sys.executable, *module, cwd=REPOSITORY,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        await self.update()

    async def update(self) -> None:
        """Update the forwarder's table, and wait until it is in effect. Raises RuntimeError if the
        forwarder has exited."""
        table = routes(self._api, self._network.gateway)
        if table == self._table:
            return
        wanted = {place.rpartition(":")[0] for place in table["ports"]}
        for address in wanted - self._addresses:
            await asyncio.to_thread(self._network.add_address, address)
        await self._tell(table)
        for address in self._addresses - wanted:
            with suppress(RuntimeError):
                await asyncio.to_thread(self._network.drop_address, address)
        self._addresses, self._table = wanted, table

    async def _tell(self, table: Table) -> None:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(table).encode() + b"\n")
        await process.stdin.drain()
        if await process.stdout.readline() != b"done\n":
            raise RuntimeError("the forwarder has exited")

    async def stop(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
