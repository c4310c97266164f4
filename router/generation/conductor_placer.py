"""Placement by the conductors in the registry."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence

import grpc.aio

from baton.clock import Clock
from baton.core.credentials import ClusterCredentials, to_credentials
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery
from baton.core.states import Role
from baton.errors import BatonError, DeadlineExceeded, Invalid, Overloaded, Unavailable
from baton.rpc.channel import open_channel
from baton.rpc.conductor_client import request_placement
from baton.rpc.framed.conductor_service import CONDUCTOR_SERVICE
from baton.rpc.placement_stream import (
    FramedPlacementStream,
    GrpcPlacementStream,
    PlacementStream,
)
from router.generation.cluster import Cluster
from router.generation.unreachable_addresses import UnreachableAddresses

CONDUCTOR_TIMEOUT_SECONDS = 2.0
"""The timeout of a query. A placement takes microseconds to compute, so a conductor that takes
longer than this has failed."""

COOLDOWN_SECONDS = 2.0
"""A conductor that timed out is not queried for this long, so that requests don't wait for it one
after the other."""

REPLACED_STREAM_GRACE_SECONDS = 2 * CONDUCTOR_TIMEOUT_SECONDS
"""How long a replaced stream stays open, for the queries that are in flight on it."""

MAX_CHANNELS = 16


ChannelFactory = Callable[[str, ClusterCredentials], grpc.aio.Channel]


class ConductorPlacer:
    """Queries the ready conductors in turn until one answers. A hash of the request id determines
    which conductor is queried first; this spreads the load and sends a request's retries to the
    same conductor.

    While :meth:`run` runs, all queries to a conductor share one stream: a framed connection if the
    conductor offers one that can be opened, else a gRPC stream. While :meth:`run` does not run,
    each query is a separate gRPC call.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        credentials: ClusterCredentials | str | None,
        channel_factory: ChannelFactory = open_channel,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._credentials = to_credentials(credentials)
        self._channel_factory = channel_factory
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._streams: dict[str, PlacementStream] = {}
        self._stream_tasks: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._failed_at: dict[str, float] = {}
        self._unreachable_framed = UnreachableAddresses(CONDUCTOR_SERVICE, self._credentials)

    async def run(self) -> None:
        """Keep the streams to conductors open until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await asyncio.get_running_loop().create_future()

    async def place(self, query: PlacementQuery) -> Placement:
        """Return a conductor's placement. Conductors that recently did not answer in time are
        skipped. Raises Overloaded or Invalid if a conductor answers with that error, and
        Unavailable if no conductor returns a placement."""
        failure = "no conductor is ready"
        for conductor in _rotated_by_hash(
            self._cluster.ready_members(Role.CONDUCTOR), query.request_id
        ):
            if self._is_cooling_down(conductor.address):
                failure = f"{conductor.id}: it recently did not answer in time"
                continue
            try:
                return await self._query(conductor, query)
            except (Overloaded, Invalid):
                raise
            except BatonError as error:
                failure = f"{conductor.id}: {error}"
                if isinstance(error, DeadlineExceeded):
                    self._failed_at[conductor.address] = self._clock.monotonic()
        raise Unavailable(failure)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    def _is_cooling_down(self, address: str) -> bool:
        failed_at = self._failed_at.get(address)
        return failed_at is not None and self._clock.monotonic() < failed_at + COOLDOWN_SECONDS

    async def _query(self, conductor: Member, query: PlacementQuery) -> Placement:
        stream = await self._get_stream(conductor)
        return await request_placement(
            None if stream is not None else await self._get_channel(conductor.address),
            query,
            timeout_seconds=CONDUCTOR_TIMEOUT_SECONDS,
            stream=stream,
        )

    async def _get_stream(self, conductor: Member) -> PlacementStream | None:
        """Return the conductor's live stream, or open one. A gRPC stream is replaced with a framed
        connection as soon as one can be opened. While :meth:`run` does not run, no stream is
        opened, and the result may be None."""
        address, known = conductor.address, self._streams.get(conductor.address)
        is_best = isinstance(known, FramedPlacementStream) or not self._can_use_framed(conductor)
        if self._tasks is None or (known is not None and known.is_alive and is_best):
            return known
        stream = await self._new_stream(conductor)
        replaced = self._stream_tasks.get(address)
        if replaced is not None:
            asyncio.get_running_loop().call_later(REPLACED_STREAM_GRACE_SECONDS, replaced.cancel)
        self._streams[address] = stream
        self._stream_tasks[address] = self._tasks.create_task(self._run_stream(conductor, stream))
        return stream

    def _can_use_framed(self, conductor: Member) -> bool:
        return (
            bool(conductor.framed_address)
            and conductor.framed_address not in self._unreachable_framed
        )

    async def _run_stream(self, conductor: Member, stream: PlacementStream) -> None:
        await stream.run()
        if isinstance(stream, FramedPlacementStream) and not stream.was_connected:
            assert self._tasks is not None, "the stream's task runs in the task group"
            self._unreachable_framed.add(conductor.framed_address, self._tasks)

    async def _new_stream(self, conductor: Member) -> PlacementStream:
        for address in [
            address for address, stream in self._streams.items() if not stream.is_alive
        ]:
            del self._streams[address]
            self._stream_tasks.pop(address, None)
        if self._can_use_framed(conductor):
            return FramedPlacementStream(conductor.framed_address, self._credentials)
        return GrpcPlacementStream(await self._get_channel(conductor.address))

    async def _get_channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels and len(self._channels) >= MAX_CHANNELS:
            oldest = next(iter(self._channels))
            self._streams.pop(oldest, None)
            await self._channels.pop(oldest).close()
        if address not in self._channels:
            self._channels[address] = self._channel_factory(address, self._credentials)
        return self._channels[address]


def _rotated_by_hash(conductors: Sequence[Member], request_id: str) -> Sequence[Member]:
    if len(conductors) < 2:
        return conductors
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "big") % len(conductors)
    return [*conductors[start:], *conductors[:start]]
