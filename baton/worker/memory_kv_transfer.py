"""The in-memory twin of pulls over gRPC: readers call the source's worker directly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from baton.core.kv_transfer import KvTransferEvent, KvTransferOpen
from baton.errors import Unavailable
from baton.rpc.worker_client import KvImportStream
from baton.rpc.worker_service import KvExportStream, WorkerCore


class MemoryKvImportStream:
    def __init__(self, lease: KvExportStream, events: AsyncIterator[KvTransferEvent]) -> None:
        self._lease = lease
        self._events = events

    async def next_event(self) -> KvTransferEvent:
        try:
            return await anext(self._events)
        except StopAsyncIteration as error:
            raise Unavailable("the prefill worker ended the hand-off early") from error

    async def acknowledge(self, num_blocks: int) -> None:
        self._lease.acknowledge(num_blocks)

    async def ended(self) -> None:
        """Never by itself: whoever is taken out of :class:`MemoryKvTransferClient` ends its
        leases."""
        await asyncio.get_running_loop().create_future()


class MemoryKvTransferClient:
    """Workers of one process by address. Remove one, and it is as good as dead."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerCore] = {}

    @asynccontextmanager
    async def pull(self, address: str, opening: KvTransferOpen) -> AsyncIterator[KvImportStream]:
        source = self.workers.get(address)
        if source is None:
            raise Unavailable(f"no worker at {address}")
        lease = await source.open_pull(opening)
        try:
            async with aclosing(lease.events()) as events:
                yield MemoryKvImportStream(lease, events)
        finally:
            lease.close()
