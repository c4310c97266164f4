"""Addresses of framed connections that can't be reached: a firewall may only let the gRPC port
through, or a port may have too many connections. While an address can't be reached, gRPC is used
instead."""

import asyncio

from baton.core.credentials import ClusterCredentials
from baton.errors import BatonError
from baton.rpc.framed.client import open_framed_connection

INITIAL_PROBE_SECONDS, MAX_PROBE_INTERVAL_SECONDS = 1.0, 60.0
"""The first and the longest pause between two probes of an unreachable address. The pause doubles
each time; no request waits for a probe."""

MAX_PROBE_SECONDS = 600.0
"""How long an address is probed. If it is still unreachable then, the process behind it is most
likely gone."""

CONNECT_TIMEOUT_SECONDS = 2.0

MAX_UNREACHABLE = 4096


class UnreachableAddresses:
    """A set of unreachable addresses. Each address is probed, and leaves the set once a connection
    can be opened, or after :data:`MAX_PROBE_SECONDS`. If there are too many addresses, the oldest
    is dropped."""

    def __init__(self, service: str, trust: ClusterCredentials) -> None:
        self._service = service
        self._credentials = trust
        self._probes: dict[str, asyncio.Task[None]] = {}

    def add(self, address: str, tasks: asyncio.TaskGroup) -> None:
        if address in self._probes:
            return
        if len(self._probes) >= MAX_UNREACHABLE:
            self._probes.pop(next(iter(self._probes))).cancel()
        self._probes[address] = tasks.create_task(self._probe_until_reachable(address))

    def __contains__(self, address: str) -> bool:
        return address in self._probes

    async def _probe_until_reachable(self, address: str) -> None:
        pause = probed_seconds = INITIAL_PROBE_SECONDS
        try:
            await asyncio.sleep(pause)
            while probed_seconds < MAX_PROBE_SECONDS and not await self._can_connect(address):
                pause = min(2 * pause, MAX_PROBE_INTERVAL_SECONDS)
                await asyncio.sleep(pause)
                probed_seconds += pause
        finally:
            if self._probes.get(address) is asyncio.current_task():
                del self._probes[address]

    async def _can_connect(self, address: str) -> bool:
        try:
            connection = await open_framed_connection(
                address,
                self._service,
                self._credentials,
                lambda payload: None,
                CONNECT_TIMEOUT_SECONDS,
            )
        except BatonError:
            return False
        connection.close()
        return True
