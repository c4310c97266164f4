"""Client of a worker: pulls of other workers, and administration."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import grpc
import grpc.aio

from baton.core.handoff import Inspection, PullEvent, PullOpen
from baton.core.states import Role
from baton.core.trust import Trust
from baton.errors import Unavailable
from baton.rpc.channel import open_channel, translated
from baton.rpc.handoff_convert import event_from_proto, inspection_from_proto, open_to_proto
from baton.rpc.v1 import worker_pb2 as pb
from baton.rpc.v1 import worker_pb2_grpc as pb_grpc

_ROLES = {Role.PREFILL: pb.WORKER_ROLE_PREFILL, Role.DECODE: pb.WORKER_ROLE_DECODE}

MAX_CHANNELS = 1024
"""Peers of one worker; beyond, the channel that was used longest ago is closed."""


class PullReader(Protocol):
    """The reader's side of one hand-off."""

    async def next_event(self) -> PullEvent:
        """Raises Unavailable when the source ended the stream without PullDone."""
        ...

    async def acknowledge(self, num_blocks: int) -> None: ...

    async def ended(self) -> None:
        """Returns once the source's stream is over, whatever is left to be read of it."""
        ...


class PullPeers(Protocol):
    """Where readers come from: gRPC, or a twin in memory."""

    def pull(self, address: str, opening: PullOpen) -> AbstractAsyncContextManager[PullReader]:
        """Leaving the context ends the stream, and with it the source's lease."""
        ...


class GrpcPullReader:
    def __init__(self, call: grpc.aio.StreamStreamCall[pb.PullRequest, pb.PullEvent]) -> None:
        self._call = call

    async def next_event(self) -> PullEvent:
        with translated():
            event = await self._call.read()
        if not isinstance(event, pb.PullEvent):
            raise Unavailable("the prefill worker ended the hand-off early")
        return event_from_proto(event)

    async def acknowledge(self, num_blocks: int) -> None:
        with translated():
            await self._call.write(pb.PullRequest(ack=pb.PullAck(num_blocks=num_blocks)))

    async def ended(self) -> None:
        await self._call.code()


class GrpcPullPeers:
    """Keeps one channel per peer address."""

    def __init__(self, trust: Trust | str | None = None) -> None:
        self._trust = trust
        self._channels: dict[str, grpc.aio.Channel] = {}

    @asynccontextmanager
    async def pull(self, address: str, opening: PullOpen) -> AsyncIterator[PullReader]:
        call = pb_grpc.WorkerStub(await self._channel(address)).Pull()
        try:
            with translated():
                await call.write(pb.PullRequest(open=open_to_proto(opening)))
            yield GrpcPullReader(call)
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
    address: str, trust: Trust | str | None = None, timeout_seconds: float = 5.0
) -> Inspection:
    async with open_channel(address, trust) as channel:
        with translated():
            stub = pb_grpc.WorkerStub(channel)
            return inspection_from_proto(
                await stub.Inspect(pb.InspectRequest(), timeout=timeout_seconds)
            )


async def drain_worker(
    address: str, trust: Trust | str | None = None, timeout_seconds: float = 5.0
) -> None:
    async with open_channel(address, trust) as channel:
        with translated():
            await pb_grpc.WorkerStub(channel).Drain(pb.DrainRequest(), timeout=timeout_seconds)


async def convert_worker(
    address: str, role: Role, trust: Trust | str | None = None, timeout_seconds: float = 5.0
) -> None:
    request = pb.ConvertRequest(role=_ROLES.get(role, pb.WORKER_ROLE_UNSPECIFIED))
    async with open_channel(address, trust) as channel:
        with translated():
            await pb_grpc.WorkerStub(channel).Convert(request, timeout=timeout_seconds)
