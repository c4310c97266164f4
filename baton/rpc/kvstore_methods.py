"""The unary calls of a store node, each of which decodes a request, calls the core, and encodes the
answer. They are the same over gRPC and over local RPC."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from google.protobuf.message import Message

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
from baton.rpc.convert.common import endpoint_to_proto
from baton.rpc.convert.kvstore import (
    MAX_LISTED_BLOCKS,
    checked_seconds,
    filter_from_proto,
    keys_from_bytes,
    lease_query_from_proto,
    leased_to_proto,
    put_from_proto,
    stored_to_proto,
)
from baton.rpc.v1 import kvstore_pb2 as pb

STATS_FIELDS = tuple(StoreStats.__dataclass_fields__)


class KvStoreCore(Protocol):
    def endpoint_for(self, transports: Sequence[str], host: str) -> Endpoint: ...

    async def put(self, request: PutRequest) -> PutResult: ...

    async def lease(self, query: LeaseRequest) -> LeasedBlocks: ...

    def lease_from_dram(self, query: LeaseRequest) -> LeasedBlocks | None: ...

    def release(self, lease_id: str) -> None: ...

    async def report_damaged(self, keys: Sequence[BlockKey]) -> int: ...

    async def pin_with_promotion(self, keys: Sequence[BlockKey], seconds: float) -> int: ...

    def watch(self, generation: Incarnation, number: int) -> AsyncGenerator[WatchEvent]: ...

    def list_blocks(
        self, filter_: BlockFilter, skip: int, limit: int
    ) -> tuple[list[StoredBlock], int]: ...

    async def purge(self, filter_: BlockFilter) -> int: ...

    def stats(self, *, check: bool = True) -> StoreStats: ...


class KvStoreMethods:
    """The unary calls of a store node. Each method raises the core's errors, and Invalid for a
    malformed request."""

    def __init__(self, core: KvStoreCore) -> None:
        self._core = core

    def call_inline(self, name: str, request: Any) -> Message | None:
        """If the call never blocks, run it and return its response. Return None if the call may
        block, so that it must be run asynchronously."""
        if name == "lease":
            leased = self._core.lease_from_dram(lease_query_from_proto(request))
            return None if leased is None else leased_to_proto(leased)
        if name == "release":
            self._core.release(request.lease_id)
            return pb.ReleaseResponse()
        return None

    async def open(self, request: pb.OpenRequest) -> pb.OpenResponse:
        endpoint = self._core.endpoint_for(request.transports, request.host)
        return pb.OpenResponse(endpoint=endpoint_to_proto(endpoint))

    async def put(self, request: pb.PutRequest) -> pb.PutResponse:
        result = await self._core.put(put_from_proto(request))
        return pb.PutResponse(stored=result.num_stored, already_present=result.num_already_present)

    async def lease(self, request: pb.LeaseRequest) -> pb.LeaseResponse:
        return leased_to_proto(await self._core.lease(lease_query_from_proto(request)))

    async def release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        self._core.release(request.lease_id)
        return pb.ReleaseResponse()

    async def report(self, request: pb.ReportRequest) -> pb.ReportResponse:
        return pb.ReportResponse(
            dropped=await self._core.report_damaged(keys_from_bytes(request.keys))
        )

    async def pin(self, request: pb.PinRequest) -> pb.PinResponse:
        seconds = checked_seconds(request.seconds, "seconds")
        pinned = await self._core.pin_with_promotion(keys_from_bytes(request.keys), seconds)
        return pb.PinResponse(pinned=pinned)

    async def list(self, request: pb.ListRequest) -> pb.ListResponse:
        limit = min(request.limit or MAX_LISTED_BLOCKS, MAX_LISTED_BLOCKS)
        blocks, total = self._core.list_blocks(
            filter_from_proto(request.filter), request.skip, limit
        )
        return pb.ListResponse(blocks=[stored_to_proto(block) for block in blocks], total=total)

    async def purge(self, request: pb.PurgeRequest) -> pb.PurgeResponse:
        purged = await self._core.purge(filter_from_proto(request.filter))
        return pb.PurgeResponse(purged=purged)

    async def stat(self, request: pb.StatRequest) -> pb.StatResponse:
        stats = self._core.stats(check=not request.skip_check)
        return pb.StatResponse(**{name: getattr(stats, name) for name in STATS_FIELDS})


Call = Callable[[Any], Awaitable[Message]]

LOCAL_RPC_METHODS: tuple[tuple[type[Message], type[Message], str], ...] = (
    (pb.OpenRequest, pb.OpenResponse, "open"),
    (pb.PutRequest, pb.PutResponse, "put"),
    (pb.LeaseRequest, pb.LeaseResponse, "lease"),
    (pb.ReleaseRequest, pb.ReleaseResponse, "release"),
    (pb.ReportRequest, pb.ReportResponse, "report"),
    (pb.PinRequest, pb.PinResponse, "pin"),
)
"""The methods of the local RPC. A method's number in the protocol is its index here."""
