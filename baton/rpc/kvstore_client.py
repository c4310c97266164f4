"""Client of one store node: over its local door where there is one, else over gRPC."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.protobuf.message import Message

from baton.core.handoff import Endpoint
from baton.core.ids import BlockKey, Generation
from baton.core.store import (
    BlockFilter,
    LeasedBlocks,
    LeaseQuery,
    PutRequest,
    PutResult,
    StoredBlock,
    StoreStats,
    WatchPage,
)
from baton.core.trust import Trust
from baton.errors import Unavailable
from baton.rpc.channel import open_channel, translated
from baton.rpc.convert import endpoint_from_proto
from baton.rpc.door import Door
from baton.rpc.kvstore_calls import STATS_FIELDS
from baton.rpc.kvstore_convert import (
    filter_to_proto,
    keys_to_bytes,
    leased_from_proto,
    page_from_proto,
    put_to_proto,
    stored_from_proto,
)
from baton.rpc.v1 import kvstore_pb2 as pb
from baton.rpc.v1 import kvstore_pb2_grpc as pb_grpc

OPERATOR_SECONDS = 10.0
"""For what no request waits for."""


class KvStoreClient:
    """Methods raise Unavailable, DeadlineExceeded, and what the node says. ``call_seconds``
    bounds what a request waits for."""

    def __init__(
        self, address: str, trust: Trust | str | None, door: str = "", call_seconds: float = 2.0
    ) -> None:
        self._channel = open_channel(address, trust)
        self._stub = pb_grpc.KvStoreStub(self._channel)
        self._door_path = door
        self._door: Door | None = None
        self._call_seconds = call_seconds

    async def open(self, transports: Sequence[str], host: str) -> Endpoint:
        answer: pb.OpenResponse = await self._call(
            pb.OpenRequest(transports=transports, host=host), self._stub.Open
        )
        return endpoint_from_proto(answer.endpoint)

    async def put(self, request: PutRequest, timeout_seconds: float | None = None) -> PutResult:
        answer: pb.PutResponse = await self._call(
            put_to_proto(request), self._stub.Put, timeout_seconds
        )
        return PutResult(answer.stored, answer.already_present)

    async def lease(self, query: LeaseQuery) -> LeasedBlocks:
        request = pb.LeaseRequest(
            keys=keys_to_bytes(query.keys), lease_seconds=query.seconds, max_bytes=query.max_bytes
        )
        answer: pb.LeaseResponse = await self._call(request, self._stub.Lease)
        return leased_from_proto(answer)

    async def release(self, lease_id: str) -> None:
        """Over the door, nobody waits for the answer."""
        request = pb.ReleaseRequest(lease_id=lease_id)
        door = await self._open_door()
        if door is not None:
            door.tell(request)
        else:
            await self._call(request, self._stub.Release)

    async def report(self, keys: Sequence[BlockKey]) -> int:
        request = pb.ReportRequest(keys=keys_to_bytes(keys))
        answer: pb.ReportResponse = await self._call(request, self._stub.Report)
        return answer.dropped

    async def pin(self, keys: Sequence[BlockKey], seconds: float) -> int:
        request = pb.PinRequest(keys=keys_to_bytes(keys), seconds=seconds)
        answer: pb.PinResponse = await self._call(request, self._stub.Pin)
        return answer.pinned

    async def watch(self, generation: Generation, number: int) -> AsyncIterator[WatchPage]:
        """Until the node goes: then it raises Unavailable."""
        request = pb.WatchRequest(generation=generation, number=number)
        with translated():
            async for event in self._stub.Watch(request):
                yield page_from_proto(event)
        raise Unavailable("the store node ended the watch")

    async def list_blocks(
        self, filter_: BlockFilter, skip: int, limit: int
    ) -> tuple[list[StoredBlock], int]:
        request = pb.ListRequest(filter=filter_to_proto(filter_), skip=skip, limit=limit)
        with translated():
            answer = await self._stub.List(request, timeout=OPERATOR_SECONDS)
        return [stored_from_proto(block) for block in answer.blocks], answer.total

    async def purge(self, filter_: BlockFilter) -> int:
        request = pb.PurgeRequest(filter=filter_to_proto(filter_))
        with translated():
            answer = await self._stub.Purge(request, timeout=OPERATOR_SECONDS)
        return int(answer.purged)

    async def stat(self) -> StoreStats:
        with translated():
            answer = await self._stub.Stat(pb.StatRequest(), timeout=OPERATOR_SECONDS)
        return StoreStats(**{name: getattr(answer, name) for name in STATS_FIELDS})

    async def close(self) -> None:
        if self._door is not None:
            self._door.close()
        await self._channel.close()

    async def _call(
        self, request: Message, over_grpc: Any, timeout_seconds: float | None = None
    ) -> Any:
        seconds = timeout_seconds or self._call_seconds
        door = await self._open_door()
        if door is not None:
            return await door.call(request, seconds)
        with translated():
            return await over_grpc(request, timeout=seconds)

    async def _open_door(self) -> Door | None:
        """A door that doesn't open (another container, say) is not tried again."""
        if self._door is None and self._door_path:
            try:
                self._door = await Door.connect(self._door_path)
            except Unavailable:
                self._door_path = ""
        return self._door


async def stat_store(address: str, trust: Trust | str | None = None) -> StoreStats:
    client = KvStoreClient(address, trust)
    try:
        return await client.stat()
    finally:
        await client.close()
