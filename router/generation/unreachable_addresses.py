"""Lines that can't be opened: a firewall may let gRPC's port through and no other, or somebody
fills the port with connections. gRPC serves meanwhile."""

import asyncio

from baton.core.credentials import ClusterCredentials
from baton.errors import BatonError
from baton.rpc.framed.client import open_framed_connection

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0
"""Until a closed line is tried again, without requests; twice as long each time."""

MAX_PROBE_SECONDS = 600.0
"""Most lines that don't open for so long are those of workers that have gone."""

CONNECT_TIMEOUT_SECONDS = 2.0

MAX_UNREACHABLE = 4096


class UnreachableAddresses:
    """By address. Each is tried again until it opens; of too many the oldest are forgotten."""

    def __init__(self, service: str, trust: ClusterCredentials) -> None:
        self._service = service
        self._trust = trust
        self._tries: dict[str, asyncio.Task[None]] = {}

    def add(self, address: str, tasks: asyncio.TaskGroup) -> None:
        if address in self._tries:
            return
        if len(self._tries) >= MAX_UNREACHABLE:
            self._tries.pop(next(iter(self._tries))).cancel()
        self._tries[address] = tasks.create_task(self._until_open(address))

    def __contains__(self, address: str) -> bool:
        return address in self._tries

    async def _until_open(self, address: str) -> None:
        pause = waited = FIRST_SECONDS
        try:
            await asyncio.sleep(pause)
            while waited < MAX_PROBE_SECONDS and not await self._opens(address):
                pause = min(2 * pause, LONGEST_SECONDS)
                await asyncio.sleep(pause)
                waited += pause
        finally:
            if self._tries.get(address) is asyncio.current_task():
                del self._tries[address]

    async def _opens(self, address: str) -> bool:
        try:
            line = await open_framed_connection(
                address, self._service, self._trust, lambda payload: None, CONNECT_TIMEOUT_SECONDS
            )
        except BatonError:
            return False
        line.close()
        return True
