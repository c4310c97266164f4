"""A store node's gRPC service: decode, call the core, encode."""

from collections.abc import Sequence
from typing import Any, Protocol

import grpc.aio

from baton.core.handoff import Endpoint
from baton.core.ids import BlockKey
from baton.core.store import LeasedBlocks, PutRequest, PutResult, StoreStats
from baton.errors import Invalid
from baton.rpc.convert import (
    block_from_proto,
    block_to_proto,
    endpoint_from_proto,
    endpoint_to_proto,
)
from baton.rpc.server import answer
from baton.rpc.v1 import kvstore_pb2 as pb
from baton.rpc.v1 import kvstore_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]
MAX_KEYS = 65_536

STATS_FIELDS = tuple(StoreStats.__dataclass_fields__)


class StoreCore(Protocol):
    def endpoint_for(self, transports: Sequence[str], host: str) -> Endpoint: ...

    async def put(self, request: PutRequest) -> PutResult: ...

    def lease(self, keys: Sequence[BlockKey], seconds: float) -> LeasedBlocks: ...

    def release(self, lease_id: str) -> None: ...

    def stats(self) -> StoreStats: ...


class KvStoreService(pb_grpc.KvStoreServicer):
    def __init__(self, core: StoreCore) -> None:
        self._core = core

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenResponse:
        async def call() -> pb.OpenResponse:
            endpoint = self._core.endpoint_for(request.transports, request.host)
            return pb.OpenResponse(
                endpoint=endpoint_to_proto(endpoint),
                arena_bytes=endpoint.region_size_bytes,
                generation=endpoint.generation,
            )

        return await answer(context, call)  # type: ignore[no-any-return]

    async def Put(self, request: pb.PutRequest, context: Context) -> pb.PutResponse:
        async def call() -> pb.PutResponse:
            result = await self._core.put(_put_from_proto(request))
            return pb.PutResponse(stored=result.stored, already_present=result.already_present)

        return await answer(context, call)  # type: ignore[no-any-return]

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseResponse:
        async def call() -> pb.LeaseResponse:
            if len(request.keys) > MAX_KEYS:
                raise Invalid(f"a lease asks for at most {MAX_KEYS} keys", param="keys")
            leased = self._core.lease(
                [BlockKey(key) for key in request.keys], request.lease_seconds
            )
            return pb.LeaseResponse(
                lease_id=leased.lease_id,
                checksum_algorithm=leased.checksum_algorithm,
                blocks=[block_to_proto(block) for block in leased.blocks],
            )

        return await answer(context, call)  # type: ignore[no-any-return]

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        self._core.release(request.lease_id)
        return pb.ReleaseResponse()

    async def Stat(self, request: pb.StatRequest, context: Context) -> pb.StatResponse:
        stats = self._core.stats()
        return pb.StatResponse(**{name: getattr(stats, name) for name in STATS_FIELDS})


def add_kvstore_service(server: grpc.aio.Server, core: StoreCore) -> None:
    pb_grpc.add_KvStoreServicer_to_server(KvStoreService(core), server)


def _put_from_proto(message: pb.PutRequest) -> PutRequest:
    """Raises Invalid for no block, too many, keyless ones, or ones of several sizes."""
    blocks = tuple(block_from_proto(block) for block in message.blocks)
    if not 0 < len(blocks) <= MAX_KEYS:
        raise Invalid(f"a put has 1 to {MAX_KEYS} blocks, not {len(blocks)}", param="blocks")
    if not all(block.key for block in blocks):
        raise Invalid("every block of a put has a key", param="blocks")
    if len({block.size_bytes for block in blocks}) != 1 or not blocks[0].size_bytes:
        raise Invalid("the blocks of a put have one size", param="blocks")
    source = endpoint_from_proto(message.source)
    return PutRequest(source, message.checksum_algorithm, blocks)
