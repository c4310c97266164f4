"""Client of a worker: through it, other workers import KV, routers forward requests to its server,
and administrative tools inspect, drain and convert the worker."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import grpc
import grpc.aio

from baton.core.credentials import ClusterCredentials
from baton.core.kv_transfer import KvTransferEvent, KvTransferOpen, WorkerInspection
from baton.core.server_api import ForwardedHead, ForwardRequest
from baton.core.states import Role
from baton.errors import Unavailable
from baton.rpc.channel import ChannelCache, GrpcCalls, call_member, translated_rpc_errors
from baton.rpc.convert.forwarding import forward_to_proto, forwarded_from_proto
from baton.rpc.convert.kv_transfer import (
    inspection_from_proto,
    transfer_event_from_proto,
    transfer_open_to_proto,
)
from baton.rpc.service import WORKER
from baton.rpc.v1 import worker_pb2 as pb


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
        self._channels = ChannelCache(trust)

    @asynccontextmanager
    async def open_kv_import(
        self, address: str, opening: KvTransferOpen
    ) -> AsyncIterator[KvImportStream]:
        call = GrpcCalls(await self._channels.get(address), WORKER).open_stream("Pull")
        try:
            with translated_rpc_errors():
                await call.write(pb.PullRequest(open=transfer_open_to_proto(opening)))
            yield GrpcKvImportStream(call)
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channels.close()


class ForwardClient:
    """Forwards requests to the servers of workers, with one channel per worker."""

    def __init__(self, trust: ClusterCredentials | str | None = None) -> None:
        self._channels = ChannelCache(trust)

    async def forward(
        self, address: str, request: ForwardRequest
    ) -> AsyncGenerator[ForwardedHead | bytes]:
        """Yield the head of the server's answer, then its body. Closing the generator cancels the
        request. Raises the worker's errors; Unavailable if it is lost."""
        call = GrpcCalls(await self._channels.get(address), WORKER).open_stream("Forward")
        is_first = True
        try:
            with translated_rpc_errors():
                for message in forward_to_proto(request):
                    await call.write(message)
                await call.done_writing()
                while (part := await call.read()) is not grpc.aio.EOF:
                    yield forwarded_from_proto(part, is_first=is_first)
                    is_first = False
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channels.close()


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
