"""Client of one store node, over its Unix socket if it is on the same host, else over gRPC."""

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
from baton.errors import Unavailable, Unresponsive
from baton.rpc.channel import GrpcCalls, open_channel, translated_rpc_errors
from baton.rpc.convert.common import endpoint_from_proto
from baton.rpc.convert.kvstore import (
    filter_to_proto,
    keys_to_bytes,
    lease_query_to_proto,
    leased_from_proto,
    put_to_proto,
    stats_from_proto,
    stored_from_proto,
    watch_event_from_proto,
)
from baton.rpc.framed.calls import CallClient
from baton.rpc.service import KV_STORE
from baton.rpc.v1 import kvstore_pb2 as pb

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
        self._grpc = GrpcCalls(self._channel, KV_STORE)
        self._local = CallClient(local_rpc_path, KV_STORE) if local_rpc_path else None
        self._call_seconds = call_seconds

    async def open(self, transports: Sequence[str], host: str) -> Endpoint:
        answer: pb.OpenResponse = await self._call(
            "Open", pb.OpenRequest(transports=transports, host=host)
        )
        return endpoint_from_proto(answer.endpoint)

    async def put(self, request: PutRequest, timeout_seconds: float | None = None) -> PutResult:
        answer: pb.PutResponse = await self._call("Put", put_to_proto(request), timeout_seconds)
        return PutResult(answer.stored, answer.already_present)

    async def lease(self, query: LeaseRequest) -> LeasedBlocks:
        answer: pb.LeaseResponse = await self._call("Lease", lease_query_to_proto(query))
        return leased_from_proto(answer)

    async def release(self, lease_id: str) -> None:
        """Release a lease. Within the host, this does not wait for the node's answer."""
        request = pb.ReleaseRequest(lease_id=lease_id)
        calls = await self._calls(self._call_seconds)
        if isinstance(calls, CallClient):
            calls.notify("Release", request)
        else:
            await calls.call("Release", request, self._call_seconds)

    async def report_damaged(self, keys: Sequence[BlockKey]) -> int:
        request = pb.ReportRequest(keys=keys_to_bytes(keys))
        answer: pb.ReportResponse = await self._call("Report", request)
        return answer.dropped

    async def pin(self, keys: Sequence[BlockKey], seconds: float) -> int:
        request = pb.PinRequest(keys=keys_to_bytes(keys), seconds=seconds)
        answer: pb.PinResponse = await self._call("Pin", request)
        return answer.pinned

    async def watch(self, generation: Incarnation, number: int) -> AsyncIterator[WatchEvent]:
        """Yield a snapshot of the node's keys, then every change. If the caller already has
        everything up to change ``number`` of the node's current ``generation``, only the changes
        after it are sent. When the node ends the stream, raise Unavailable."""
        request = pb.WatchRequest(generation=generation, number=number)
        with translated_rpc_errors():
            async for event in self._grpc.open_stream("Watch", request):
                yield watch_event_from_proto(event)
        raise Unavailable("the store node ended the stream of changes")

    async def list_blocks(
        self, filter_: BlockFilter, skip: int, limit: int
    ) -> tuple[list[StoredBlock], int]:
        request = pb.ListRequest(filter=filter_to_proto(filter_), skip=skip, limit=limit)
        answer = await self._grpc.call("List", request, OPERATOR_TIMEOUT_SECONDS)
        return [stored_from_proto(block) for block in answer.blocks], answer.total

    async def purge(self, filter_: BlockFilter) -> int:
        request = pb.PurgeRequest(filter=filter_to_proto(filter_))
        answer = await self._grpc.call("Purge", request, OPERATOR_TIMEOUT_SECONDS)
        return int(answer.purged)

    async def stat(self, *, check: bool = True) -> StoreStats:
        """Return the node's statistics. If ``check`` is True, the node also checks its integrity,
        which takes time in proportion to its blocks."""
        request = pb.StatRequest(skip_check=not check)
        answer = await self._grpc.call("Stat", request, OPERATOR_TIMEOUT_SECONDS)
        return stats_from_proto(answer)

    async def close(self) -> None:
        if self._local is not None:
            self._local.close()
        await self._channel.close()

    async def _call(self, name: str, request: Message, timeout_seconds: float | None = None) -> Any:
        seconds = timeout_seconds or self._call_seconds
        calls = await self._calls(seconds)
        return await calls.call(name, request, seconds)

    async def _calls(self, timeout_seconds: float) -> CallClient | GrpcCalls:
        """Return the way to the node: its Unix socket if it has one, else gRPC. A socket that can't
        be reached (for example, from another container) is not tried again."""
        if self._local is not None:
            try:
                await self._local.connect(timeout_seconds)
            except Unresponsive:
                raise
            except Unavailable:
                self._local = None
        return self._local or self._grpc


async def fetch_store_stats(
    address: str, trust: ClusterCredentials | str | None = None
) -> StoreStats:
    client = KvStoreClient(address, trust)
    try:
        return await client.stat()
    finally:
        await client.close()
