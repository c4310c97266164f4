"""Replaces the gRPC streams between routers, workers and conductors by streams over the simulated
network. Routers use these only for members without framed connections."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from baton.core.kv_transfer import KvTransferEvent, KvTransferOpen
from baton.core.request import RequestOutput
from baton.errors import BatonError, Unavailable
from baton.rpc.placement_stream import PlacementStream
from baton.rpc.worker_client import KvImportStream
from baton.rpc.worker_service import dispatch_message
from baton.rpc.worker_stream import RouterMessage
from baton.worker.output_stream import OutputStream
from baton.worker.worker import Worker
from router.generation.worker_connection import CONNECT_TIMEOUT_SECONDS
from tests.sim.whole.network import StreamEnd
from tests.sim.whole.process import PROCESS, Process

# -- the worker as a server --------------------------------------------------------------------


class WorkerServer:
    """Serves a worker's streams. For a router, it passes the router's messages to an output stream
    of the worker, and sends the outputs back. For a worker that imports KV, it sends the events of
    a KV export."""

    def __init__(self, process: Process, worker: Worker) -> None:
        self._process = process
        self._worker = worker

    def accept(self, kind: str, opening: Any, end: StreamEnd) -> None:
        if kind == "run":
            stream = self._worker.open_stream()
            end.on_message = lambda message: dispatch_message(stream, message)
            task = self._process.start_task(self._run(end, stream))
        else:
            task = self._process.start_task(self._pull(end, opening))
        end.on_break = task.cancel

    async def _run(self, end: StreamEnd, stream: OutputStream) -> None:
        failure: BatonError | None = None
        try:
            while True:
                end.send(await stream.next_outputs())
        except BatonError as error:
            failure = error
        finally:
            stream.close()
            end.on_break = None
            end.close(failure)

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


# -- the router ----------------------------------------------------------------------------------


class SimChannel:
    """Takes the place of a gRPC channel, both in ``router.generation.grpc_worker_connection`` and
    as the argument of :class:`SimPlacementStream`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.end: StreamEnd | None = None

    async def close(self) -> None:
        if self.end is not None:
            self.end.close()


@asynccontextmanager
async def open_channel(address: str, trust: object = None) -> AsyncIterator[SimChannel]:
    channel = SimChannel(address)
    try:
        yield channel
    finally:
        await channel.close()


async def connected(channel: SimChannel) -> None:
    """Open the stream to a worker, and wait until the worker accepts the stream. Raises Unavailable
    after CONNECT_TIMEOUT_SECONDS."""
    process = PROCESS.get()
    channel.end = process.network.open(process, channel.address, "run")
    assert channel.end.connected is not None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
            await channel.end.connected
    except TimeoutError as error:
        raise Unavailable(
            f"could not connect to the worker within {CONNECT_TIMEOUT_SECONDS:g} s"
        ) from error


async def converse(
    channel: SimChannel,
    messages: AsyncIterator[RouterMessage],
    deliver: Callable[[Sequence[RequestOutput]], None],
) -> None:
    """Send ``messages`` to the worker, and pass its outputs to ``deliver`` until the stream breaks.
    Then raise the error that ended the stream. A cancel message is sometimes sent twice."""
    end = channel.end
    assert end is not None

    async def send() -> None:
        async for message in messages:
            end.send(message)
            if message.HasField("cancel") and end.network.chance.happens(0.1):
                end.send(message)

    sending = asyncio.get_running_loop().create_task(send())
    try:
        while True:
            deliver(await end.get())
    finally:
        sending.cancel()


class SimPlacementStream(PlacementStream):
    """Replaces ``baton.rpc.placement_stream.GrpcPlacementStream``."""

    def __init__(self, channel: SimChannel) -> None:
        super().__init__()
        self._address = channel.address
        self._stream: StreamEnd | None = None

    async def exchange(self) -> None:
        process = PROCESS.get()
        self._stream = end = process.network.open(process, self._address, "place")
        self.notify_unsent()
        try:
            while True:
                self.deliver_answers(await end.get())
        finally:
            end.close()

    def notify_unsent(self) -> None:
        while self._stream is not None and self.has_unsent:
            self._stream.send(self.next_batch())
