"""An in-memory implementation of KV transfers without gRPC, in which the importing worker calls the
source worker directly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from baton.core.kv_transfer import KvTransferEvent, KvTransferOpen
from baton.errors import Unavailable
from baton.rpc.worker_client import KvImportStream
from baton.rpc.worker_service import KvExportStream, WorkerCore


class MemoryKvImportStream:
    def __init__(self, stream: KvExportStream, events: AsyncIterator[KvTransferEvent]) -> None:
        self._export_stream = stream
        self._events = events

    async def next_event(self) -> KvTransferEvent:
        try:
            return await anext(self._events)
        except StopAsyncIteration as error:
            raise Unavailable("the prefill worker ended the KV transfer early") from error

    async def acknowledge(self, num_blocks: int) -> None:
        self._export_stream.acknowledge(num_blocks)

    async def ended(self) -> None:
        """Wait forever: in this implementation, only :meth:`next_event` notices that the source has
        ended the stream. So to end the transfers of a worker that is removed from
        :class:`MemoryKvTransferClient`, its exports must be closed, too."""
        await asyncio.get_running_loop().create_future()


class MemoryKvTransferClient:
    """Connects the workers in one process. ``workers`` are keyed by address; after a worker has
    been removed, no transfer from it can be opened any more, as if it had crashed."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerCore] = {}

    @asynccontextmanager
    async def open_kv_import(
        self, address: str, opening: KvTransferOpen
    ) -> AsyncIterator[KvImportStream]:
        source = self.workers.get(address)
        if source is None:
            raise Unavailable(f"no worker at {address}")
        stream = await source.open_kv_export(opening)
        try:
            async with aclosing(stream.events()) as events:
                yield MemoryKvImportStream(stream, events)
        finally:
            stream.close()
