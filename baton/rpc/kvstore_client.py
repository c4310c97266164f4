"""Client of one store node, over its local RPC socket if it is on the same host, else over gRPC."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.protobuf.message import Message

from baton.core.credentials import ClusterCredentials
from baton.core.ids import BlockKey, Incarnation
from baton.core.kv_transfer import Endpoint
from baton.core.store import (
    BlockFilter,
    LeasedBlocks,
    LeaseRequest,
    PutRequest,
    PutResult,
    StoredBlock,
    StoreStats,
    WatchEvent,
)
from baton.errors import Unavailable
from baton.rpc.channel import open_channel, translated_rpc_errors
from baton.rpc.convert.common import endpoint_from_proto
from baton.rpc.convert.kvstore import (
    filter_to_proto,
    keys_to_bytes,
    lease_query_to_proto,
    leased_from_proto,
    put_to_proto,
    stored_from_proto,
    watch_event_from_proto,
)
from baton.rpc.kvstore_methods import STATS_FIELDS
from baton.rpc.local_rpc import LocalRpcClient
from baton.rpc.v1 import kvstore_pb2 as pb
from baton.rpc.v1 import kvstore_pb2_grpc as pb_grpc

OPERATOR_TIMEOUT_SECONDS = 10.0
"""Timeout of calls that no request waits for."""


class KvStoreClient:
    """Calls one store node. Methods raise Unavailable, DeadlineExceeded, and the node's errors.
    ``call_seconds`` is the timeout of calls that a request waits for."""

    def __init__(
        self,
        address: str,
        trust: ClusterCredentials | str | None,
        local_rpc_path: str = "",
        call_seconds: float = 2.0,
    ) -> None:
        self._channel = open_channel(address, trust)
        self._stub = pb_grpc.KvStoreStub(self._channel)
        self._socket_path = local_rpc_path
        self._local_rpc: LocalRpcClient | None = None
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

    async def lease(self, query: LeaseRequest) -> LeasedBlocks:
        answer: pb.LeaseResponse = await self._call(lease_query_to_proto(query), self._stub.Lease)
        return leased_from_proto(answer)

    async def release(self, lease_id: str) -> None:
        """Release a lease. Over local RPC, this does not wait for the node's answer."""
        request = pb.ReleaseRequest(lease_id=lease_id)
        local = await self._open_local_rpc()
        if local is not None:
            local.notify(request)
        else:
            await self._call(request, self._stub.Release)

    async def report_damaged(self, keys: Sequence[BlockKey]) -> int:
        request = pb.ReportRequest(keys=keys_to_bytes(keys))
        answer: pb.ReportResponse = await self._call(request, self._stub.Report)
        return answer.dropped

    async def pin(self, keys: Sequence[BlockKey], seconds: float) -> int:
        request = pb.PinRequest(keys=keys_to_bytes(keys), seconds=seconds)
        answer: pb.PinResponse = await self._call(request, self._stub.Pin)
        return answer.pinned

    async def watch(self, generation: Incarnation, number: int) -> AsyncIterator[WatchEvent]:
        """Yield a snapshot of the node's keys, then every change. If the caller already has
        everything up to change ``number`` of the node's current ``generation``, only the changes
        after it are sent. When the node ends the stream, raise Unavailable."""
        request = pb.WatchRequest(generation=generation, number=number)
        with translated_rpc_errors():
            async for event in self._stub.Watch(request):
                yield watch_event_from_proto(event)
        raise Unavailable("the store node ended the stream of changes")

    async def list_blocks(
        self, filter_: BlockFilter, skip: int, limit: int
    ) -> tuple[list[StoredBlock], int]:
        request = pb.ListRequest(filter=filter_to_proto(filter_), skip=skip, limit=limit)
        with translated_rpc_errors():
            answer = await self._stub.List(request, timeout=OPERATOR_TIMEOUT_SECONDS)
        return [stored_from_proto(block) for block in answer.blocks], answer.total

    async def purge(self, filter_: BlockFilter) -> int:
        request = pb.PurgeRequest(filter=filter_to_proto(filter_))
        with translated_rpc_errors():
            answer = await self._stub.Purge(request, timeout=OPERATOR_TIMEOUT_SECONDS)
        return int(answer.purged)

    async def stat(self, *, check: bool = True) -> StoreStats:
        """Return the node's statistics. If ``check`` is True, the node also checks its integrity,
        which takes time in proportion to its blocks."""
        request = pb.StatRequest(skip_check=not check)
        with translated_rpc_errors():
            answer = await self._stub.Stat(request, timeout=OPERATOR_TIMEOUT_SECONDS)
        return StoreStats(**{name: getattr(answer, name) for name in STATS_FIELDS})

    async def close(self) -> None:
        if self._local_rpc is not None:
            self._local_rpc.close()
        await self._channel.close()

    async def _call(
        self, request: Message, over_grpc: Any, timeout_seconds: float | None = None
    ) -> Any:
        seconds = timeout_seconds or self._call_seconds
        local = await self._open_local_rpc()
        if local is not None:
            return await local.call(request, seconds)
        with translated_rpc_errors():
            return await over_grpc(request, timeout=seconds)

    async def _open_local_rpc(self) -> LocalRpcClient | None:
        """Return the local client, or None if local RPC isn't available. A socket that can't be
        reached (for example, from another container) is not tried again."""
        if self._local_rpc is None and self._socket_path:
            try:
                self._local_rpc = await LocalRpcClient.connect(self._socket_path)
            except Unavailable:
                self._socket_path = ""
        return self._local_rpc


async def fetch_store_stats(
    address: str, trust: ClusterCredentials | str | None = None
) -> StoreStats:
    client = KvStoreClient(address, trust)
    try:
        return await client.stat()
    finally:
        await client.close()
