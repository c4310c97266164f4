"""Client of a worker: through it, other workers import KV, and administrative tools inspect, drain
and convert the worker."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import grpc
import grpc.aio

from baton.core.credentials import ClusterCredentials
from baton.core.kv_transfer import KvTransferEvent, KvTransferOpen, WorkerInspection
from baton.core.states import Role
from baton.errors import Unavailable
from baton.rpc.channel import GrpcCalls, call_member, open_channel, translated_rpc_errors
from baton.rpc.convert.kv_transfer import (
    inspection_from_proto,
    transfer_event_from_proto,
    transfer_open_to_proto,
)
from baton.rpc.service import WORKER
from baton.rpc.v1 import worker_pb2 as pb

MAX_CHANNELS = 1024
"""Maximum number of open channels to peers; beyond this, the least recently used one is closed."""


class KvImportStream(Protocol):
    """The reader's side of one KV transfer."""

    async def next_event(self) -> KvTransferEvent:
        """Wait for the next event. Raises Unavailable when the source ends the stream without
        having sent KvTransferDone."""
        ...

    async def acknowledge(self, num_blocks: int) -> None: ...

    async def ended(self) -> None:
        """Wait until the source has ended the stream. :meth:`next_event` may still have events to
        return then."""
        ...


class KvImportConnector(Protocol):
    """Opens the reader's side of KV transfers, over gRPC or in memory."""

    def open_kv_import(
        self, address: str, opening: KvTransferOpen
    ) -> AbstractAsyncContextManager[KvImportStream]:
        """Open a stream. Leaving the context ends the stream, and thereby the source's export."""
        ...


class GrpcKvImportStream:
    def __init__(self, call: grpc.aio.StreamStreamCall[pb.PullRequest, pb.PullEvent]) -> None:
        self._call = call

    async def next_event(self) -> KvTransferEvent:
        with translated_rpc_errors():
            event = await self._call.read()
        if not isinstance(event, pb.PullEvent):
            raise Unavailable("the prefill worker ended the KV transfer early")
        return transfer_event_from_proto(event)

    async def acknowledge(self, num_blocks: int) -> None:
        with translated_rpc_errors():
            await self._call.write(pb.PullRequest(ack=pb.PullAck(num_blocks=num_blocks)))

    async def ended(self) -> None:
        await self._call.code()


class GrpcKvImportConnector:
    """Opens KV transfers over gRPC, with one channel per peer address."""

    def __init__(self, trust: ClusterCredentials | str | None = None) -> None:
        self._trust = trust
        self._channels: dict[str, grpc.aio.Channel] = {}

    @asynccontextmanager
    async def open_kv_import(
        self, address: str, opening: KvTransferOpen
    ) -> AsyncIterator[KvImportStream]:
        call = GrpcCalls(await self._channel(address), WORKER).open_stream("Pull")
        try:
            with translated_rpc_errors():
                await call.write(pb.PullRequest(open=transfer_open_to_proto(opening)))
            yield GrpcKvImportStream(call)
        finally:
            call.cancel()

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.pop(address, None) or open_channel(address, self._trust)
        self._channels[address] = channel
        if len(self._channels) > MAX_CHANNELS:
            oldest = next(iter(self._channels))
            await self._channels.pop(oldest).close()
        return channel


async def inspect_worker(
    address: str, trust: ClusterCredentials | str | None = None, timeout_seconds: float = 5.0
) -> WorkerInspection:
    request = pb.InspectRequest()
    return inspection_from_proto(
        await call_member(address, trust, WORKER, "Inspect", request, timeout_seconds)
    )


async def drain_worker(
    address: str, trust: ClusterCredentials | str | None = None, timeout_seconds: float = 5.0
) -> None:
    await call_member(address, trust, WORKER, "Drain", pb.DrainRequest(), timeout_seconds)


async def convert_worker(
    address: str,
    role: Role,
    trust: ClusterCredentials | str | None = None,
    timeout_seconds: float = 5.0,
) -> None:
    name = f"WORKER_ROLE_{role.name}"
    known = name in dict(pb.WorkerRole.items())
    request = pb.ConvertRequest(role=name if known else pb.WORKER_ROLE_UNSPECIFIED)
    await call_member(address, trust, WORKER, "Convert", request, timeout_seconds)
