"""A worker connection over gRPC, for workers that offer no framed connection."""

import asyncio
import re
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from baton.core.credentials import ClusterCredentials
from baton.core.kv_transfer import WorkerRef
from baton.errors import BatonError, Unavailable, Unresponsive
from baton.rpc.channel import open_channel
from baton.rpc.worker_stream import RouterMessage, run_worker_stream
from router.generation.worker_connection import (
    CONNECT_TIMEOUT_SECONDS,
    MAX_UNSENT_MESSAGES,
    StreamWorkerConnection,
)

_SILENCE = re.compile(r"keep-?alive|ping", re.IGNORECASE)
"""Matches gRPC's errors for a peer that does not answer keepalive pings."""


class GrpcWorkerConnection(StreamWorkerConnection):
    def __init__(self, worker: WorkerRef, trust: ClusterCredentials) -> None:
        super().__init__(worker, trust)
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue(MAX_UNSENT_MESSAGES)

    async def serve(self) -> BatonError:
        async with open_channel(self._worker.address, self._credentials) as channel:
            await _connected(channel)
            self.was_connected = True
            try:
                await run_worker_stream(channel, self._messages(), self.deliver)
            except Unavailable as error:
                raise Unresponsive(str(error)) if _SILENCE.search(str(error)) else error from error
        return Unavailable("the stream ended")

    def send(self, message: bytes) -> None:
        try:
            self._unsent.put_nowait(message)
        except asyncio.QueueFull:
            self.break_connection("the worker does not read from the connection")

    async def _messages(self) -> AsyncIterator[RouterMessage]:
        while True:
            yield RouterMessage.FromString(await self._unsent.get())


async def _connected(channel: grpc.aio.Channel) -> None:
    """Wait until ``channel`` is connected. Raises Unavailable at the first failure, or after
    ``CONNECT_TIMEOUT_SECONDS``; gRPC's own ``channel_ready`` would keep trying."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    raise Unavailable("the worker does not accept connections")
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError as error:
        raise Unavailable(
            f"could not connect to the worker within {CONNECT_TIMEOUT_SECONDS:g} s"
        ) from error
