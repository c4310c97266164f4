"""Placement by the conductors that the registry knows."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence

import grpc.aio

from baton.clock import Clock
from baton.core.credentials import ClusterCredentials, as_credentials
from baton.core.member import Member
from baton.core.placement import Placement
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
from router.generation.placement import PlacementQuery
from router.generation.unreachable_addresses import UnreachableAddresses

CONDUCTOR_TIMEOUT_SECONDS = 2.0
"""A placement is microseconds of work; a conductor that takes longer is not answering."""

COOLDOWN_SECONDS = 2.0
"""A silent conductor is not asked for this long, so that requests don't queue behind it."""

REPLACED_STREAM_GRACE_SECONDS = 2 * CONDUCTOR_TIMEOUT_SECONDS
"""For what was asked over a stream that another has replaced."""

MAX_CHANNELS = 16


Connect = Callable[[str, ClusterCredentials], grpc.aio.Channel]


class ConductorPlacer:
    """Asks the ready conductors, from the one that the request's hash says on, until one answers:
    several share the work, and a retry asks the same one first. While :meth:`run` runs, all
    questions to a conductor share a stream: a line, if it has one which opens, else gRPC's."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        trust: ClusterCredentials | str | None,
        connect: Connect = open_channel,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._trust = as_credentials(trust)
        self._connect = connect
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._streams: dict[str, PlacementStream] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._failed_at: dict[str, float] = {}
        self._closed_lines = UnreachableAddresses(CONDUCTOR_SERVICE, self._trust)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await asyncio.get_running_loop().create_future()

    async def place(self, query: PlacementQuery) -> Placement:
        """Raises Overloaded or Invalid as a conductor says, Unavailable when none answers."""
        failure = "no conductor is ready"
        for conductor in _rotated_by_hash(self._cluster.ready(Role.CONDUCTOR), query.request_id):
            if self._cools_down(conductor.address):
                continue
            try:
                return await self._ask(conductor, query)
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

    def _cools_down(self, address: str) -> bool:
        failed_at = self._failed_at.get(address)
        return failed_at is not None and self._clock.monotonic() < failed_at + COOLDOWN_SECONDS

    async def _ask(self, conductor: Member, query: PlacementQuery) -> Placement:
        stream = await self._stream(conductor)
        return await request_placement(
            None if stream is not None else await self._channel(conductor.address),
            stream=stream,
            request_id=query.request_id,
            epoch=query.epoch,
            tenant=query.tenant,
            num_tokens=query.num_tokens,
            max_new_tokens=query.max_new_tokens,
            block_keys=query.block_keys,
            excluded=query.excluded,
            model=query.model,
            timeout_seconds=CONDUCTOR_TIMEOUT_SECONDS,
            trace=query.trace,
            session=query.session,
        )

    async def _stream(self, conductor: Member) -> PlacementStream | None:
        """The living one, or a new one. A line takes the place of a stream over gRPC as soon as it
        can be opened."""
        address, known = conductor.address, self._streams.get(conductor.address)
        is_best = isinstance(known, FramedPlacementStream) or not self._has_line(conductor)
        if self._tasks is None or (known is not None and known.alive and is_best):
            return known
        stream = await self._new_stream(conductor)
        replaced = self._runs.get(address)
        if replaced is not None:
            asyncio.get_running_loop().call_later(REPLACED_STREAM_GRACE_SECONDS, replaced.cancel)
        self._streams[address] = stream
        self._runs[address] = self._tasks.create_task(self._run(conductor, stream))
        return stream

    def _has_line(self, conductor: Member) -> bool:
        return bool(conductor.line) and conductor.line not in self._closed_lines

    async def _run(self, conductor: Member, stream: PlacementStream) -> None:
        await stream.run()
        if isinstance(stream, FramedPlacementStream) and not stream.reached:
            assert self._tasks is not None, "it runs there"
            self._closed_lines.add(conductor.line, self._tasks)

    async def _new_stream(self, conductor: Member) -> PlacementStream:
        for address in [each for each, stream in self._streams.items() if not stream.alive]:
            del self._streams[address]
            self._runs.pop(address, None)
        if self._has_line(conductor):
            return FramedPlacementStream(conductor.line, self._trust)
        return GrpcPlacementStream(await self._channel(conductor.address))

    async def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels and len(self._channels) >= MAX_CHANNELS:
            oldest = next(iter(self._channels))
            self._streams.pop(oldest, None)
            await self._channels.pop(oldest).close()
        if address not in self._channels:
            self._channels[address] = self._connect(address, self._trust)
        return self._channels[address]


def _rotated_by_hash(conductors: Sequence[Member], request_id: str) -> Sequence[Member]:
    if len(conductors) < 2:
        return conductors
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "big") % len(conductors)
    return [*conductors[start:], *conductors[:start]]
