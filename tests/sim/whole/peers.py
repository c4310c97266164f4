"""Replaces the gRPC streams of KV transfers by streams over the simulated network."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from baton.core.kv_transfer import KvTransferEvent, KvTransferOpen
from baton.errors import BatonError
from baton.rpc.worker_client import KvImportStream
from baton.worker.worker import Worker
from tests.sim.whole.network import StreamEnd
from tests.sim.whole.process import Process

# -- the worker as a server --------------------------------------------------------------------


class WorkerServer:
    """Sends the events of a KV export to the worker that imports it."""

    def __init__(self, process: Process, worker: Worker) -> None:
        self._process = process
        self._worker = worker

    def accept(self, kind: str, opening: Any, end: StreamEnd) -> None:
        assert kind == "pull"
        end.on_break = self._process.start_task(self._pull(end, opening)).cancel

    async def _pull(self, end: StreamEnd, opening: KvTransferOpen) -> None:
        failure: BatonError | None = None
        try:
            lease = await self._worker.open_kv_export(opening)
        except BatonError as error:
            end.on_break = None
            end.close(error)
            return
        end.on_message = lease.acknowledge
        try:
            async for event in lease.events():
                end.send(event)
        except BatonError as error:
            failure = error
        finally:
            lease.close()
            end.on_break = None
            end.close(failure)


# -- the worker that imports KV ----------------------------------------------------------------


class SimReader:
    def __init__(self, end: StreamEnd) -> None:
        self._stream = end

    async def next_event(self) -> KvTransferEvent:
        event: KvTransferEvent = await self._stream.get()
        return event

    async def acknowledge(self, num_blocks: int) -> None:
        if self._stream.failure is not None:
            raise self._stream.failure
        self._stream.send(num_blocks)
        if self._stream.network.chance.happens(0.05):
            self._stream.send(num_blocks)

    async def ended(self) -> None:
        await self._stream.wait_until_over()


class SimPeers:
    """Implements :class:`baton.rpc.worker_client.KvImportConnector`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @asynccontextmanager
    async def open_kv_import(
        self, address: str, opening: KvTransferOpen
    ) -> AsyncIterator[KvImportStream]:
        end = self._process.network.open(self._process, address, "pull", opening)
        try:
            yield SimReader(end)
        finally:
            end.close()
