"""A store node's service, which decodes a request, calls the core, and encodes the answer. gRPC
serves all of it, and a Unix socket its unary methods, to workers of the same host."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import grpc.aio

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
    stats_to_proto,
    stored_to_proto,
    watch_event_to_proto,
)
from baton.rpc.framed.calls import call_services
from baton.rpc.framed.server import FramedServiceFactory
from baton.rpc.server import add_service
from baton.rpc.service import KV_STORE
from baton.rpc.v1 import kvstore_pb2 as pb


class WatchCore(Protocol):
    def watch(self, generation: Incarnation, number: int) -> AsyncGenerator[WatchEvent]: ...


class KvStoreCore(WatchCore, Protocol):
    def endpoint_for(self, transports: Sequence[str], host: str) -> Endpoint: ...

    async def put(self, request: PutRequest) -> PutResult: ...

    async def lease(self, query: LeaseRequest) -> LeasedBlocks: ...

    def lease_from_dram(self, query: LeaseRequest) -> LeasedBlocks | None: ...

    def release(self, lease_id: str) -> None: ...

    async def report_damaged(self, keys: Sequence[BlockKey]) -> int: ...

    async def pin_with_promotion(self, keys: Sequence[BlockKey], seconds: float) -> int: ...

    def list_blocks(
        self, filter_: BlockFilter, skip: int, limit: int
    ) -> tuple[list[StoredBlock], int]: ...

    async def purge(self, filter_: BlockFilter) -> int: ...

    def stats(self, *, check: bool = True) -> StoreStats: ...


class WatchMethods:
    """The handler of ``Watch``."""

    def __init__(self, core: WatchCore) -> None:
        self._watched = core

    async def watch(
        self, request: pb.WatchRequest, write: Callable[[pb.WatchEvent], Awaitable[None]]
    ) -> None:
        pages = self._watched.watch(Incarnation(request.generation), request.number)
        async with aclosing(pages):
            async for page in pages:
                await write(watch_event_to_proto(page))


class KvStoreMethods(WatchMethods):
    """The handlers of the methods of ``KvStore``. Each raises the core's errors, and Invalid for a
    malformed request."""

    def __init__(self, core: KvStoreCore) -> None:
        super().__init__(core)
        self._core = core

    def open(self, request: pb.OpenRequest) -> pb.OpenResponse:
        endpoint = self._core.endpoint_for(request.transports, request.host)
        return pb.OpenResponse(endpoint=endpoint_to_proto(endpoint))

    async def put(self, request: pb.PutRequest) -> pb.PutResponse:
        result = await self._core.put(put_from_proto(request))
        return pb.PutResponse(stored=result.num_stored, already_present=result.num_already_present)

    def lease(
        self, request: pb.LeaseRequest
    ) -> pb.LeaseResponse | Coroutine[Any, Any, pb.LeaseResponse]:
        """Lease blocks: at once if all of them are in DRAM."""
        query = lease_query_from_proto(request)
        leased = self._core.lease_from_dram(query)
        return self._lease(query) if leased is None else leased_to_proto(leased)

    async def _lease(self, query: LeaseRequest) -> pb.LeaseResponse:
        return leased_to_proto(await self._core.lease(query))

    def release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
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

    def list(self, request: pb.ListRequest) -> pb.ListResponse:
        limit = min(request.limit or MAX_LISTED_BLOCKS, MAX_LISTED_BLOCKS)
        blocks, total = self._core.list_blocks(
            filter_from_proto(request.filter), request.skip, limit
        )
        return pb.ListResponse(blocks=[stored_to_proto(block) for block in blocks], total=total)

    async def purge(self, request: pb.PurgeRequest) -> pb.PurgeResponse:
        purged = await self._core.purge(filter_from_proto(request.filter))
        return pb.PurgeResponse(purged=purged)

    def stat(self, request: pb.StatRequest) -> pb.StatResponse:
        return stats_to_proto(self._core.stats(check=not request.skip_check))


def add_kvstore_service(server: grpc.aio.Server, core: KvStoreCore) -> None:
    add_service(server, KV_STORE, KvStoreMethods(core))


def add_watch_service(server: grpc.aio.Server, core: WatchCore) -> None:
    """Serve ``Watch`` alone: for a worker that reports which blocks it has cached."""
    add_service(server, KV_STORE, WatchMethods(core))


def local_kvstore_services(core: KvStoreCore) -> dict[str, FramedServiceFactory]:
    return call_services(KV_STORE, KvStoreMethods(core))
