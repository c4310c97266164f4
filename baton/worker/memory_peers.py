"""The in-memory twin of pulls over gRPC: readers call the source's worker directly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from baton.core.handoff import PullEvent, PullOpen
from baton.errors import Unavailable
from baton.rpc.worker_client import PullReader
from baton.rpc.worker_service import PullLease, WorkerCore


class MemoryReader:
    def __init__(self, lease: PullLease, events: AsyncIterator[PullEvent]) -> None:
        self._lease = lease
        self._events = events

    async def next_event(self) -> PullEvent:
        try:
            return await anext(self._events)
        except StopAsyncIteration as error:
            raise Unavailable("the prefill worker ended the hand-off early") from error

    async def acknowledge(self, num_blocks: int) -> None:
        self._lease.acknowledge(num_blocks)

    async def ended(self) -> None:
        """Never by itself: whoever is taken out of :class:`MemoryPeers` ends its leases."""
        await asyncio.get_running_loop().create_future()


class MemoryPeers:
    """Workers of one process by address. Remove one, and it is as good as dead."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerCore] = {}

    @asynccontextmanager
    async def pull(self, address: str, opening: PullOpen) -> AsyncIterator[PullReader]:
        source = self.workers.get(address)
        if source is None:
            raise Unavailable(f"no worker at {address}")
        lease = await source.open_pull(opening)
        try:
            async with aclosing(lease.events()) as events:
                yield MemoryReader(lease, events)
        finally:
            lease.close()
